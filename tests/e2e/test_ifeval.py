"""The official IFEval from a local file: the scores are those of lm-eval's own functions, for every state."""

import json
import shutil
from collections import Counter

import pytest
from helpers.command import ROOT, opdcl

from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir

pytestmark = pytest.mark.nightly  # tests/e2e/test_likelihood.py has three of its prompts

METRICS = [f"{level}_level_{kind}_acc" for level in ("prompt", "inst") for kind in ("strict", "loose")]


def official_rows() -> list[dict]:
    """Return prompts with each instruction type twice; an instruction names only the arguments it uses."""
    text = (ROOT / "evals" / "ifeval" / "prompts.jsonl").read_text(encoding="utf-8")
    rows, types = [], Counter()
    for row in map(json.loads, text.splitlines()):
        if min(types[name] for name in row["instruction_id_list"]) < 2:
            types.update(row["instruction_id_list"])
            row["kwargs"] = [{k: v for k, v in kwargs.items() if v is not None} for kwargs in row["kwargs"]]
            rows.append(row)
    return rows


@pytest.fixture(scope="module")
def rows():
    return official_rows()


@pytest.fixture(scope="module")
def measured(finished, rows, tmp_path_factory) -> RunDir:
    folder = tmp_path_factory.mktemp("ifeval")
    shutil.copytree(finished, folder / "run")
    (folder / "official.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--retention", "ifeval", "--data", "ifeval=official.jsonl"]
    long = ["--set", "eval.limit=null", "--set", "eval.max_new_tokens=24", "--set", "eval.domain=[]"]
    long += ["--set", "eval.closeness=null"]
    done = opdcl("eval", "run", *options, *long, "--force", cwd=folder)
    assert done.returncode == 0, done.stderr
    return RunDir(folder / "run")


@pytest.mark.parametrize("state", ["base", "tuned", "recovered"])
def test_scores_are_those_of_lm_evals_own_functions(measured, rows, state):
    import langdetect
    from lm_eval.tasks.ifeval import utils

    langdetect.DetectorFactory.seed = 0
    assert len({name for row in rows for name in row["instruction_id_list"]}) == 25
    answers = read_jsonl(measured.eval_samples(state, "ifeval"))
    assert [answer["prompt"] for answer in answers] == [row["prompt"] for row in rows]
    expected = [
        utils.process_results(row, [answer["response"]]) for row, answer in zip(rows, answers, strict=True)
    ]
    assert [answer["scores"] for answer in answers] == expected
    means = {m: sum(e[m] for e in expected) / len(rows) for m in METRICS[:2]}
    means |= {m: utils.agg_inst_level_acc([e[m] for e in expected]) for m in METRICS[2:]}
    result = read_json(measured.eval_result(state, "ifeval"))
    assert result["metrics"] == pytest.approx(means, abs=1e-6)
    assert result["metric"] == "prompt_level_strict_acc"
    # Answers of a random model follow some instructions and miss others, so no score is trivial.
    assert all(0 < mean < 1 for mean in means.values())
