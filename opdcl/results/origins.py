"""What a run is, apart from its seeds: its settings, and what made the adapters that it builds on.

The seeds of an arm start from different adapters, which the same settings made with different seeds. So an
adapter of a run is known by the settings of that run without its seeds, and any other one by its content.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.load import flatten
from opdcl.config.workflow import ADDED_LATER, WITHOUT_MEANING
from opdcl.errors import UsageError
from opdcl.rundir.hashes import ADAPTER, hash_files
from opdcl.rundir.identity import Identity, recorded_contents, weights_of_base
from opdcl.rundir.layout import RunDir, StageDir

SEEDS = {"seed", "data_seed"}

# Workflow sections that cannot change a score.
IGNORED = {"name", "description", "gates", "arms", "seeds"}

# The key of the adapter that a run starts from; those that teach it have keys that end with the other.
START, TEACHER = "start", ".adapter"

# The rows of a fine-tune, and those that it sets aside, in the folder of rows that were given in memory.
LEARNED, SET_ASIDE = "finetune.data", "test-rows"


def split_seeds(run: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's settings that can change a score, as flat keys, and its seeds.

    Contents are among the settings: the same name or path may have held something else for another run.
    """
    # Closeness has prompts of its own, and changes no score.
    ignored = WITHOUT_MEANING | {CLOSENESS, "trust_remote_code"}
    settings, seeds = {}, {}
    sections = {key: value for key, value in run.settings().items() if key not in IGNORED}
    for key, value in flatten(sections).items():
        option = key.rsplit(".", 1)[-1]
        # Runs of an earlier version have no such settings.
        is_unset = (option, value) in (*ADDED_LATER, ("system", None))
        if option in SEEDS:
            seeds[key] = value
        elif option not in ignored and not is_unset:
            settings[key] = value
    for key, value in recorded_contents(run).items():
        if not is_adapter(key):
            section, _, name = key.partition(".")
            settings[f"{section}.content of {name}"] = value[:12]
    if weights := weights_of_base(run.read_manifest()):
        settings["model.weights"] = weights[:12]
    return settings, seeds


def is_adapter(key: str) -> bool:
    """Return whether a setting names an adapter that a run builds on."""
    return key == START or key.endswith(TEACHER)


def places_of(run: RunDir) -> dict[str, str]:
    """Return the adapters that a run builds on, as it names them, by their keys."""
    settings = flatten(run.settings())
    return {key: str(place) for key, place in settings.items() if is_adapter(key) and place}


def origins_of(run: RunDir, below: tuple[Path, ...] = ()) -> dict[str, str]:
    """Return what made each adapter that a run builds on, by its key; equal for the seeds of one arm.

    Raises:
        UsageError: The run is one of those `below`, which build on it.
    """
    path = run.path.resolve()
    if path in below:
        raise UsageError(f"{run.path} builds on itself", "name another run as its start or teacher")
    _, seeds = split_seeds(run)
    contents = recorded_contents(run)
    found = {}
    for key, place in places_of(run).items():
        found[key] = _origin(place, contents.get(key), seeds, (*below, path))
    return found


def _origin(place: str, content: str | None, seeds: dict[str, Any], below: tuple[Path, ...]) -> str:
    """Return what made the adapter at a place; `content` is the hash that was recorded of it."""
    maker, stage = holder(place)
    if maker and (stage is None or content is None or _content(stage) in (None, content)):
        settings, _ = split_seeds(maker)
        own = {}
        for key, value in settings.items():
            if not (is_adapter(key) or key.startswith("eval.")):
                own[key] = value
        made_in = stage.path.name if stage else ""
        return Identity([own, made_in, origins_of(maker, below)]).key
    without = without_seed(place, seeds)
    if without != place and not Path(place).exists():
        return without  # the run of the same seed, which is not here any more
    return content or place


def holder(place: str) -> tuple[RunDir | None, StageDir | None]:
    """Return the run that holds an adapter, and the stage that made it: its last one, or the one named."""
    path = Path(place)
    run = RunDir(path)
    if run.is_run():
        return run, run.last_stage()
    if path.name == "adapter" and len(path.parents) > 2 and RunDir(path.parents[2]).is_run():
        return RunDir(path.parents[2]), StageDir(path.parent)
    return None, None


def _content(stage: StageDir) -> str | None:
    """Return the hash of a stage's adapter, as a run that starts from it records it; None without files."""
    files = [stage.adapter / ADAPTER, stage.adapter / "adapter_config.json"]
    return hash_files(files) if all(file.is_file() for file in files) else None


def without_seed(place: str, seeds: dict[str, Any]) -> str:
    """Return the name of a run without its seed, if it ends with one of these."""
    for seed in seeds.values():
        if place.endswith(f"-{seed}"):
            return place.removesuffix(f"-{seed}")
    return place


def as_key(value: Any) -> str:
    """Return a text that is equal for equal settings."""
    return json.dumps(value, sort_keys=True)


def rows_set_aside(run: RunDir) -> Path | None:
    """Return the file of the rows that a fine-tune has set aside for a test; None if it has not."""
    learned = Path((run.settings().get("finetune") or {}).get("data") or "")
    file = learned.parent / f"{SET_ASIDE}.jsonl"
    return file if learned.name == f"{LEARNED}.jsonl" and file.is_file() else None
