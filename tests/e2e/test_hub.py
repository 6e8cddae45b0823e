"""The hub over real HTTP: upload an adapter, load it and datasets by id, download what a run lacks."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import opdcl, opdcl_process
from helpers.fake_hub import TOKEN, Hub
from helpers.warm_process import WarmProcess
from huggingface_hub import ModelCard

WORKFLOW = """
name: from-hub
model: {id: someone/tiny, dtype: float32}
start: someone/adapter
recover: {general: "someone/prompts@COMMIT", domain: "someone/rows:rooms", steps: 2, rollouts: 2,
          lmbda: 1, max_new_tokens: 6, validate_every: 2, validation_prompts: 2,
          learning_rate: 1e-2, health: false}
"""
SUITE = """
name: measured
model: {id: someone/tiny, dtype: float32}
eval: {retention: [ifeval], max_new_tokens: 64}
"""
IFEVAL = {"prompt": "Use no comma.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
WEIGHTS = "stages/02-recover/adapter/adapter_model.safetensors"
SUBSETS = b"""---
configs:
- {config_name: rooms, data_files: rooms/*.jsonl}
- {config_name: roofs, data_files: roofs/*.jsonl}
---
"""


@pytest.fixture(scope="module")
def hub(project, tiny_model, whole_model):
    """A hub with the tiny model, a full fine-tune of it, rows, and prompts, whose later version is broken."""
    hub = Hub()
    hub.add_folder("models/someone/tiny", tiny_model)
    hub.add_folder("models/someone/whole", whole_model)
    hub.commit("models/someone/tiny", {"README.md": b"---\nlicense: mit\n---\n"})
    useless = b'{"nothing": "of use"}\n'
    rooms = (project / "rows.jsonl").read_bytes()
    rows = {"README.md": SUBSETS, "rooms/train.jsonl": rooms, "roofs/train.jsonl": useless}
    hub.commit("datasets/someone/rows", rows)
    ifeval = "".join(json.dumps({"key": i, **IFEVAL}) + "\n" for i in range(3)).encode()
    hub.commit("datasets/google/IFEval", {"data.jsonl": ifeval})
    prompts = (project / "prompts.jsonl").read_bytes()
    hub.prompts = hub.commit("datasets/someone/prompts", {"train.jsonl": prompts})
    hub.commit("datasets/someone/prompts", {"train.jsonl": useless})
    yield hub
    hub.stop()


@pytest.fixture(scope="module")
def online(hub, tmp_path_factory):
    """The environment of a machine that reaches the hub and has an empty cache."""
    home = str(tmp_path_factory.mktemp("cache"))
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": home, "HF_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def connected(online):
    """Return a function that runs one command on such a machine."""
    with WarmProcess(online) as process:
        yield process


@pytest.fixture(scope="module")
def disconnected(online):
    """Return a function that runs one command on such a machine, whose libraries began without a network."""
    with WarmProcess(online | {"HF_HUB_OFFLINE": "1"}) as process:
        yield process


@pytest.fixture(scope="module")
def hf(online):
    """Return a function that runs a command of the Hub's own client there: `hf ...`."""

    def run(command: str) -> None:
        words = [str(Path(sys.executable).with_name("hf")), *shlex.split(command)[1:]]
        done = subprocess.run(words, env=os.environ | online, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture(scope="module")
def uploaded(hub, hf, connected, finished, project, tiny_model) -> str:
    """The commit of the finished run's adapter, exported and uploaded as the messages say."""
    done = connected("export", finished, "-o", "my-adapter", "--format", "adapter", cwd=project, code=0)
    replace, _, following = done.stderr.splitlines()[-3:]
    assert replace == (
        f"export: before you upload it, replace {tiny_model.name} in README.md and adapter_config.json "
        "by the base's Hub id"
    )
    for name in ("README.md", "adapter_config.json"):
        file = project / "my-adapter" / name
        file.write_text(file.read_text().replace(tiny_model.name, "someone/tiny"))
    assert following == "next: hf upload OWNER/NAME my-adapter"
    hf(f"hf upload someone/adapter {project / 'my-adapter'}")
    [commit] = hub.repositories["models/someone/adapter"]
    return commit


def test_an_uploaded_adapter_is_complete_and_the_hub_can_read_its_card(hub, uploaded, finished, project):
    files = hub.repositories["models/someone/adapter"][uploaded]
    assert set(files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert files["adapter_model.safetensors"] == (finished / WEIGHTS).read_bytes()
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "someone/tiny"
    text = files["README.md"].decode()
    assert not re.search(r"/(tmp|home|root)/", text), "a public card names no path of this machine"
    data = ModelCard(text).data
    assert (data.base_model, data.base_model_relation) == ("someone/tiny", "adapter")
    assert (data.library_name, data.pipeline_tag) == ("peft", "text-generation")
    summary = json.loads((project / "summary.json").read_text())
    expected = {name: suite["recovered"]["value"] for name, suite in summary["suites"].items()}
    assert {r.dataset_name: r.metric_value for r in data.eval_results} == expected
    assert all("recovered" in r.metric_name for r in data.eval_results)


@pytest.mark.nightly
def test_a_run_without_network_names_the_commands_that_download_what_it_lacks(
    hub, online, hf, connected, disconnected, uploaded, project
):
    file = project / "from-hub.yaml"
    file.write_text(WORKFLOW.replace("COMMIT", hub.prompts))
    run = ("run", file, "-o", "from-hub")
    asked = []
    while (offline := disconnected(*run, "--offline", "--dry-run", cwd=project)).returncode:
        assert "in the local cache" in offline.stderr
        command = re.search(r"while online: (hf download .*)", offline.stderr)[1]
        assert command not in asked, "what was downloaded is found"
        asked.append(command)
        hf(command)
    assert sorted(asked) == [
        f"hf download --repo-type dataset someone/prompts --revision {hub.prompts}",
        "hf download --repo-type dataset someone/rows",
        "hf download someone/adapter",
        "hf download someone/tiny",
    ]

    hub.asked.clear()
    # In a process of its own, where the option alone takes the libraries off the network.
    done = opdcl_process(*run, "--offline", cwd=project, env=online)
    assert done.returncode == 0, done.stderr
    assert hub.asked == [], "offline means that nobody is asked"
    record = json.loads((project / "from-hub/stages/02-recover/stage.json").read_text())
    assert record["inputs"]["content of general"] == f"someone/prompts@{hub.prompts}"
    [rows] = hub.repositories["datasets/someone/rows"]
    assert record["inputs"]["content of domain"] == f"someone/rows:rooms@{rows}"
    published = ("from-hub", "-o", "published", "--format", "adapter")
    exported = disconnected("export", *published, cwd=project, code=0)
    card = ModelCard.load(project / "published/README.md").data
    assert (card.base_model, card.license) == ("someone/tiny", "mit")
    assert "before you upload it" not in exported.stderr

    # A pinned data set stays. One that follows a branch has changed, so the adapter is stale.
    hub.commit("datasets/someone/rows", {"rooms/train.jsonl": b'{"question": "One?", "answer": "1"}\n'})
    again = disconnected(*run, "--offline", cwd=project)
    assert "nothing to do: all stages are finished" in again.stderr, again.stderr
    moved = connected(*run, cwd=project, code=2)
    assert "changed: content of domain" in moved.stderr


@pytest.mark.nightly
def test_a_dry_run_caches_the_data_of_a_stock_suite(hub, hf, connected, disconnected, project):
    file = project / "measured.yaml"
    file.write_text(SUITE)
    words = ["run", file, "--dry-run", "--json"]
    hf("hf download someone/tiny")
    without = disconnected(*words, code=2)
    assert "while online, a dry run of this command caches dataset google/IFEval" in without.stderr
    connected(*words, code=0)
    hub.asked.clear()
    done = disconnected(*words, code=0)
    assert [task["suite"] for task in json.loads(done.stdout)["tasks"]] == ["ifeval"]
    assert hub.asked == []


def test_an_adapter_on_the_hub_can_chat_and_be_exported(connected, uploaded, finished, project):
    asked = connected("chat", "someone/adapter", "Hello", "--json", "--max-new-tokens", "4", code=0)
    answers = json.loads(asked.stdout)["answers"]
    # Not the run itself, which remembers a precision: an adapter is loaded in the machine's.
    adapter = finished / "stages/02-recover/adapter"
    own = json.loads(opdcl("chat", adapter, "Hello", "--json", "--max-new-tokens", "4").stdout)["answers"]
    assert answers == own
    place = f"someone/adapter@{uploaded}"
    connected("export", place, "-o", "again", "--format", "adapter", cwd=project, code=0)
    exported = (project / "again/adapter_model.safetensors").read_bytes()
    assert exported == (finished / WEIGHTS).read_bytes()


def test_a_tuned_model_on_the_hub_is_measured(connected, project):
    words = ("someone/whole", "--base", "someone/tiny", "--retention", "instructions", "--limit", "2")
    words += ("-o", "whole-model", "--set", "eval.max_new_tokens=4", "--set", "eval.closeness=null")
    connected("eval", *words, cwd=project, code=0)
    record = json.loads((project / "whole-model/stages/01-finetune/stage.json").read_text())
    assert record["tuned_model"]["id"] == "someone/whole"
    assert {f.name for f in (project / "whole-model/evals").iterdir()} == {"base", "tuned"}


def test_what_the_hub_lacks_is_named(connected, uploaded):
    for place, message in (
        ("someone/nothing", "was found neither locally nor on the Hub"),
        ("someone/adapter@v7", "no such revision"),
    ):
        assert message in connected("chat", place, "Hello", code=2).stderr


@pytest.mark.nightly
def test_a_hub_that_cannot_be_reached_is_reported_at_once(online, finished, tmp_path):
    unreachable = online | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "empty")}
    gone = opdcl_process("chat", "someone/nothing", "Hello", env=unreachable, timeout=60)
    assert "the Hub is unreachable" in gone.stderr
    words = ("eval", finished, "--retention", "ifeval", "--dry-run")
    done = opdcl_process(*words, env=unreachable, timeout=200)
    assert done.returncode == 2
    assert "could not load the data of suite 'ifeval'" in done.stderr
    assert "Retrying" not in done.stderr
