"""General prompts of several sources: their shares, and what is held out."""

from collections import Counter

import pytest

from opdcl.config.load import load, validate
from opdcl.config.recover import RecoverConfig, split_share
from opdcl.data.chat import encode_prompt
from opdcl.data.formats import Row
from opdcl.data.prompts import GROUPS, encode_stream, read_mixture, read_recovery_source
from opdcl.errors import UsageError

# 12 general steps with 8 prompts each.
DRAWN, STEPS = 96, {"steps": 24, "rollouts": 8, "validation_prompts": 8}


def prompts(name, count, text="Why is {} like number {}?"):
    return [
        Row([{"role": "user", "content": text.format(name, i)}], None, None, f"{name} row {i}")
        for i in range(count)
    ]


SHIPPED = [
    Row([{"role": "user", "content": f"Prompt {i} of {group}."}], None, None, "shipped", group=group)
    for i in range(10)
    for group in GROUPS
]
FILES = {
    "everyday": SHIPPED[:72],
    "validation of everyday": SHIPPED[72:],
    "a": prompts("a", 200),
    "b": prompts("b", 20),
    "code": prompts("code", 50, "Write {} function {} in Python."),
    "one": prompts("one", 1),
}


def read_rows(source, split="train"):
    return FILES[source if split == "train" else f"{split} of {source}"]


def mixed(general, has_domain=True, **settings):
    return read_mixture(RecoverConfig(general=general, **STEPS | settings), read_rows, has_domain)


def encoded(backbone, *general):
    """Return the general stream on prompts of these sources."""
    config = RecoverConfig(general=[*general], **STEPS)
    return encode_stream(config, read_recovery_source(config, read_rows), "general", backbone.tokenizer, 512)


def sources(rows):
    return Counter(row.where.split()[0] for row in rows)


def texts(rows):
    return [row.prompt[0]["content"] for row in rows]


@pytest.mark.parametrize(
    ("general", "shares"),
    [
        (["a"], {"a": 1.0}),
        (["a", "b"], {"a": 0.5, "b": 0.5}),
        (["a=0.75", "b=.25"], {"a": 0.75, "b": 0.25}),
        (["a=0.5", "b", "c"], {"a": 0.5, "b": 0.25, "c": 0.25}),
        (["dir=x/a.jsonl", "b"], {"dir=x/a.jsonl": 0.5, "b": 0.5}),
        ("a=0.5", {"a=0.5": 1.0}),
    ],
)
def test_shares_are_those_that_were_named_and_equal_parts_of_the_rest(general, shares):
    assert RecoverConfig(general=general).general_sources() == pytest.approx(shares)


@pytest.mark.parametrize("general", [["a=0.5", "b=0.6"], ["a=1", "b"], ["a", "a"], ["a=0", "b"], ["a=0.3"]])
def test_shares_that_are_no_whole_are_refused(general):
    with pytest.raises(UsageError, match="add up to 1"):
        validate({"recover": {"general": general}})


@pytest.mark.parametrize("general", ["self", ["self"], ["everyday", "self=0.25"]])
def test_prompts_that_base_would_write_are_refused_with_what_to_do(general):
    with pytest.raises(UsageError, match=r"recover\.general cannot be self") as refused:
        validate({"recover": {"general": general}})
    assert "name the file" in refused.value.hint


def test_an_equals_sign_without_a_number_behind_it_belongs_to_the_name():
    assert split_share("k=v.jsonl") == ("k=v.jsonl", None)
    assert split_share("k=v.jsonl=0.25") == ("k=v.jsonl", 0.25)
    assert split_share("=0.25") == ("=0.25", None)


def test_sources_are_mixed_in_their_shares_without_held_out_ones():
    train, held_out = mixed(["a=0.75", "b=0.25"])
    assert sources(train) == {"a": 0.75 * DRAWN, "b": 0.25 * DRAWN}
    assert sources(held_out) == {"a": 6, "b": 2}
    assert not {*texts(train)} & {*texts(held_out)}
    # A source with fewer prompts repeats all of them equally often, up to one.
    assert {*Counter(texts(train)).values()} == {1, 2}


