"""Models, tokenizers and adapters are read in one place, which asks nothing and adds nothing."""

import ast
import shutil
import socket

import pytest
import torch
from helpers.adapters import made_by_peft
from helpers.command import ROOT, opdcl
from helpers.synthetic import alter
from huggingface_hub import close_session, constants

from opdcl import hub
from opdcl.config.model import ModelConfig
from opdcl.errors import UsageError
from opdcl.model.load import load_model, load_tokenizer, read_config, skeleton

# What reads a model or an adapter from a folder or from the Hub, in transformers and PEFT.
READERS = {"from_pretrained", "from_config", "load_peft_weights", "pipeline"}
DOORS = {"opdcl/model/load.py", "opdcl/model/backbone.py", "opdcl/model/lora.py"}


def calls(source: str) -> list[ast.Call]:
    """Return the calls in a source that read models, by any of the names above."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and name_of(node) in READERS:
            found.append(node)
    return found


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def test_the_scan_sees_calls_by_any_name():
    source = "AutoModel.from_pretrained(a)\ntype(b).from_pretrained(None)\npipeline('x')\nother(1)"
    assert [name_of(call) for call in calls(source)].count("from_pretrained") == 2
    assert len(calls(source)) == 3


def test_nothing_is_read_beside_the_door_and_code_is_allowed_or_not_in_words():
    elsewhere, silent, seen = [], [], 0
    for file in sorted((ROOT / "opdcl").rglob("*.py")):
        place = file.relative_to(ROOT).as_posix()
        for call in calls(file.read_text()):
            seen += 1
            if place not in DOORS:
                elsewhere.append(f"{place}:{call.lineno}")
            is_auto = ast.unparse(call.func).startswith("Auto")
            if is_auto and "trust_remote_code" not in {word.arg for word in call.keywords}:
                silent.append(f"{place}:{call.lineno}")
    assert (elsewhere, silent) == ([], [])
    assert seen > 5


@pytest.fixture
def both(loaded, tiny_model, tmp_path):
    """A folder with a model, and an adapter beside it."""
    shutil.copytree(tiny_model, tmp_path / "both")
    made_by_peft(loaded, tmp_path / "adapter", r=4, target_modules=["q_proj"])
    for file in (tmp_path / "adapter").glob("adapter_*"):
        shutil.copyfile(file, tmp_path / "both" / file.name)
    return tmp_path / "both"


def test_a_model_with_an_adapter_beside_it_is_refused(both, tmp_path):
    config = ModelConfig(id=str(both), dtype="float32")
    for read in (read_config, skeleton, load_model):
        with pytest.raises(UsageError, match=r"both/adapter_config\.json says that an adapter lies beside"):
            read(config)
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Me."}\n' * 4)
    for words in (["finetune", "rows.jsonl"], ["recover", "adapter", "--prompts", "rows.jsonl"]):
        refused = opdcl(*words, "--base", "both", "--dry-run", cwd=tmp_path, code=2)
        assert "and which of the two is meant is not known" in refused.stderr
        assert "hint: move adapter_config.json" in refused.stderr
    refused = opdcl("export", "adapter", "--base", "both", "-o", "merged", cwd=tmp_path, code=2)
    assert not (tmp_path / "merged").exists()


def test_a_model_file_beside_an_adapter_does_not_become_the_adapters_base(both):
    # Without a config.json in the folder, transformers reads the model that the adapter's settings name.
    (both / "config.json").unlink()
    (both / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="an adapter lies beside it"):
        load_model(ModelConfig(id=str(both / "model.gguf"), dtype="float32"))


def test_a_hub_model_with_an_adapter_is_refused(both, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--owner--both"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("c" * 40)
    shutil.copytree(both, place / "snapshots" / ("c" * 40))
    hub.holds.cache_clear()
    with pytest.raises(UsageError, match=r"adapter_config\.json in its repository") as refused:
        read_config(ModelConfig(id="owner/both"))
    assert "hf download owner/both --exclude 'adapter_*' --local-dir FOLDER" in refused.value.hint


def test_an_adapter_put_onto_a_model_has_no_dropout_as_first_and_as_second(backbone, both):
    alter(both / "adapter_config.json", lora_dropout=0.5)
    for state in ("student", "second"):
        model = backbone.load_adapter(both, state, trainable=True)
    ids = torch.arange(40, 60)[None]
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)
    learned = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert {name.split(".")[-2] for name in learned} == {"student", "second"}


def test_a_tokenizer_beside_an_adapter_is_read(both):
    assert len(load_tokenizer(ModelConfig(id=str(both)))) > 0


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_attention_that_somebody_else_had_installed_is_not_asked_for(tiny_model, tmp_path, key):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    alter(folder / "config.json", **{key: "flash_attention_2"})
    config = ModelConfig(id=str(folder), dtype="float32")
    assert skeleton(config).config._attn_implementation == "sdpa"
    assert load_model(config).config._attn_implementation == "sdpa"


def test_behind_a_proxy_that_blocks_the_hub_the_cache_is_used_and_the_reason_is_said(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        close_session()  # the next one reads the environment anew
        assert not hub.reachable()
        with pytest.raises(UsageError, match=r"not in the local cache, and the Hub is unreachable \(Conn"):
            hub.snapshot(hub.Repository("model", "someone/cached-nowhere"))
    finally:
        close_session()
        hub._silence.cache_clear()
