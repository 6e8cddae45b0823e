"""Settings of the evaluation, and the scores that a run must reach."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from opdcl.config.model import ServerSection
from opdcl.config.section import Auto, Count, Names, Positive, Section, SystemPrompt, differ_in_case
from opdcl.config.shipped import ROLES, shipped_suites
from opdcl.errors import nearest

# The name of the files that closeness to base is stored in, and how long its answers are unless it is said.
CLOSENESS, CLOSENESS_TOKENS = "closeness", 128


class EvalConfig(Section):
    """What is measured on base, tuned and recovered."""

    retention: Names = ["instructions"]
    """Suites of abilities to keep: `instructions` (shipped), `ifeval`, `arc_easy`, any task of
    lm-eval that scores prompt by prompt, or the YAML file of such a task of your own."""
    domain: Names = []
    """Suites of the domain: `handbook` (shipped), or any such task of lm-eval."""
    control: Names = []
    """Suites that are reported but do not count in the verdict, such as `neighbours` or
    `instructions_sampled`."""
    closeness: Annotated[str, Field(min_length=1)] | None = "requests"
    """Prompts on which closeness to base is measured: `requests` (384, shipped), `requests_quick` (40 of
    them), a file, or a Hub dataset. No stage may learn from them. None: it is not measured."""
    system: SystemPrompt | None = None
    """System prompt with which closeness and suites are answered, or `@FILE`, as in the recovery, whose own
    is the default. Multiple choice has none."""
    data: dict[str, str] = {}
    """Local files: SUITE: PATH replaces the dataset of a task of lm-eval, as in `{ifeval: input_data.jsonl}`;
    the columns stay the same. Under a new name, a file of questions and answers becomes a suite, and so does
    the YAML file of a task of your own."""
    limit: Positive | None = None
    """Evaluate only the first N documents of each suite."""
    max_new_tokens: Positive | None = None
    """Maximum answer length in tokens; a lower limit of the suite still applies. Question files: 96.
    Closeness: 128."""
    thought_tokens: Count = 0
    """Tokens for the thought before an answer, on top of its maximum length. Scorers do not see it."""
    batch_size: Positive | Auto = "auto"
    """Number of answers decoded together. `auto`: 320 on CPU, 256 on CUDA. Multiple choice takes fewer where
    the logits of as many texts would exceed 1 GiB."""
    server: ServerSection | None = None
    """Server that decodes. It must load adapters and read the run directory, as `opdcl serve RUN` does.
    Log-likelihoods are computed here all the same."""

    @field_validator("retention", "domain", "control", "data")
    @classmethod
    def _names_stay_inside_the_run(cls, value: list[str] | dict[str, str]) -> list[str] | dict[str, str]:
        # A suite's name is the name of its result files.
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
                rule = "use letters, digits, dots, hyphens and underscores"
                raise ValueError(f"{name!r} is not a suite name: {rule}")
        if CLOSENESS in value:
            raise ValueError(f"{CLOSENESS} is no suite: eval.closeness names its prompts")
        return value

    @model_validator(mode="after")
    def _names_differ_in_more_than_case(self) -> EvalConfig:
        if twins := differ_in_case([*self.suites()]):
            raise ValueError(f"the suites {twins} would share their files where file names ignore case")
        return self

    @model_validator(mode="after")
    def _names_are_not_misspelt(self) -> EvalConfig:
        shipped = shipped_suites()
        for role in ROLES:
            for name in getattr(self, role):
                near = nearest(name, shipped, 0.8)
                if near and name not in {*shipped, *self.data}:
                    context = {"key": role, "reason": f"names no suite {name!r}"}
                    context["hint"] = f"did you mean {near}?"
                    raise PydanticCustomError("suite", "{reason}", context)
        return self

    def suites(self) -> dict[str, str]:
        """Return suite -> role, in the order in which they are measured."""
        return {suite: role for role in ROLES for suite in getattr(self, role)}

    @property
    def closeness_tokens(self) -> int:
        """The length of an answer at most, in tokens, where closeness is measured."""
        return (self.max_new_tokens or CLOSENESS_TOKENS) + self.thought_tokens


# Shares of 1 that noise can carry beyond 0 and 1: 80 is a percentage, which no run would reach.
GateShare = Annotated[float, Field(ge=-2, le=2)]
GatePoints = Annotated[float, Field(ge=0, le=100)]


class Gates(Section):
    """What a run has to show. A gate that is missed ends the command with exit code 3, one that the scores do
    not decide with 5."""

    recovery: GateShare | None = None
    """Minimum R. It is met where there was no measurable forgetting."""
    domain_retention: GateShare | None = None
    """Minimum D."""
    closeness: GateShare | None = None
    """Minimum C."""
    max_drop: GatePoints | dict[str, GatePoints] | None = None
    """Maximum drop below base on each retention suite, in points, of recovered, or of tuned if nothing is
    recovered. Or suite -> points; `closeness` is the maximum distance to base, in nats per token."""
