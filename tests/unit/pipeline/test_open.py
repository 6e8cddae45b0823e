"""A run begins from an adapter made elsewhere: where it lies, what its base is, and what goes on in it."""

import copy
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from helpers.adapters import made_by_peft, made_by_trl
from helpers.command import opdcl, sets
from helpers.synthetic import alter
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from opdcl.pipeline.verbs import open_or_begin
from opdcl.rundir.files import read_json
from opdcl.rundir.layout import RunDir

SMALL = (
    "recover.start=1 recover.health=false recover.steps=2 recover.rollouts=4 "
    "recover.max_new_tokens=6 recover.validation_prompts=2"
)
PROMPTS = ("--prompts", "prompts.jsonl", "--domain", "rows.jsonl")
MEASURE = ("--retention", "instructions", "--limit", "4", "--set", "eval.max_new_tokens=6")


@pytest.fixture
def adapter(loaded, tiny_folder) -> Path:
    """The output folder of a trainer: an adapter, and what else trainers leave behind."""
    made = made_by_peft(
        loaded, tiny_folder / "mine", r=4, lora_alpha=8, use_dora=True, target_modules=["q_proj", "v_proj"]
    )
    (made / "checkpoint-3").mkdir()
    (made / "optimizer.pt").write_text("large")
    return made


