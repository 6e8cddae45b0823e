"""`opdcl ls` and the end of a run: what a terminal shows first."""

import json
import shutil

from helpers.command import opdcl
from helpers.synthetic import alter

from opdcl.results.render import summarise
from opdcl.rundir.layout import RunDir, locked


def test_a_folder_lists_its_runs_and_names_damage(run, tmp_path):
    run.path.rename(tmp_path / "first")
    (tmp_path / "no run").mkdir()
    listed = opdcl("ls", tmp_path)
    summary = summarise(RunDir(tmp_path / "first"))
    assert listed.returncode == 0
    (line,) = [line for line in listed.stdout.splitlines() if "first" in line]
    assert f"{summary['recovery']['value']:.2f}" in line
    assert f"{summary['domain_retention']['value']:.2f}" in line
    (data,) = json.loads(opdcl("ls", tmp_path, "--json").stdout)
    assert data["recovery"] == summary["recovery"]
    assert data["state"].startswith(("recovered", "stopped"))
    with locked(RunDir(tmp_path / "first")):
        assert json.loads(opdcl("ls", tmp_path, "--json").stdout)[0]["state"].startswith("running ")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    for created in ("2026-W01-1Z", None, 3, ""):
        alter(tmp_path / "second/manifest.json", created=created)
        shown = opdcl("ls", tmp_path)
        found = [each.split() for each in shown.stdout.splitlines()]
        assert (shown.returncode, line.split() in found) == (0, True), shown.stderr
    shutil.rmtree(tmp_path / "second")
    RunDir(tmp_path / "first").eval_result("base", "instructions").write_text("{")
    damaged = opdcl("ls", tmp_path)
    assert (damaged.returncode, "damaged: " in damaged.stdout) == (0, True)


def test_no_folder_and_no_run_lead_to_the_first_run(tmp_path):
    missing = opdcl("ls", tmp_path / "runs", code=2)
    assert missing.stderr.splitlines()[-1].startswith("hint: opdcl run quickstart")
    empty = opdcl("ls", tmp_path)
    assert (empty.returncode, empty.stderr.splitlines()[-1]) == (0, "next: opdcl run quickstart")


def test_a_result_begins_with_its_sentence_and_shows_the_rest_when_asked(run):
    brief, whole = opdcl("report", run.path), opdcl("report", run.path, "--all")
    verdict = summarise(run)["verdict"]
    assert brief.stdout.splitlines()[0] == verdict == whole.stdout.splitlines()[0]
    rows = [line.split()[0] for line in brief.stdout.splitlines()[2:]]
    assert rows == ["base", "instruction", "all", "40", "the", "all", "40"]
    assert max(map(len, brief.stdout.splitlines()[1:])) <= 80
    assert "floor" in whole.stdout
    assert f"all scores: opdcl report {run.path} --all" in brief.stderr
    assert "all scores" not in whole.stderr
