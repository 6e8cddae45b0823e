"""Settings of a teacher, and of the loss against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from opdcl.config.model import NamedServer, TeacherModel
from opdcl.config.section import Positive, Section, Share
from opdcl.words import LossKind

# The part of the distance to the student that an EMA of it moves at each step.
EMA_RATE = 0.05
TRUST_REGION_IS_GONE = "kind trust_region is gone: use kind base, which ends nearer to base"
TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")]

# The settings that only one kind of teacher has.
KIND_OF = {"adapter": "adapter", "model": "model", "server": "remote"}


def _only_of_kind(key: str, kind: str) -> tuple[str, Callable[[Any], bool], str]:
    return key, lambda section: section.kind != kind, f"unless kind is {kind}"


class TeacherSection(Section):
    """A teacher: it writes answers and grades every token of them."""

    unused = tuple(_only_of_kind(key, kind) for key, kind in KIND_OF.items())
    former = {
        "rate": (EMA_RATE, "an ema teacher always moves by 0.05 of the distance to the student"),
        "reference": ("base", TRUST_REGION_IS_GONE),
        "mix": (0.05, TRUST_REGION_IS_GONE),
    }

    kind: Literal["base", "tuned", "adapter", "live", "ema", "model", "remote"]
    """Frozen teachers: `base`, `tuned`, `adapter` (from another run), `model` (another model with the same
    tokenizer) and `remote` (on a server). Moving ones: `live` is the student itself, `ema` a running mean of
    it, which moves by 0.05 of the distance at each step."""
    adapter: Annotated[str, Field(min_length=1)] | None = None
    """`adapter`: a run directory (its last adapter is used), an adapter folder, or a Hub id."""
    model: TeacherModel | None = None
    """`model`: the teacher model."""
    server: NamedServer | None = None
    """`remote`: the server that runs the teacher."""
    context: str | None = None
    """Text that the teacher sees in place of the last user message, with `{prompt}` and `{answer}`; rows then
    need answers. With a reward, `{answer}` is the best completion of the group and only the worse ones are
    graded with it; `{feedback}` is the scorer's comment on the graded completion (arXiv 2601.20802)."""
    prompts: Annotated[str, Field(min_length=1)] | None = None
    """Further domain prompts, all graded by this teacher."""

    @property
    def begins_as_tuned(self) -> bool:
        """Whether the teacher equals the student before the first step."""
        return self.kind in ("tuned", "ema") and self.context is None

    @field_validator("kind", mode="before")
    @classmethod
    def _is_a_kind_of_today(cls, kind: Any) -> Any:
        if kind == "trust_region":
            raise ValueError(TRUST_REGION_IS_GONE)
        return kind

    @model_validator(mode="after")
    def _has_something_to_teach(self) -> TeacherSection:
        if self.context is not None and ("{answer}" not in self.context or "{prompt}" not in self.context):
            raise ValueError("context needs {prompt} and {answer}")
        for key, kind in KIND_OF.items():
            if self.kind == kind and getattr(self, key) is None:
                raise ValueError(f"kind {kind} needs {key}")
        if self.kind == "live" and self.context is None:
            raise ValueError(
                "kind live without context is the student itself, which teaches nothing: set context"
            )
        return self


# Teachers that need no definition.
BUILT_IN = {kind: TeacherSection(kind=kind) for kind in ("base", "tuned")}


class LossSection(Section):
    """The loss of a graded token."""

    unused = (_only_of_kind("k", "top_k"), _only_of_kind("beta", "jsd"))

    kind: LossKind = "forward_kl"
    """Divergence between student and teacher. `forward_kl`, `reverse_kl` and `jsd` compare whole
    distributions, `top_k` the teacher's likeliest tokens; `policy_gradient` and `cross_entropy` use only the
    sampled token. Reverse KL hardly moves a token that the student has given up, such as the end of an
    answer."""
    beta: Share = 0.5
    """`jsd`, generalised Jensen-Shannon divergence: the teacher's share of the mixture from which both are
    measured. As in TRL's GKD, 0 is forward KL and 1 reverse KL. At 0.5 the embedded model
    is not shown to come nearer to base than by forward KL."""
    k: Positive = 100
    """`top_k`: number of the teacher's likeliest tokens that are compared one by one."""
