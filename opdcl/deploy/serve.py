"""Serve `base`, `tuned` and `recovered` on one vLLM server, which can load more adapters."""

from __future__ import annotations

import argparse
import ipaddress
import os
import shutil

from opdcl.config.model import ModelConfig
from opdcl.errors import EnvironmentFault, UsageError
from opdcl.model.adapters import refuse_unserved, stands_on
from opdcl.model.consent import base_of_run
from opdcl.rundir.layout import RunDir, adapter_config

# LoRA ranks for which vLLM has kernels; the server is started for the smallest that is large enough.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_RANK = 32
# The option by which vLLM, and opdcl before it, is allowed to run code that comes with the model.
CONSENT = "--trust-remote-code"


def serve_command(
    run: RunDir, vllm: str, host: str, port: int, arguments: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves a run's base with its adapters, and the variables it needs.

    The command ends with `arguments`. An `EnvironmentFault` says that `vllm` is not installed.

    Raises:
        UsageError: The server would be open to a network, or cannot hold the weights of the run.
    """
    from opdcl.model.load import model_source, pick_dtype, write_template

    _refuse_open_server(host, arguments)
    program = shutil.which(os.path.expanduser(vllm))
    if program is None:
        raise EnvironmentFault(
            f"there is no program {vllm!r}",
            "install vLLM in its own environment (it pins torch and transformers), and name it: "
            "python -m venv ~/vllm && ~/vllm/bin/pip install vllm; opdcl serve RUN --vllm ~/vllm/bin/vllm",
        )
    model = base_of_run(run, CONSENT in arguments)
    adapters = run.intact_adapters()
    hint = f"opdcl export {run.path} -o MODEL writes a merged model, which vLLM serves"
    _check_base(run, model, hint)
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
    if template := write_template(model, run.path):
        options["--chat-template"] = template.resolve()
    words = [program, "serve", model_source(model)[0], "--enable-lora"]
    words += [str(word) for option in options.items() for word in option]
    if adapters:
        words += ["--lora-modules", *(f"{state}={folder.resolve()}" for state, folder in adapters.items())]
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if key := os.environ.get("OPDCL_SERVER_KEY"):
        environment["VLLM_API_KEY"] = key  # other users of the machine could read it on the command line
    return [*words, *arguments], environment


def _refuse_open_server(host: str, arguments: list[str]) -> None:
    """Refuse to listen beyond this machine without a key: every client may load adapters."""
    parsed, _ = _vllm_options().parse_known_args(arguments)
    if os.environ.get("OPDCL_SERVER_KEY") or parsed.api_key:
        return
    host = parsed.host or host
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        message = f"on {host or 'all addresses'} without a key, anybody on the network could use the server"
        hint = 'export OPDCL_SERVER_KEY="$(openssl rand -hex 16)", or leave --host out and use a tunnel'
        raise UsageError(f"{message} and load adapters into it", hint)


def _vllm_options() -> argparse.ArgumentParser:
    """Return a parser of those options of vLLM that decide who may use the server."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--host")
    parser.add_argument("--api-key", nargs="*")
    return parser


def _check_base(run: RunDir, model: ModelConfig, hint: str) -> None:
    """Refuse a run whose weights one server cannot hold."""
    if tuned := stands_on(run):
        raise UsageError(f"one server cannot hold base and {tuned.id}, on which the adapters stand", hint)
    if model.quantization:
        raise UsageError(f"vLLM would serve {model.id} unquantized, unlike the run", hint)
