"""A prompt whose score has several parts."""

from helpers.synthetic import measure, rewrite_samples, workflow, write

from opdcl.results import intervals
from opdcl.results.render import summarise
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir


def test_a_prompt_with_more_parts_weighs_more_and_its_parts_stay_together(tmp_path):
    run, metric = RunDir(tmp_path), "inst_level_strict_acc"
    write(run.config, {"workflow": workflow(), "origins": {}})
    measure(run, "base", {"instructions": range(8)}, n=12, metric=metric)
    parts = [[True, True, True] if i % 2 else [i % 3 > 0] for i in range(12)]
    rows = read_jsonl(run.eval_samples("base", "instructions"))
    for row, scores in zip(rows, parts, strict=True):
        row["scores"][metric] = scores
    rewrite_samples(run, "base", "instructions", rows)
    base = summarise(run)["suites"]["instructions"]["base"]
    assert base == vars(intervals.clustered_mean(parts).rounded())
    assert base["value"] == round((18 + 4) / (18 + 6), 6)
    assert base["value"] > sum(map(all, parts)) / 12
