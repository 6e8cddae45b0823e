"""Scores of a run: one suite's results, paired by prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opdcl.errors import UsageError
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    import numpy as np


STATES = ("base", "tuned", "recovered")

ROLES = ("retention", "domain", "control")

# What a suite measures, where its name alone does not say it in a sentence.
PLAIN_WORDS = {"instructions": "instruction following", "ifeval": "instruction following"}


@dataclass(frozen=True)
class Suite:
    """One suite's results on the prompts that every measured state answered, in one order."""

    name: str
    role: str
    metric: str | None
    results: dict[str, dict]
    """State -> what `evals/<state>/<suite>.json` says."""
    rows: dict[str, list[dict]]
    """State -> the sample rows; row i is the same prompt in every state."""
    unpaired: int
    """Prompts left out because not every measured state answered them."""

    @property
    def complete(self) -> bool:
        return set(self.rows) == set(STATES)

    @property
    def floor(self) -> float | None:
        """Return the best headline score of the answers without content, or None where it is not known."""
        kinds = [kind for result in self.results.values() for kind in (result.get("floor") or {}).values()]
        return max((kind[self.metric] for kind in kinds if self.metric in kind), default=None)

    @property
    def prompts(self) -> list[tuple]:
        """Return what tells prompts apart, in the order of the rows."""
        return [(row["doc_id"], row["prompt"]) for row in next(iter(self.rows.values()))]

    @property
    def plain(self) -> str:
        return PLAIN_WORDS.get(self.name, self.name)

    def parts(self, state: str) -> list[list[float]]:
        """Return the headline scores of each prompt; most metrics have one per prompt, instruction level several."""
        assert self.metric
        scores = [row["scores"][self.metric] for row in self.rows[state]]
        return [[float(x) for x in s] if isinstance(s, list) else [float(s)] for s in scores]

    def values(self, state: str) -> np.ndarray:
        """Return one number per prompt whose mean is the metric: prompts with more parts weigh more."""
        import numpy as np

        parts = self.parts(state)
        return np.array([sum(p) for p in parts]) * len(parts) / sum(len(p) for p in parts)


def load_suites(run: RunDir) -> list[Suite]:
    """Load every suite that the config names or that was measured, in the order of the config."""
    evaluation = section(run, "eval")
    roles = {suite: role for role in ROLES for suite in evaluation.get(role) or []}
    for path in sorted(run.evals.glob("*/*.json")):
        if path.parent.name in STATES:
            roles.setdefault(path.stem, str(read_json(path).get("role", "control")))
    return [_load_suite(run, name, role) for name, role in roles.items()]


def _load_suite(run: RunDir, name: str, role: str) -> Suite:
    results: dict[str, dict] = {}
    answers: dict[str, dict[tuple, dict]] = {}
    for state in STATES:
        if not run.eval_result(state, name).exists():
            continue
        result = read_json(run.eval_result(state, name))
        rows = [
            r for r in read_jsonl(run.eval_samples(state, name)) if result["metric"] in r.get("scores", {})
        ]
        if rows:
            results[state] = result
            # The prompt is part of the key because each task of a group counts its documents from 0.
            answers[state] = {(row["doc_id"], row["prompt"]): row for row in rows}
    if not results:
        return Suite(name, role, None, {}, {}, 0)
    shared = set.intersection(*(set(found) for found in answers.values()))
    if not shared:
        raise UsageError(
            f"suite {name}: {' and '.join(results)} have no prompt in common, so they cannot be compared",
            f"opdcl eval {run.path} --force",
        )
    order = sorted(shared, key=lambda key: (str(type(key[0])), *key))
    first = next(iter(results.values()))
    return Suite(
        name,
        str(first.get("role", role)),
        first["metric"],
        results,
        {state: [found[key] for key in order] for state, found in answers.items()},
        len(set.union(*(set(found) for found in answers.values()))) - len(shared),
    )


def read_record(path: Path) -> dict:
    """Read a JSON record of the run, empty where it is not written yet."""
    return read_json(path) if path.exists() else {}


def section(run: RunDir, name: str) -> dict:
    """Return one section of the run's workflow, empty where the workflow leaves it out."""
    return (read_record(run.config).get("workflow") or {}).get(name) or {}
