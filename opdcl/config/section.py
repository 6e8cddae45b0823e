"""What every section of a workflow shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

if TYPE_CHECKING:
    Auto: TypeAlias = Any  # `opdcl.pipeline.defaults` puts a number in its place before a stage reads it
else:
    Auto = Literal["auto"]

# No whole number of a workflow is larger by far; beyond, planning alone would take hours, or all memory.
LARGEST = 10_000_000
# Strict: `true` is not 1, and '3' is not 3.
Positive = Annotated[int, Field(gt=0, le=LARGEST, strict=True)]
Count = Annotated[int, Field(ge=0, le=LARGEST, strict=True)]
# What NumPy takes; the recovery also uses the seed after this one.
Seed = Annotated[int, Field(ge=0, le=2**32 - 2, strict=True)]
# Optimizer steps of a stage, and rows or completions of a step: all of them are planned beforehand.
Steps = Annotated[int, Field(ge=0, le=100_000, strict=True)]
BatchSize = Annotated[int, Field(gt=0, le=10_000, strict=True)]
# A factor on a loss.
Weight = Annotated[float, Field(ge=0, le=1000)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]


def as_list(value: Any) -> Any:
    """Read a single name as a list of one."""
    return [value] if isinstance(value, str) else value


def differ_in_case(names: list[str]) -> str:
    """Return two names that differ in case only, joined by "and", or "" if there are none."""
    seen: dict[str, str] = {}
    for name in names:
        if (twin := seen.setdefault(name.casefold(), name)) != name:
            return f"{twin} and {name}"
    return ""


Names = Annotated[list[str], BeforeValidator(as_list)]

# The context in which settings are dumped for a fingerprint.
FINGERPRINT = "fingerprint"


class Section(BaseModel):
    # A validated default equals what a saved configuration is read as: 5 epochs would hash unlike 5.0.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    unused: ClassVar[tuple[tuple[str, Callable[[Any], bool], str], ...]] = ()
    """Keys, when they have no effect, and why: then `config.load` refuses values other than the defaults."""
    former: ClassVar[dict[str, tuple[Any, str]]] = {}
    """Keys of earlier versions: the value that always holds now, and what to do in place of another one."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_former_settings(cls, settings: Any) -> Any:
        """Read past former settings that have today's value, as in stored runs; others stay unknown keys."""
        if not isinstance(settings, dict):
            return settings
        kept = dict(settings)
        for key, (value, _) in cls.former.items():
            given = kept.get(key)
            # A stored section names those of its settings that its version still had.
            is_part = isinstance(value, dict) and isinstance(given, dict) and value | given == value
            if key in kept and (given == value or is_part):
                del kept[key]
        return kept

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Dump the settings; for a fingerprint, with the former ones, so that earlier runs keep theirs."""
        settings = dict(dump(self))
        if info.context == FINGERPRINT:
            for key, (value, _) in self.former.items():
                settings[key] = value
        return settings


# The text itself: `config.load` reads the file where a command or a workflow names one.
SystemPrompt = Annotated[str, Field(min_length=1)]
