"""General prompts of several sources: their shares, what is held out, and the kinds that are added."""

from collections import Counter

import pytest

from opdcl.config.load import load, validate
from opdcl.config.recover import RecoverConfig, split_share
from opdcl.data.formats import Row
from opdcl.data.prompt_kinds import KINDS, SHARES, prompt_kind
from opdcl.distill import mixture
from opdcl.distill.mixture import OWN_SHARE, PLACEHOLDER, described, read_mixture, with_written
from opdcl.distill.prompts import encode_stream, read_recovery_source
from opdcl.errors import UsageError

# 12 general steps with 8 prompts each.
DRAWN, STEPS = 96, {"steps": 24, "rollouts": 8, "validation_prompts": 8}


def prompts(name, count, text="Why is {} like number {}?"):
    return [
        Row([{"role": "user", "content": text.format(name, i)}], None, None, f"{name} row {i}")
        for i in range(count)
    ]


SHIPPED = [
    Row(
        [{"role": "user", "content": f"A prompt of kind {kind}, number {i}."}],
        None,
        None,
        "shipped",
        group=kind,
    )
    for i in range(10)
    for kind in KINDS
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
        (["a=0.5", "b", "self"], {"a": 0.5, "b": 0.25, "self": 0.25}),
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


def test_an_equals_sign_without_a_number_behind_it_belongs_to_the_name():
    assert split_share("k=v.jsonl") == ("k=v.jsonl", None)
    assert split_share("k=v.jsonl=0.25") == ("k=v.jsonl", 0.25)
    assert split_share("=0.25") == ("=0.25", None)


def test_sources_are_mixed_in_their_shares_without_held_out_ones():
    found = mixed(["a=0.75", "b=0.25"])
    assert sources(found.train) == {"a": 0.75 * DRAWN, "b": 0.25 * DRAWN}
    assert sources(found.held_out) == {"a": 6, "b": 2}
    assert not {*texts(found.train)} & {*texts(found.held_out)}
    # A source with fewer prompts repeats all of them equally often, up to one.
    assert {*Counter(texts(found.train)).values()} == {1, 2}
    assert found.added == ()


def test_the_same_seed_draws_the_same_prompts_and_another_seed_others():
    first, again, other = (texts(mixed(["a", "b"], seed=seed).train) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_shipped_part_holds_out_its_own_validation_prompts():
    found = mixed(["everyday", "a"])
    shipped = [text for text in texts(found.held_out) if text.startswith("A prompt of kind")]
    assert len(shipped) == len(KINDS)  # one each at least
    assert {*shipped} <= {*texts(SHIPPED[72:])}
    assert sum(text.startswith("A prompt") for text in texts(found.train)) == pytest.approx(DRAWN / 2, abs=4)


def test_a_list_of_one_source_is_taken_as_it_is():
    found = mixed(["code"])
    assert texts(found.train) == texts(FILES["code"])
    assert (found.held_out, found.added) == (None, ())


def test_a_file_alone_gets_shipped_prompts_of_the_kinds_that_it_lacks():
    found = mixed("code")
    lacking = [kind for kind in KINDS if kind != "code"]
    assert list(found.added) == lacking
    kinds = Counter(map(prompt_kind, found.train))
    # Half stays the file's own; the other half is shared in proportion.
    assert kinds["code"] == OWN_SHARE * DRAWN
    added = {kind: OWN_SHARE * SHARES[kind] / sum(map(SHARES.get, lacking)) for kind in lacking}
    assert {kind: kinds[kind] for kind in lacking} == {k: round(share * DRAWN) for k, share in added.items()}
    # Each part is also measured.
    assert {*map(prompt_kind, found.held_out)} == {*KINDS}
    assert not {*texts(found.train)} & {*texts(found.held_out)}


def test_a_lacking_kind_gets_the_share_that_it_should_have_with_those_of_the_file(monkeypatch):
    rows = [row for row in SHIPPED if row.group != "fact"] * 4 + SHIPPED[:20:9]
    monkeypatch.setitem(FILES, "few facts", rows)
    found = mixed("few facts")
    assert found.added == ("fact",)
    kinds = Counter(map(prompt_kind, found.train))
    assert kinds["fact"] == pytest.approx(SHARES["fact"] * DRAWN, abs=2)
    # The other kinds keep their proportions.
    assert max(kinds[kind] for kind in KINDS if kind != "fact") < 0.15 * DRAWN


def test_a_file_that_lacks_nothing_stays_as_it_is(monkeypatch):
    whole = SHIPPED + SHIPPED[::9] * 2
    monkeypatch.setitem(FILES, "whole", whole)
    assert texts(mixed("whole").train) == texts(whole)


def test_the_shipped_prompts_are_drawn_kind_by_kind():
    found = mixed("everyday")
    kinds = Counter(map(prompt_kind, found.train))
    rest = (1 - sum(SHARES.values())) / len(KINDS)
    assert kinds == {kind: round((share + rest) * DRAWN) for kind, share in SHARES.items()}
    assert max(kinds, key=kinds.get) == "fact"
    assert {*map(prompt_kind, found.held_out)} == {*KINDS}
    assert {*texts(found.held_out)} <= {*texts(SHIPPED[72:])}
    assert found.added == ()


def test_prompts_in_another_language_lack_all_kinds_and_the_user_is_told():
    french = prompts("f", 30, "Pourquoi la mer {} est-elle plus salée que le lac {} ?")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FILES, "french", french)
        found = mixed("french")
    assert list(found.added) == list(KINDS)
    kinds, added = described(found.train, found.added)
    assert "are not in English" in kinds
    assert sum(prompt_kind(row) == "foreign" for row in found.train) == OWN_SHARE * DRAWN
    assert "shipped ones were added: short facts, requests with constraints, " in added


def test_what_the_user_declined_is_missing_and_the_user_is_told():
    kinds, missing = described(mixed(["code"]).train, ())
    assert kinds == "kinds of general prompts: 100% code"
    assert missing.startswith("too few of the general prompts are short facts, ")
    assert "code" not in missing


def test_a_run_keeps_the_share_of_each_kind():
    found = mixture.recorded(mixed("code").train, mixed("code").added)
    assert [*found] == [*KINDS]
    assert found["fact"].items() > {"name": "short facts", "added": True, "lacking": False}.items()
    assert sum(entry["share"] for entry in found.values()) == pytest.approx(1, abs=1e-3)
    alone = mixture.recorded(FILES["code"], ())
    assert [kind for kind, entry in alone.items() if not entry["lacking"]] == ["code"]
    assert mixture.recorded(prompts("f", 3, "Où est-ce que {} habite {} ?"), ())["foreign"]["share"] == 1


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 96 + 8),
        ({"general_per_domain": 3, "validation_prompts": 4}, 18 * 8 + 4),
        ({"has_domain": False}, 24 * 8 + 8),
        ({"method": "general"}, 24 * 8 + 8),
        ({"steps": 10_000}, mixture.MOST + 8),
    ],
)
def test_base_writes_as_many_prompts_as_are_drawn_and_held_out(settings, count):
    found = mixed("self", **settings)
    assert found.train == [PLACEHOLDER] * count
    assert found.held_out is None


