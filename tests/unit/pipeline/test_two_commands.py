"""Two commands share a directory: what the first has finished outlives the second, whenever that began."""

import json
import sys

import pytest

from opdcl.config.load import validate
from opdcl.console import Output
from opdcl.errors import UsageError
from opdcl.pipeline.execute import execute
from opdcl.pipeline.job import Job, Order
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import verify

_before_lock = []


def _audit(event, arguments):
    """Call what waits for the moment in which a command that has checked everything opens the lock file."""
    if event == "open" and _before_lock and str(arguments[0]).endswith(".lock"):
        _before_lock.pop()()


sys.addaudithook(_audit)


@pytest.fixture
def command(tmp_path, tiny_model):
    """Return a function that fine-tunes on some answers, as `opdcl finetune -o out` does."""

    def finetune(answer: str, force: bool = False):
        rows = [{"question": f"What is the code of room {i}?", "answer": f"{answer} {i}"} for i in range(4)]
        file = tmp_path / f"{answer}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree = {
            "model": {"id": str(tiny_model), "dtype": "float32"},
            "finetune": {"data": str(file), "epochs": 1, "batch_size": 4, "lora": {"r": 4, "alpha": 8}},
        }
        return execute(
            Job(validate(tree), RunDir(tmp_path / "out"), order=Order(force=force)), Output("quiet")
        )

    yield finetune
    _before_lock.clear()


@pytest.fixture
def weights(tmp_path):
    return tmp_path / "out" / "stages" / "01-finetune" / "adapter" / "adapter_model.safetensors"


def test_a_command_that_checked_before_another_one_finished_is_refused(command, weights, tmp_path):
    finished = []

    def other_command():
        command("Code")
        finished.append(weights.read_bytes())

    _before_lock.append(other_command)
    with pytest.raises(UsageError, match="was made with other settings or data") as caught:
        command("Number")
    assert caught.value.exit_code == 2
    assert [weights.read_bytes()] == finished
    assert "Code.jsonl" in (tmp_path / "out" / "workflow.yaml").read_text()
    assert all(finding.ok for finding in verify(RunDir(tmp_path / "out")))


def test_the_same_command_takes_what_the_other_one_finished(command, weights):
    finished = []

    def other_command():
        command("Code")
        finished.append(weights.stat().st_mtime_ns)

    _before_lock.append(other_command)
    command("Code")
    assert [weights.stat().st_mtime_ns] == finished


def test_what_is_damaged_while_a_command_checks_is_not_taken_for_whole(command, weights):
    """The plan knows an adapter by its weights, so its settings are looked at under the lock."""
    command("Code")
    settings = weights.with_name("adapter_config.json")
    _before_lock.append(lambda: settings.write_text(settings.read_text().replace("8", "88")))
    with pytest.raises(UsageError, match="has changed"):
        command("Code")
    assert "88" in settings.read_text()