def test_the_same_seed_draws_the_same_prompts_and_another_seed_others():
    first, again, other = (texts(mixed(["a", "b"], seed=seed)[0]) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("general", ["code", ["code"]])
def test_a_file_alone_is_taken_as_it_is(general):
    train, held_out = mixed(general)
    assert texts(train) == texts(FILES["code"])
    assert held_out is None


def test_the_shipped_prompts_are_drawn_group_by_group():
    train, held_out = mixed("everyday")
    groups = Counter(row.group for row in train)
    assert groups == {group: round(share * DRAWN) for group, share in GROUPS.items()}
    assert groups["fact"] == pytest.approx(DRAWN / 3, abs=1)
    assert {row.group for row in held_out} == {*GROUPS}
    assert {*texts(held_out)} <= {*texts(SHIPPED[72:])}


def test_a_shipped_part_holds_out_its_own_validation_prompts():
    train, held_out = mixed(["everyday", "a"])
    shipped = [text for text in texts(held_out) if text.startswith("Prompt ")]
    assert len(shipped) == len(GROUPS)  # one each at least
    assert {*shipped} <= {*texts(SHIPPED[72:])}
    assert sum(text.startswith("Prompt ") for text in texts(train)) == pytest.approx(DRAWN / 2, abs=4)


def test_the_only_prompt_of_a_source_is_practised_and_not_held_out():
    train, held_out = mixed(["a", "one"])
    assert sources(train) == {"a": DRAWN / 2, "one": DRAWN / 2}
    assert sources(held_out) == {"a": 4}


def test_files_in_a_list_are_found_beside_the_workflow(tmp_path):
    (tmp_path / "w.yaml").write_text("recover: {general: [everyday=0.3, mine.jsonl=0.7]}\n")
    flow, _ = load([str(tmp_path / "w.yaml")])
    assert flow.recover.general == ["everyday=0.3", f"{tmp_path / 'mine.jsonl'}=0.7"]
    assert flow.data_sources() == {
        "recover.general.0": "everyday",
        "recover.general.1": str(tmp_path / "mine.jsonl"),
    }
    assert validate({"recover": {"general": "my.jsonl"}}).data_sources() == {"recover.general": "my.jsonl"}


@pytest.mark.parametrize("general", [["a", "repeated"], ["repeated"]])
def test_a_prompt_that_a_file_repeats_is_not_both_practised_and_held_out(backbone, monkeypatch, general):
    monkeypatch.setitem(FILES, "repeated", prompts("repeated", 12) * 4)
    practised = encoded(backbone, *general)
    parts = (practised.train, practised.held_out)
    train, held_out = ({tuple(prompt.ids) for prompt in part} for part in parts)
    assert held_out
    assert train
    assert not train & held_out


def test_prompts_that_are_all_the_same_are_practised_beside_others_and_refused_alone(backbone, monkeypatch):
    monkeypatch.setitem(FILES, "same", prompts("same", 1) * 6)
    train, held_out = mixed(["a", "same"])
    assert "same" in sources(train)
    assert "same" not in sources(held_out)
    with pytest.raises(UsageError, match="all the same"):
        encoded(backbone, "same")


def test_a_prompt_leads_back_to_its_row_where_shipped_ones_without_room_are_left_out(backbone):
    config = RecoverConfig(general=["everyday"], max_new_tokens=8, **STEPS)
    source = read_recovery_source(config)
    encoded = encode_stream(config, source, "general", backbone.tokenizer, 60)
    rows = source.rows["general"]
    assert 0 < len(encoded.train) < len(rows)
    for prompt in encoded.train:
        assert encode_prompt(rows[prompt.number], backbone.tokenizer, 10_000) == prompt.ids
    row = source.held_out["general"][encoded.held_out[0].number]
    assert encode_prompt(row, backbone.tokenizer, 10_000) == encoded.held_out[0].ids
    assert encoded.questions[0] == row.shown()


@pytest.mark.parametrize("context", [16, 45])
def test_shipped_prompts_of_which_none_leaves_room_for_an_answer_are_refused(backbone, context):
    config = RecoverConfig(general=["everyday"], max_new_tokens=8, **STEPS)
    source = read_recovery_source(config)
    longest = max(source.held_out["general"], key=lambda row: len(row.shown()))
    source.held_out["general"] = [longest]  # at 45, some rows to train on have room, and it has none
    with pytest.raises(UsageError, match=r"no prompt of the general stream leaves room .* context of \d+"):
        encode_stream(config, source, "general", backbone.tokenizer, context)


def test_sources_of_one_prompt_each_leave_none_to_hold_out(backbone, monkeypatch):
    monkeypatch.setitem(FILES, "another", prompts("another", 1))
    with pytest.raises(UsageError, match="no prompt of the general stream can be held out"):
        encoded(backbone, "one", "another")
