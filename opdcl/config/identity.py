"""Which settings determine a result, and which only where or how fast it is made."""

from __future__ import annotations

from typing import Any

from opdcl.config.finetune import SelfDistillSection
from opdcl.config.teacher import TeacherSection

# Of the model, what says where it runs.
MACHINE = {"device", "deterministic", "shard"}

# Settings that change where or how fast a result is made, not what it is.
WITHOUT_MEANING = {"save_steps", "micro_batch_tokens"}

PLACE = {"url", "concurrency", "timeout", "patience"}  # of a server

# Settings that came later: at these values they mean what was done before there was a choice, so that a run which an
# earlier version made is not stale for them. `*` stands for every name that a user gives.
LATER: dict[str, dict[str, Any]] = {
    "finetune": {"method": "sft", "self_distill": SelfDistillSection().model_dump()},
    "recover": {
        "oversample": 1.0,
        "general_teacher": TeacherSection(kind="base").model_dump(),
        "domain_teacher": TeacherSection(kind="tuned").model_dump(),
        "teachers": {"*": {"server": None}},
        "reward": None,
        "server": None,
        "keep": "best",
        "alpha": None,
        "health": {"overlap": 0.1},
        "loss": {"discount": 0.0, "rescaled": True},
    },
}


def meaningful_settings(stage: str, config: dict[str, Any]) -> dict[str, Any]:
    return _without(LATER[stage], config)


def _without(
    later: dict[str, Any], config: dict[str, Any], meaningless: set[str] = WITHOUT_MEANING
) -> dict[str, Any]:
    found = {}
    for key, value in config.items():
        inner = later.get(key, later.get("*"))
        if key in meaningless:
            continue
        if isinstance(value, dict):
            rest = _without(inner or {}, value, PLACE if key == "server" else set())
            if rest or not inner:
                found[key] = rest
        elif key not in later or inner != value:
            found[key] = value
    return found
