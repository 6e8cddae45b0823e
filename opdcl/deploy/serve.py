"""Serve `base`, `tuned` and `recovered` on one vLLM server, which can load more adapters."""

from __future__ import annotations

import os
import shutil

from opdcl.config.model import is_this_machine
from opdcl.errors import EnvironmentFault, UsageError, typed
from opdcl.model.adapters import refuse_unserved, stands_on
from opdcl.model.consent import base_of_run
from opdcl.rundir.layout import TEMPLATE, RunDir, adapter_config

# LoRA ranks for which vLLM has kernels; the server is started for the smallest that is large enough.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_RANK = 32
# The option by which vLLM, and opdcl before it, is allowed to run code that comes with the model.
CONSENT = "--trust-remote-code"
# Options of vLLM that decide who may reach the server, and what decides it here.
DECIDED = {
    "--host": "opdcl serve RUN --host ADDRESS names the address",
    "--api-key": "OPDCL_SERVER_KEY holds the key, which other users could read on the command line",
    "--config": "write the options of that file out",
}


def serve_command(
    run: RunDir, vllm: str, host: str, port: int, arguments: list[str], dry_run: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves a run's base with its adapters, and the variables it needs.

    The command ends with `arguments`. Unless this is a `dry_run`, a chat template is written into the run. An
    `EnvironmentFault` says that `vllm` is not installed.

    Raises:
        UsageError: The server would be open to a network, or cannot hold the weights of the run.
    """
    from opdcl.model.hardware import pick_dtype
    from opdcl.model.load import model_source, write_template

    key = os.environ.get("OPDCL_SERVER_KEY", "").strip()
    _refuse_open_server(host, arguments, key)
    program = shutil.which(os.path.expanduser(vllm))
    if program is None:
        raise EnvironmentFault(
            f"there is no program {vllm!r}",
            "install vLLM in its own environment (it pins torch and transformers), and name it: "
            "python -m venv ~/vllm && ~/vllm/bin/pip install vllm; opdcl serve RUN --vllm ~/vllm/bin/vllm",
        )
    model = base_of_run(run, CONSENT in arguments)
    adapters = run.intact_adapters()
    hint = f"{typed('opdcl', 'export', run.path, '-o', 'MODEL')} writes a merged model, which vLLM serves"
    if tuned := stands_on(run):
        raise UsageError(f"one server cannot hold base and {tuned.id}, on which the adapters stand", hint)
    if model.quantization:
        raise UsageError(f"vLLM would serve {model.id} unquantized, unlike the run", hint)
    configs = [adapter_config(folder) for folder in adapters.values()]
    for config in configs:
        refuse_unserved(config)
    ranks = [rank for config in configs for rank in (config["r"], *config.get("rank_pattern", {}).values())]
    largest = max(ranks, default=DEFAULT_RANK)
    options = {
        "--served-model-name": "base",
        "--host": host,
        "--port": port,
        "--dtype": pick_dtype(model.dtype),
        "--max-lora-rank": next((rank for rank in RANKS if rank >= largest), RANKS[-1]),
        "--max-loras": len(adapters) + 1,
    }
    if model.revision:
        options["--revision"] = model.revision
    if model.chat_template or model.chat_template_kwargs:
        options["--chat-template"] = (run.path / TEMPLATE).resolve()
        if not dry_run:
            write_template(model, run.path)
    words = [program, "serve", model_source(model)[0], "--enable-lora"]
    words += [str(word) for option in options.items() for word in option]
    if adapters:
        words += ["--lora-modules", *(f"{state}={folder.resolve()}" for state, folder in adapters.items())]
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if key:
        environment["VLLM_API_KEY"] = key  # other users of the machine could read it on the command line
    return [*words, *arguments], environment


def _refuse_open_server(host: str, arguments: list[str], key: str) -> None:
    """Refuse to listen beyond this machine without a key: every client may load adapters."""
    for word in arguments:
        # vLLM takes abbreviations, and underscores for hyphens; the last of several options counts.
        option = word.partition("=")[0].replace("_", "-")
        ours = next((ours for ours in DECIDED if len(option) > 2 and ours.startswith(option)), "")
        if ours:
            message = f"{word} after -- would decide who may reach the server"
            raise UsageError(message, f"{DECIDED[ours]}; the other options of vLLM may follow --")
    if not is_this_machine(host) and not key:
        message = f"on {host or 'all addresses'} without a key, anybody on the network could use the server"
        hint = 'export OPDCL_SERVER_KEY="$(openssl rand -hex 16)", or leave --host out and use a tunnel'
        raise UsageError(f"{message} and load adapters into it", hint)
