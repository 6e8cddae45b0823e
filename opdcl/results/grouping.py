"""Pool runs that differ only in their seeds."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from opdcl.config.load import flatten
from opdcl.config.workflow import WITHOUT_MEANING
from opdcl.results.scores import workflow_of
from opdcl.rundir.layout import RunDir

SEEDS = {"seed", "data_seed"}

# Workflow sections that cannot change a score.
IGNORED = {"name", "description", "gates", "arms", "seeds"}


def split_seeds(run: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's settings that can change a score, as flat keys, and its seeds."""
    settings = flatten({key: value for key, value in workflow_of(run).items() if key not in IGNORED})
    option = {key: key.rsplit(".", 1)[-1] for key in settings}
    seeds = {key: settings[key] for key in settings if option[key] in SEEDS}
    return {k: v for k, v in settings.items() if option[k] not in SEEDS | WITHOUT_MEANING}, seeds


def training_seeds(seeds: dict[str, Any]) -> dict[str, Any]:
    """Return the seeds without those of the evaluation, which only draw the intervals."""
    return {key: value for key, value in seeds.items() if not key.startswith("eval.")}


def pool(runs: list[RunDir], settings: list[str], seeds: list[str]) -> dict[str, list[RunDir]]:
    """Group runs with the same settings, in the order of their seeds; return group name -> runs.

    A seed that occurs twice is one result seen twice. Pooled as two seeds it would make the interval too
    narrow, so the runs of such a group stay apart.
    """
    groups: dict[str, list[tuple[str, RunDir]]] = {}
    for run, key, seed in zip(runs, settings, seeds, strict=True):
        groups.setdefault(key, []).append((seed, run))
    pooled: list[list[RunDir]] = []
    for group in groups.values():
        if len({seed for seed, _ in group}) == len(group):
            pooled.append([run for _, run in sorted(group, key=lambda pair: pair[0])])
        else:
            pooled += [[run] for _, run in group]
    names = [_common_name(group) for group in pooled]
    return {
        name if name and names.count(name) == 1 else str(group[0].path): group
        for name, group in zip(names, pooled, strict=True)
    }


def _common_name(runs: list[RunDir]) -> str:
    """Return the common start of the run directories' names, up to a hyphen, underscore or dot."""
    parts = [re.split(r"([-_.])", run.path.resolve().name) for run in runs]
    shared = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return " ".join("".join(column[0] for column in shared).rstrip("-_.").split())


def as_key(value: Any) -> str:
    """Return a text that is equal for equal settings."""
    return json.dumps(value, sort_keys=True)


def seed_notes(counts: set[int]) -> list[str]:
    """Return the caveats of intervals over these numbers of seeds."""
    notes = []
    if 1 in counts:
        notes.append("With one seed an interval covers the choice of prompts, not the training seed.")
    if few := sorted(n for n in counts if 1 < n < 5):
        notes.append(
            f"Intervals over {' or '.join(map(str, few))} seeds are too narrow: the bootstrap sees (n - 1) / "
            "n of the variance between n seeds."
        )
    return notes
