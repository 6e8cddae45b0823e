"""Settings of the evaluation, and the scores that a run must reach."""

from __future__ import annotations

import re

from pydantic import field_validator

from opdcl.config.section import Positive, Sampler, Section
from opdcl.config.server import ServerSection


class EvalConfig(Section):
    """What is measured, on base, tuned and recovered alike."""

    retention: list[str] = ["instructions"]
    """Suites of what must not be lost: `instructions` (shipped), `ifeval`, or any generative lm-eval task."""
    domain: list[str] = []
    """Suites of what was to be learned: `handbook` (shipped), or any generative lm-eval task."""
    control: list[str] = []
    """Suites shown beside them without a part in the verdict, such as `neighbours`."""
    data: dict[str, str] = {}
    """A local file in place of a suite's hub dataset, such as `{ifeval: input_data.jsonl}`; or, under a new name, a
    question-and-answer file that becomes a closed-book suite."""
    limit: Positive | None = None
    """First so many documents of each suite."""
    max_new_tokens: Positive | None = None
    """Longest answer in tokens, where a suite's own limit is not lower. Question files have 96 unless this says otherwise."""
    batch_size: Positive = 320
    """Answers decoded together."""
    sampler: Sampler = "auto"
    """Engine that decodes: our own `slab`, or transformers' `generate` or `continuous` batching."""
    server: ServerSection | None = None
    """Where completions are decoded, if not in this process: a server that takes adapters and sees the run, as `opdcl serve RUN` is."""
    seed: int = 0
    """Resamples of the intervals."""

    @field_validator("retention", "domain", "control", "data")
    @classmethod
    def _names_stay_inside_the_run(cls, value: list[str] | dict[str, str]) -> list[str] | dict[str, str]:
        # A suite's name is the name of its result files.
        if bad := [name for name in value if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name)]:
            raise ValueError(
                f"{bad[0]!r} is no suite name: letters, digits, dots, hyphens and underscores only"
            )
        return value

    def suites(self) -> dict[str, str]:
        """Return suite -> role, in the order in which they are measured."""
        return {suite: role for role in ("retention", "domain", "control") for suite in getattr(self, role)}


class Gates(Section):
    """Scores that the run must reach; a miss ends `opdcl run` with exit code 3."""

    recovery: float | None = None
    """Smallest R."""
    domain_retention: float | None = None
    """Smallest D."""
