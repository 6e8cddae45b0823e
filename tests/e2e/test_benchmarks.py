"""Every script in benchmarks/ runs, on the two-layer model under the embedded one's name and at tiny sizes.

Where a script needs a GPU, docker or a server, the part that can run does.
"""

import copy
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.command import ROOT
from helpers.serving import serving

from opdcl.model.backbone import Backbone

pytestmark = pytest.mark.nightly

SCRIPTS = ROOT / "benchmarks"


@pytest.fixture
def script(tiny_cache, tmp_path, monkeypatch):
    """Return a function that loads a script of benchmarks/ as a module."""
    monkeypatch.setenv("OPDCL_CACHE", str(tiny_cache))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS / "reliability"))
    monkeypatch.chdir(tmp_path)

    def load(name: str):
        spec = importlib.util.spec_from_file_location(Path(name).stem.strip("_"), SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Return a function that calls a script's `main` with these words; return the record it wrote."""

    def run(module, *words, out: str = "record.json"):
        file = tmp_path / out
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words), "--out", str(file)])
        module.main()
        return json.loads(file.read_text()) if file.exists() else None

    return run


@pytest.mark.parametrize("arm", ["opdcl", "stock-tuned"])
def test_speed_measures_an_arm(script, monkeypatch, capsys, arm):
    speed = script("speed")
    words = ["steps", "--arm", arm, "--prompts", "4", "--new-tokens", "6", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["speed.py", *words])
    speed.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["completions"] for row in found["steps"]] == [4, 4]
    assert all(4 <= row["completion_tokens"] <= 24 for row in found["steps"])
    parts = sum(found["median"][part] for part in speed.PARTS)
    assert parts == pytest.approx(found["median"]["step"])
    assert min(found["median"][part] for part in ("sample", "student", "backward")) > 0


