"""Settings of a teacher."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from opdcl.config.model import ModelConfig
from opdcl.config.section import Positive, Section
from opdcl.config.server import ServerSection

TEACHER_NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,31}$"


class TeacherSection(Section):
    """Who grades a stream. Only `kind`'s own parameters play a part."""

    kind: Literal["base", "tuned", "adapter", "live", "ema", "trust_region", "model", "remote"]
    """`base`, `tuned` and `adapter`, which another run made, are frozen; `live` is the student itself, `ema` a running mean of
    it, `trust_region` lies between `reference` and the student; `model` is another one with the same tokenizer, `remote` one
    on a server."""
    adapter: Annotated[str, Field(min_length=1)] | None = None
    """`adapter`: a run directory, whose last adapter it is, an adapter's folder, or its hub id."""
    rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    """`ema`: how far towards the student it moves at a time."""
    every: Positive = 1
    """`ema`: steps from one move to the next."""
    reference: Literal["base", "tuned"] = "base"
    """`trust_region`: the frozen end."""
    mix: Annotated[float, Field(ge=0, le=1)] = 0.05
    """`trust_region`: the student's share."""
    model: ModelConfig | None = None
    """`model`: which."""
    server: ServerSection | None = None
    """`remote`: where."""
    context: str | None = None
    """What the teacher sees in place of the last user message, with `{prompt}` and `{answer}`: it knows, the student has to
    find out. Rows need answers then. Under a reward the answer is the best one of the group, for those that did worse, and
    `{feedback}` what the suite's scorer says of their own (arXiv 2601.20802)."""
    skip_tokens: Annotated[int, Field(ge=0, strict=True)] = 0
    """Leave out so many tokens at the start of each completion, where a teacher with context gives itself away."""

    @property
    def reads_feedback(self) -> bool:
        """Whether it is shown what a scorer says."""
        return "{feedback}" in (self.context or "")

    @property
    def begins_as_tuned(self) -> bool:
        """Whether it is, at first, what the student is."""
        tuned = self.kind in ("tuned", "ema") or (self.kind == "trust_region" and self.reference == "tuned")
        return tuned and self.context is None

    @model_validator(mode="after")
    def _has_something_to_teach(self) -> TeacherSection:
        if self.context is not None and ("{answer}" not in self.context or "{prompt}" not in self.context):
            raise ValueError("context needs {prompt} and {answer}")
        for kind, part in (("model", "model"), ("adapter", "adapter"), ("remote", "server")):
            if (self.kind == kind) != (getattr(self, part) is not None):
                raise ValueError(f"kind {kind} and {'an' if part == 'adapter' else 'a'} {part} go together")
        if self.kind == "live" and self.context is None:
            raise ValueError("a live teacher without context is the student: there is nothing to learn")
        return self


class NamedTeacher(TeacherSection):
    """One teacher among several, who grades the prompts that name it."""

    prompts: Annotated[str, Field(min_length=1)] | None = None
    """Further domain prompts, all of which are its own."""
