"""What a run is, apart from its seeds: its settings, and what made the adapters that it builds on.

The seeds of an arm start from different adapters, which the same settings made with different seeds. So an
adapter of a run is known by the settings of that run without its seeds, and any other one by its content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.load import flatten
from opdcl.config.workflow import ADDED_LATER, WITHOUT_MEANING
from opdcl.errors import UsageError
from opdcl.rundir.files import read_json
from opdcl.rundir.hashes import ADAPTER, Identity, hash_files, hash_value
from opdcl.rundir.layout import RunDir, read_config, weights_of_base
from opdcl.rundir.stage import StageDir

SEEDS = {"seed", "data_seed"}

# Workflow sections that cannot change a score.
IGNORED = {"name", "description", "gates", "arms", "seeds"}

# The key of the adapter that a run starts from; those that teach it have keys that end with the other.
START, TEACHER = "start", ".adapter"

# The rows of a fine-tune, and those that it sets aside, in the folder of rows that were given in memory.
LEARNED, SET_ASIDE = "finetune.data", "test-rows"

# The origin of rows of which some are set aside, before the source that the user named.
SPLIT = "--test-share of "


def question_key(shown: str, is_conversation: bool) -> str:
    """Return a hash that is equal for equal questions, whatever their system prompt.

    `shown` is the prompt as readers see it: of a conversation, each turn with its role.
    """
    text = re.sub(r"\Asystem: .*?\n\n(?=user: )", "", shown, flags=re.DOTALL)
    return hash_value(text if is_conversation else f"user: {text}")


def learned_by(*runs: RunDir) -> set[str]:
    """Return what the fine-tunes of runs have learned: questions by `question_key`, and `cluster NAME`.

    Of those of earlier versions nothing is known.
    """
    return {key for run in runs for key in _rows_of(run).get("learned", ())}


def count_learned(samples: Iterable[Mapping[str, Any]], learned: Set[str]) -> int:
    """Return how many samples of a suite ask a question that was learned."""
    return sum(question_key(row["prompt"], "question" in row) in learned for row in samples)


def _rows_of(run: RunDir) -> dict[str, Any]:
    """Return what a fine-tune has recorded of its rows."""
    stage = run.find_stage("finetune")
    return read_json(stage.learned) if stage and stage.learned.is_file() else {}


def line_of(run: RunDir | None) -> list[RunDir]:
    """Return a run, and those that it builds on by its start, the nearest first."""
    line: dict[Path, RunDir] = {}
    while run and run.path.resolve() not in line:
        line[run.path.resolve()] = run
        start = run.settings().get("start")
        run = holder(str(start))[0] if start else None
    return [*line.values()]


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
        # Each run has a copy of its own of rows that were given in memory, or set aside.
        if key.startswith("eval.data.") and Path(value).name in (f"{key}.jsonl", f"{SET_ASIDE}.jsonl"):
            settings[key] = Path(value).name
    for key, value in run.recorded_contents().items():
        if not is_adapter(key):
            settings[key] = f"{Path(str(settings.get(key, ''))).name} ({value[:12]})"
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
    contents, seeds = run.recorded_contents(), split_seeds(run)[1]
    found = {}
    for key, place in places_of(run).items():
        maker, stage = holder(place)
        content, without = contents.get(key), without_seed(place, seeds)
        if maker and (stage is None or content is None or _content(stage) in (None, content)):
            own = {}
            for option, value in split_seeds(maker)[0].items():
                if not (is_adapter(option) or option.startswith("eval.")):
                    own[option] = value
            made_in = stage.path.name if stage else ""
            found[key] = Identity([own, made_in, origins_of(maker, (*below, path))]).key
        elif without != place and not Path(place).exists():
            found[key] = without  # the run of the same seed, which is not here any more
        else:
            found[key] = content or place
    return found


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
    # One of an earlier fine-tune may still lie there.
    return file if file.is_file() and _rows_of(run).get("set_aside") == hash_files([file]) else None


def sets_asked(run: RunDir) -> dict[str, Path]:
    """Return the rows set aside by a run and by those that it builds on: name of the suite -> file."""
    found = {}
    for made in line_of(run):
        name = re.sub(r"[^\w-]", "_", without_seed(made.path.resolve().name, split_seeds(made)[1]))
        if file := rows_set_aside(made):
            found[SET_ASIDE if made is run else f"{SET_ASIDE}-{name}"] = file
    return found


def as_named(run: RunDir, source: str) -> str:
    """Return a source of rows as a user named it, where a run has a copy of its own."""
    key = Path(source).name.removesuffix(".jsonl")
    if key not in (LEARNED, "recover.domain", "recover.general"):
        return source
    origin = read_config(run.config).get("origins", {}).get(key, "")
    return origin.removeprefix(SPLIT) if origin.startswith(SPLIT) else "rows given in memory"


def system_prompt(run: RunDir) -> str:
    """Return the system prompt with which a run's suites are answered; empty if there is none."""
    if not run.is_run():
        return ""
    evaluation, recovery = (run.settings().get(name) or {} for name in ("eval", "recover"))
    return evaluation.get("system") or recovery.get("system") or ""
