"""Serve a run with vLLM: base, tuned and recovered are three names on one server, which takes further adapters while it runs."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from opdcl.config.workflow import Workflow
from opdcl.errors import EnvironmentFault
from opdcl.rundir.files import read_json
from opdcl.rundir.layout import RunDir

# Ranks that vLLM has kernels for.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class Command:
    """What to execute, and what its environment must have beyond ours."""

    words: list[str]
    environment: dict[str, str]


def serve_command(run: RunDir, vllm: str, host: str, port: int, further: list[str]) -> Command:
    """Return the command that serves a run's base with its adapters.

    Raises:
        EnvironmentFault: There is no such program.
    """
    from opdcl.model.load import model_source, pick_device, pick_dtype

    program = shutil.which(os.path.expanduser(vllm))
    if program is None:
        raise EnvironmentFault(
            f"there is no program {vllm!r}",
            "install vLLM in an environment of its own (it pins torch and transformers), and name it: "
            "python -m venv ~/vllm && ~/vllm/bin/pip install vllm; opdcl serve RUN --vllm ~/vllm/bin/vllm",
        )
    config = Workflow.model_validate(read_json(run.config)["workflow"]).model
    adapters = run.adapters()
    ranks = [int(read_json(folder / "adapter_config.json")["r"]) for folder in adapters.values()] or [
        RANKS[2]
    ]
    dtype = str(pick_dtype(config.dtype, pick_device(config.device))).removeprefix("torch.")
    words = [
        program,
        "serve",
        model_source(config)[0],
        "--served-model-name",
        "base",
        "--host",
        host,
        "--port",
        str(port),
        "--dtype",
        dtype,
        "--enable-lora",
        "--max-lora-rank",
        str(next((r for r in RANKS if r >= max(ranks)), RANKS[-1])),
        "--max-loras",
        str(len(adapters) + 1),
    ]
    if config.revision:
        words += ["--revision", config.revision]
    if adapters:
        words += ["--lora-modules", *(f"{state}={folder.resolve()}" for state, folder in adapters.items())]
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if key := os.environ.get("OPDCL_SERVER_KEY"):
        environment["VLLM_API_KEY"] = key  # not on the command line, where every user of the machine reads it
    return Command([*words, *further], environment)


def execute(command: Command) -> None:
    """Become the server."""
    os.execve(command.words[0], command.words, os.environ | command.environment)