def test_the_losses_agree(script, monkeypatch, capsys):
    speed = script("speed")
    monkeypatch.setattr(speed, "fast_half", lambda: False)  # in bf16 the three round differently
    monkeypatch.setattr(sys, "argv", ["speed.py", "agreement", "--new-tokens", "6"])
    speed.main()
    found = json.loads(capsys.readouterr().out)
    for other in ("DistillationTrainer", "GKDTrainer"):
        assert found["opdcl"] == pytest.approx(found[other], rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_the_gpu_script_says_that_it_needs_one(script, call):
    with pytest.raises(SystemExit, match="no CUDA device"):
        call(script("gpu"))


def test_an_arm_of_the_gpu_script_that_fails_is_a_result(script, tmp_path):
    gpu, out = script("gpu"), tmp_path / "gpu.jsonl"
    rows = gpu.run_arms(["decode no-such-shape 2", "quickstart"], time.monotonic() + 0.01, out)
    assert "KeyError: 'no-such-shape'" in rows[0]["failed"]
    assert rows[1]["failed"] == "no time was left"
    assert [json.loads(line)["arm"] for line in out.read_text().splitlines()] == [row["arm"] for row in rows]
    found = gpu.figures("decode", gpu.EMBEDDED, "2")
    assert found["tokens_per_s"] == pytest.approx(2 / found["step"])
    good = {"arm": "decode qwen3-8b 64", **found, "peak_bytes": 3e9}
    assert gpu.table([*rows, good]).splitlines()[-1].endswith("| 3.0 |  | 5,500 tokens/s; vLLM 4,315 |")


def test_engines_agree_on_greedy_answers(script, call):
    words = ["engines", "--prompts", 3, "--new-tokens", 6, "--engines", "slab", "generate"]
    record = call(script("speed"), *words, "--dtype", "float32")
    assert record["machine"]["dtype"] == "torch.float32"
    assert {row["dtype"] for row in record["engines"].values()} == {"torch.float32"}
    assert [row["differing"] for row in record["engines"].values()] == [0, 0]


def test_sabotage_is_refused_or_runs(script, call, finished, monkeypatch):
    sabotage = script("sabotage")
    cases = ["a uniform teacher", "a reward for length"]
    counts = ("rollouts", "domain_rollouts", "max_new_tokens", "domain_max_new_tokens", "validation_prompts")
    for name in cases:
        spoil, settings = sabotage.CASES[name]
        monkeypatch.setitem(sabotage.CASES, name, (spoil, settings | dict.fromkeys(counts, 2)))
    # A tiny random model may be as unsure as a teacher that guesses.
    spoil, settings = sabotage.CASES[cases[1]]
    monkeypatch.setitem(sabotage.CASES, cases[1], (spoil, settings | {"health": False}))
    adapter = finished / "stages" / "01-finetune" / "adapter"
    rows = call(sabotage, adapter, "--steps", 2, "--cases", *cases)["rows"]
    assert [row["sabotage"] for row in rows] == cases
    assert "close to uniform" in rows[0]["ends"]
    assert [row["steps"] for row in rows] == [0, 2]


def test_closeness_tells_what_is_spoilt_from_what_is_base(script, call, finished):
    adapter = finished / "stages" / "01-finetune" / "adapter"
    record = call(script("closeness"), adapter, "--prompts", 3, "--tokens", 5)
    distances = {row["case"]: row["distance"]["value"] for row in record["rows"]}
    same = ("no change", "tuned, scaled by 0", "base on other draws")
    assert max(distances[name] for name in same) < 1e-5
    assert distances["tuned"] > distances["tuned, scaled by 0.25"] > 1e-5
    for name in ("an echo of the prompt's first sentence", "base's answers to other prompts"):
        assert distances[name] > distances["tuned"]
    assert record["base"]["distance"]["value"] < distances["tuned"] / 10


@pytest.fixture
def server(loaded):
    """A local server that answers like vLLM's."""
    with serving(Backbone(copy.deepcopy(loaded.causal_lm), copy.deepcopy(loaded.tokenizer))) as server:
        yield server


def test_remote_grades_on_a_server_as_in_the_process(script, server, backbone, finished):
    from opdcl.words import Prompt, Rollout

    remote = script("remote")
    texts = [Rollout(Prompt([1, 520, 3690, 198, i]), [i + 30, 40, 2], [], True) for i in range(3)]
    assert remote.agreement(backbone, server.url, texts) < 1e-3
    assert remote.throughput(backbone, server.url, texts, 2)["tokens"] == 24
    adapter = finished / "stages" / "02-recover" / "adapter"
    assert (remote.whole_kl(backbone, adapter, texts) > 0).all()


def test_a_student_on_a_server_answers_as_in_the_process(script, server, backbone, finished, tmp_path):
    from opdcl.config.workflow import Workflow
    from opdcl.rundir.files import read_json
    from opdcl.rundir.layout import RunDir

    remote, run = script("remote"), RunDir(finished)
    workflow = Workflow.model_validate(read_json(run.config)["workflow"])
    row = remote.answers(run, workflow, backbone, server.url, "questions", "recovered", 3, tmp_path)
    assert (row["n"], row["differing"], row["served"]) == (3, 0, row["local"])
    found = remote.sampling(run, backbone, server.url, 2, tmp_path)
    assert found["completions"] == 2
    assert found["largest_gap"] < 1e-3


def test_exported_compares_answers_and_log_probabilities(script, loaded):
    exported = script("exported")
    prompt = [1, 520, 3690, 198]
    text = exported.answer(loaded.causal_lm, prompt, 4)
    told = [exported.log_probabilities(loaded.causal_lm, text)]
    known = {"texts": [text], "told": told, "margins": [exported.margins(loaded.causal_lm, text)]}
    same = exported.compare(known, told, [text])
    assert (same["same_text"], same["largest_gap"]) == (1, 0)
    other = exported.compare(known, [told[0] + 0.5], [[*text[:-1], text[-1] + 1]])
    assert (other["same_text"], other["mean_gap"]) == (0, pytest.approx(0.5))
    assert len(other["margins_where_it_differs"]) == 1


@pytest.mark.parametrize(
    "name", sorted(f.stem for f in SCRIPTS.glob("*.py") if "parse_args" in f.read_text())
)
def test_each_script_says_what_it_takes(script, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        script(name).main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_container_reads_the_layers_of_an_image(script, tmp_path):
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nprintf '1.2GB\\tRUN pip install\\n0B\\tUSER 1\\n512kB\\tCOPY x\\n'\n")
    program.chmod(0o755)
    container = script("container")
    assert container.layers(container.Engine(str(program), [])) == [
        {"megabytes": 1200.0, "step": "RUN pip install"},
        {"megabytes": 0.512, "step": "COPY x"},
    ]


def test_the_shell_script_parses():
    assert subprocess.run(["sh", "-n", str(SCRIPTS / "vllm_cpu.sh")]).returncode == 0