def test_base_writes_its_share_of_a_mixture():
    found = mixed(["self=0.25", "a=0.75"])
    assert sum(row is PLACEHOLDER for row in found.train) == 24
    assert sum(row is PLACEHOLDER for row in found.held_out) == 2
    written = prompts("own", 26)
    train, held_out = with_written([found.train, found.held_out], written)
    assert [row for row in train if row.where.startswith("own")] == written[:24]
    assert [row for row in held_out if row.where.startswith("own")] == written[24:]
    assert sources(train) == {"own": 24, "a": 72}
    assert described(found.train, ()) != []
    assert described([PLACEHOLDER], ()) == []


def test_the_only_prompt_of_a_source_is_practised_and_not_held_out():
    found = mixed(["a", "one"])
    assert sources(found.train) == {"a": DRAWN / 2, "one": DRAWN / 2}
    assert sources(found.held_out) == {"a": 4}


def test_files_in_a_list_are_found_beside_the_workflow(tmp_path):
    (tmp_path / "w.yaml").write_text("recover: {general: [everyday=0.3, mine.jsonl=0.7]}\n")
    flow, _ = load([str(tmp_path / "w.yaml")])
    assert flow.recover.general == ["everyday=0.3", f"{tmp_path / 'mine.jsonl'}=0.7"]
    assert flow.data_sources() == {
        "recover.general.0": "everyday",
        "recover.general.1": str(tmp_path / "mine.jsonl"),
    }


def test_what_a_file_is_topped_up_from_is_one_of_the_sources(tmp_path):
    given = str(tmp_path / "mine.jsonl")
    flow = validate({"recover": {"general": given}})
    assert flow.data_sources() == {"recover.general": given, "recover.general.added": "everyday"}
    assert validate({"recover": {"general": "everyday"}}).data_sources() == {"recover.general": "everyday"}
    assert validate({"recover": {"general": ["self"]}}).data_sources() == {}


@pytest.mark.parametrize("general", [["a", "repeated"], ["repeated"]])
def test_a_prompt_that_a_file_repeats_is_not_both_practised_and_held_out(backbone, monkeypatch, general):
    monkeypatch.setitem(FILES, "repeated", prompts("repeated", 12) * 4)
    config = RecoverConfig(general=general, **STEPS)
    source = read_recovery_source(config, read_rows)
    practised = encode_stream(config, source, "general", backbone.tokenizer, 512)
    train, held_out = (
        {tuple(prompt.ids) for prompt in part} for part in (practised.train, practised.held_out)
    )
    assert held_out
    assert train
    assert not train & held_out


def test_prompts_that_are_all_the_same_are_practised_beside_others_and_refused_alone(backbone, monkeypatch):
    monkeypatch.setitem(FILES, "same", prompts("same", 1) * 6)
    found = mixed(["a", "same"])
    assert "same" in sources(found.train)
    assert "same" not in sources(found.held_out)
    config = RecoverConfig(general=["same"], **STEPS)
    with pytest.raises(UsageError, match="all the same"):
        encode_stream(config, read_recovery_source(config, read_rows), "general", backbone.tokenizer, 512)
