"""Loading: the precision that `auto` picks, and that of a file."""

import gguf
import numpy as np
import pytest
import torch

from opdcl.model import precision
from opdcl.model.load import pick_dtype, stored_dtype


@pytest.mark.parametrize(
    ("capability", "hardware", "seconds", "dtype"),
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
    monkeypatch, capability, hardware, seconds, dtype
):
    """`seconds` are those of a pass in bfloat16, where one in float32 takes a second."""
    precision.trains_faster_in_bfloat16.cache_clear()
    monkeypatch.setattr(precision, "_seconds_of_a_pass", {torch.float32: 1.0, torch.bfloat16: seconds}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: hardware)
    assert pick_dtype("auto") == dtype
    assert pick_dtype("bfloat16") == "bfloat16"
    precision.trains_faster_in_bfloat16.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_is_timed_with_its_backward_half(dtype):
    assert 0 < precision._seconds_of_a_pass(dtype) < 10


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
