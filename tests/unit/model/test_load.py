"""Loading: the precision that `auto` picks."""

import pytest
import torch

from opdcl.model.load import pick_dtype


@pytest.mark.parametrize(
    ("capability", "hardware", "dtype"),
    [
        ("AVX512", True, "bfloat16"),
        ("AVX512", False, "float32"),
        ("AVX2", True, "float32"),
        ("DEFAULT", True, "float32"),
    ],
)
def test_a_processor_computes_in_bfloat16_only_if_torch_uses_its_units(
    monkeypatch, capability, hardware, dtype
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: hardware)
    assert pick_dtype("auto", "cpu") == dtype
    assert pick_dtype("bfloat16", "cpu") == "bfloat16"
