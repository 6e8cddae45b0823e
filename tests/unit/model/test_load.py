"""Loading: the precision that `auto` picks, and that of a file; what is believed of a converted model."""

import json
import os
import shutil

import gguf
import numpy as np
import pytest
import torch

from opdcl.config.model import ModelConfig
from opdcl.errors import EnvironmentFault
from opdcl.model import hardware
from opdcl.model.hardware import pick_dtype
from opdcl.model.load import EMBEDDED, embedded_folder, load_tokenizer, stored_dtype
from opdcl.rundir.hashes import damage, seal


@pytest.mark.parametrize(
    ("capability", "units", "seconds", "dtype"),
    [
        ("AVX512", True, 0.5, "bfloat16"),
        ("AVX512", True, 0.95, "float32"),  # not clearly faster
        ("AVX512", True, 1.4, "float32"),
        ("AVX512", False, 0.5, "float32"),
        ("AVX2", True, 0.5, "float32"),
        ("DEFAULT", True, 0.5, "float32"),
    ],
)
def test_a_processor_computes_in_bfloat16_only_if_torch_uses_its_units_and_they_are_faster(
    monkeypatch, capability, units, seconds, dtype
):
    """`seconds` are those of a pass in bfloat16, where one in float32 takes a second."""
    hardware.trains_faster_in_bfloat16.cache_clear()
    monkeypatch.setattr(hardware, "_seconds_of_a_pass", {torch.float32: 1.0, torch.bfloat16: seconds}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: units)
    assert pick_dtype("auto") == dtype
    assert pick_dtype("bfloat16") == "bfloat16"
    hardware.trains_faster_in_bfloat16.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_is_timed_with_its_backward_half(dtype):
    assert 0 < hardware._seconds_of_a_pass(dtype) < 10


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (gguf.GGMLQuantizationType.F32, torch.float32),
        (gguf.GGMLQuantizationType.F16, torch.float16),
        (gguf.GGMLQuantizationType.BF16, torch.bfloat16),
        (gguf.GGMLQuantizationType.Q8_0, torch.bfloat16),
    ],
)
def test_a_gguf_file_has_the_dtype_of_its_weights_not_of_its_norms(tmp_path, kind, dtype):
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    weights = gguf.quantize(np.ones((64, 64), np.float32), kind)
    writer.add_tensor("blk.0.attn_q.weight", weights, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert stored_dtype(str(tmp_path), {"gguf_file": "model.gguf"}) == dtype


@pytest.fixture
def converted(tiny_model, tmp_path, monkeypatch):
    """The folder of the embedded model in a cache of its own, where it is the tiny one."""
    monkeypatch.setenv("OPDCL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models" / EMBEDDED
    shutil.copytree(tiny_model, folder)
    seal(folder)
    return folder


def add_to_the_template(folder):
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + "Be rude.")


def flip_a_weight(folder):
    """Change one byte of the weights, and keep size and time of the file."""
    file = folder / "model.safetensors"
    times, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGES = {
    "chat_template.jinja has changed": add_to_the_template,
    "model.safetensors has changed": flip_a_weight,
    "tokenizer.json is missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "added_tokens.json was not there": lambda folder: (folder / "added_tokens.json").write_text("{}"),
    "its seal is missing or unreadable": lambda folder: (folder / "seal.json").write_text("{}"),
}


def test_a_converted_model_is_used_as_it_was_written(converted):
    assert embedded_folder() == converted


@pytest.mark.parametrize("problem", CHANGES)
def test_a_converted_model_that_has_changed_is_not_used(problem, converted):
    CHANGES[problem](converted)
    with pytest.raises(EnvironmentFault, match=f"is damaged: {problem}") as refused:
        load_tokenizer(ModelConfig(id=EMBEDDED))
    assert refused.value.hint == f"remove {converted}: the next command converts it again"


@pytest.mark.nightly
def test_a_converted_model_without_a_seal_is_converted_again(converted):
    (converted / "seal.json").unlink()
    (converted / "opdcl.json").write_text("{}")
    assert embedded_folder() == converted
    assert json.loads((converted / "opdcl.json").read_text())["source"].endswith(".gguf")
    assert damage(converted) == ""