# Further shapes are recovered in tests/unit/model/test_adapters.py.
OTHERS = {
    "of TRL's trainer": (made_by_trl, {"r": 8, "lora_alpha": 16}),
    "rank 16 on all linear layers in bf16": (
        made_by_peft,
        {"r": 16, "lora_alpha": 8, "target_modules": "all-linear", "dtype": torch.bfloat16},
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_adapters_are_measured_recovered_and_exported(kind, loaded, tiny_folder):
    make, lora = OTHERS[kind]
    adapter = make(loaded, tiny_folder / "mine", **lora)
    for command in (
        ("eval", "mine", *MEASURE),
        # The last adapter: on some processors no step of a random model comes nearer to its teachers.
        ("recover", "mine", *PROMPTS, *sets(f"{SMALL} recover.keep=last")),
        ("export", "runs/mine", "--format", "adapter", "-o", "repaired"),
        ("export", "runs/mine", "-o", "merged"),
    ):
        opdcl(*command, code=0)
    run = RunDir(tiny_folder / "runs" / "mine")
    assert {p.parent.name for p in run.evals.glob("*/instructions.json")} == {"base", "tuned", "recovered"}
    before, after = (load_file(f / "adapter_model.safetensors") for f in (adapter, tiny_folder / "repaired"))
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    assert any(not torch.equal(before[k].float(), after[k].float()) for k in before)
    merged = AutoModelForCausalLM.from_pretrained(tiny_folder / "merged", dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(copy.deepcopy(loaded.causal_lm), str(tiny_folder / "repaired")).eval()
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        base, whole, expected = (model(ids).logits for model in (loaded.causal_lm, merged, by_peft))
    rounding, effect = (whole - expected).abs().mean(), (base - expected).abs().mean()
    assert rounding < effect / 10, "the merged model is in bf16"


def test_an_adapter_is_measured_recovered_and_measured_again(adapter, tiny_folder):
    made = opdcl("eval", "mine", *MEASURE, "--domain", "rows.jsonl", code=0)
    run = RunDir(tiny_folder / "runs" / "mine")  # the default, named after the adapter
    assert set(os.listdir(run.stages()[0].adapter)) == {"adapter_config.json", "adapter_model.safetensors"}
    assert {p.parent.name for p in run.evals.glob("*/*.json")} == {"base", "tuned"}
    measured = run.eval_result("tuned", "instructions").read_bytes()
    assert "next: opdcl eval runs/mine --limit 400  # to tell\n" in made.stderr

    made = opdcl("recover", "mine", *PROMPTS, *sets(SMALL), code=0)
    assert "taken from" not in made.stderr, "the adapter is in the run already"
    assert run.eval_result("tuned", "instructions").read_bytes() == measured
    assert run.eval_result("recovered", "instructions").exists()
    recovered = read_json(run.adapters()["recovered"] / "adapter_config.json")
    assert recovered["use_dora"]
    assert recovered["r"] == 4

    assert "all " in opdcl("verify", "runs/mine").stdout
    exported = opdcl("export", "runs/mine", "-o", "merged", code=0)
    assert "export: merging" in exported.stderr


def test_the_two_verbs_and_the_workflow_key_start_the_same_run(adapter, tiny_model, tiny_folder):
    for path in (str(adapter), "mine", "./mine/"):
        run, saved = open_or_begin(path, None, None)
        assert run == Path("runs/mine")
        assert saved["workflow"]["start"] == str(adapter)
        assert saved["workflow"]["model"] == {"id": str(tiny_model), "revision": None}
    assert open_or_begin("mine", Path("elsewhere"), None)[0] == Path("elsewhere")
    assert "model" not in open_or_begin("mine", None, "another")[1]["workflow"]


def test_the_recipe_continues_what_the_verbs_have_measured(adapter, tiny_model, tiny_folder):
    assert opdcl("eval", "mine", *MEASURE, "-o", "run").returncode == 0
    assert opdcl("workflows", "cp", "repair", "repair.yaml").returncode == 0
    own = (
        f"start=mine model.id={tiny_model} recover.general=[prompts.jsonl] recover.domain=rows.jsonl {SMALL}"
    )
    own += " eval.retention=[instructions] eval.limit=4 eval.max_new_tokens=6 eval.data.mine=rows.jsonl"
    made = opdcl("run", "repair.yaml", "-o", "run", *sets(own), code=0)
    assert "finetune: skipped, done" in made.stderr
    assert "eval instructions tuned: skipped, done" in made.stderr
    assert RunDir(tiny_folder / "run").eval_result("recovered", "mine").exists()


def test_a_named_base_replaces_the_one_in_the_adapter(adapter, tiny_model):
    alter(adapter / "adapter_config.json", base_model_name_or_path="/gone")
    refused = opdcl("eval", "mine", *MEASURE, code=2)
    assert "the base of adapter mine was not found" in refused.stderr
    assert "--base BASE" in refused.stderr
    assert not Path("runs").exists()
    planned = opdcl("eval", "mine", *MEASURE, "--base", tiny_model, "--dry-run", code=0)
    assert re.search(r"finetune +take +from ", planned.stdout)


def test_an_adapter_that_cannot_be_kept_is_refused_by_the_dry_run_too(adapter):
    alter(adapter / "adapter_config.json", modules_to_save=["lm_head"])
    for words in (("recover", "mine", "--dry-run"), ("eval", "mine"), ("chat", "mine", "hi")):
        refused = opdcl(*words, code=2)
        assert "it replaces whole modules of its base" in refused.stderr
    assert not Path("runs").exists()


def test_a_quantized_base_is_refused_before_it_is_loaded(adapter, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "small-bnb-4bit")
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    alter(tmp_path / "small-bnb-4bit" / "config.json", quantization_config=packed)
    for words in (("recover", "mine", "--dry-run"), ("eval", "mine")):
        refused = opdcl(*words, "--base", "small-bnb-4bit", code=2)
        assert "is quantized, which opdcl cannot load" in refused.stderr
    assert not Path("runs").exists()


def test_another_adapter_is_not_mixed_into_a_run(adapter, tiny_folder):
    assert opdcl("eval", "mine", *MEASURE, "-o", "run").returncode == 0
    alter(adapter / "adapter_config.json", lora_alpha=16)
    refused = opdcl("eval", "mine", "-o", "run", code=2)
    assert "changed: start" in refused.stderr


def test_every_verb_that_needs_a_run_says_how_an_adapter_becomes_one(adapter):
    for words in (("report", "mine"), ("compare", "mine", "mine"), ("verify", "mine")):
        refused = opdcl(*words, code=2)
        assert "mine is an adapter folder, not a run directory" in refused.stderr
        assert "opdcl recover mine --domain PROMPTS" in refused.stderr


def test_a_second_recovery_stands_beside_the_first_and_changes_nothing_of_it(tiny_folder):
    def files(folder: str) -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}

    opdcl("run", "tiny.yaml", "-o", "first", *sets("eval=null", SMALL), code=0)
    before = files("first")
    second = ("recover", "first", "--steps", "1", "-o", "first-2")
    refused = opdcl(*second[:-2])
    assert f"({' '.join(['opdcl', *second[:2], *second[-2:]])}, same options)" in refused.stderr
    planned = opdcl(*second, "--dry-run", "--json")
    assert [task["action"] for task in json.loads(planned.stdout)["tasks"]] == ["take", "run"]
    opdcl(*second, code=0)
    assert files("first") == before
    made = RunDir(tiny_folder / "first-2")
    assert made.stage_record("recover")["config"]["steps"] == 1
    weights = "stages/01-finetune/adapter/adapter_model.safetensors"
    assert (made.path / weights).read_bytes() == before[Path("first") / weights]


def test_a_second_recovery_makes_no_other_fine_tune(tiny_folder):
    opdcl("run", "tiny.yaml", "-o", "the first", *sets("eval=null recover=null"))
    with open("rows.jsonl", "a") as file:
        file.write('{"question": "What is new?", "answer": "This row."}\n')
    refused = opdcl("recover", "the first", *PROMPTS, "-o", "second", code=2)
    assert "second would have another fine-tune than the first" in refused.stderr
    typed = shlex.split(refused.stderr.rpartition("begin from the adapter: ")[2])
    assert typed[:3] == ["opdcl", "recover", "the first/stages/01-finetune/adapter"]
    assert not Path("second").exists()
    measured = opdcl("eval", "the first", *MEASURE, "-o", "second")
    assert "the first is a run directory: what is measured stays in it" in measured.stderr
    stale = opdcl("eval", "the first", *MEASURE)
    assert "finetune changed: content of data" in stale.stderr
    assert "-o" not in stale.stderr, "which this command refuses"
