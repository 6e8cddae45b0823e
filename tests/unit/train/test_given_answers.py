"""Answers that general rows have take the place of base's: graded token by token, and never sampled."""

import json

import pytest
import torch
from helpers.recovering import Notes, recover_rows, short_recovery, train, whole_and_resumed
from helpers.teaching import encode

from opdcl.config.load import validate
from opdcl.config.workflow import meaningful_settings
from opdcl.data.prompts import read_recovery_source
from opdcl.data.rows import load_rows
from opdcl.errors import UsageError
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.stage import StageDir

GIVEN = {"given_answers": True, "lmbda": 0.0, "max_new_tokens": 12}


@pytest.fixture
def rows(tuned):
    """Give every general row an answer; return the rows."""
    written = [
        {"question": f"Write a line about {i}.", "answer": f"The number {i} is" + " even" * (2 * i)}
        for i in range(8)
    ]
    (tuned / "general.jsonl").write_text("\n".join(map(json.dumps, written)))
    return load_rows(str(tuned / "general.jsonl"))


def test_the_held_out_kl_is_that_of_the_given_answers(backbone, tuned, rows):
    metrics = read_jsonl(train(backbone, tuned, "given", short_recovery(tuned, **GIVEN)).metrics)
    prompts = encode(short_recovery(tuned, **GIVEN), "general", backbone)
    backbone.drop_adapters()
    backbone.load_adapter(tuned / "tuned", "student")
    divergences = []
    for prompt in prompts.held_out:
        answer = prompt.answer[:12]
        ids = torch.tensor([prompt.ids + answer])
        places = slice(len(prompt.ids) - 1, -1)
        with torch.no_grad():
            log_p = backbone.causal_lm(ids).logits[0, places].double().log_softmax(-1)
            with backbone.state("base") as base:
                log_q = base(ids).logits[0, places].double().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
    expected = float(torch.cat(divergences).mean())
    assert metrics[0]["validation"]["general_kl"] == pytest.approx(expected, rel=1e-3)
    of_steps = [row for row in metrics if row.get("stream") == "general"]
    lengths = [min(len(prompt.answer), 12) for prompt in prompts.train]
    assert all(4 * min(lengths) <= row["tokens"] <= 4 * max(lengths) for row in of_steps)


def test_an_answer_has_the_ids_that_a_fine_tune_learns_and_ends(backbone, tuned, rows):
    prompts = encode(short_recovery(tuned, **GIVEN), "general", backbone)
    texts = {backbone.tokenizer.decode(p.answer) for p in prompts.train + prompts.held_out}
    assert texts == {f"{row.answer}<|im_end|>" for row in rows}
    assert all(p.answer is None for p in encode(short_recovery(tuned, **GIVEN), "domain", backbone).train)


def test_it_says_how_many_are_given_and_cut(backbone, tuned, rows):
    notes, config = Notes(), short_recovery(tuned, **GIVEN | {"steps": 1})
    recover_rows(config, backbone, tuned / "tuned", StageDir(tuned / "out"), notes)
    prompts = encode(config, "general", backbone)
    cut = sum(len(p.answer) > 12 for p in prompts.train + prompts.held_out)
    assert 0 < cut < 8
    line = "the answers of 8 general rows are graded as they are; "
    assert f"{line}{cut} of them are cut at recover.max_new_tokens, 12" in notes.lines


def test_a_recovery_from_given_answers_resumes_to_the_same_bits(backbone, tuned, rows):
    config = short_recovery(tuned, **GIVEN | {"lmbda": 0.5, "health": False})
    whole_and_resumed(backbone, tuned, config, stop=4)


def test_a_row_without_an_answer_is_refused_with_its_line(tuned):
    with pytest.raises(UsageError, match=r"general\.jsonl:1 has no answer to learn from") as caught:
        read_recovery_source(short_recovery(tuned, **GIVEN))
    assert "`completion` beside `prompt`" in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": {"kind": "policy_gradient"}}, "nobody sampled these answers"),
        ({"general": None, "general_per_domain": 0}, "given_answers has no effect without rows"),
        (
            {"reward": {"suite": "instructions_train"}, "keep": "last", "lmbda": 1.0},
            "given_answers has no effect without rows",
        ),
    ],
)
def test_what_cannot_learn_from_them_is_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        validate({"recover": {"given_answers": True, **settings}})


def test_a_finished_run_stays_what_it_was():
    before = {"steps": 5, "lmbda": 0.5}
    for name, former, other in (("given_answers", False, True), ("author", "base", "student")):
        assert meaningful_settings(before | {name: former}) == before
        assert meaningful_settings(before | {name: other}) != before
