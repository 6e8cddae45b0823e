"""The schema of a whole workflow."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from opdcl.config.evaluate import EvalConfig, Gates
from opdcl.config.finetune import FinetuneConfig
from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.section import Section

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Workflow(Section):
    """One run: a model, and the stages that are given."""

    name: str = Field(default="run", pattern=NAME)
    """Name of the run directory under `runs/`."""
    description: str = ""
    """One line for `opdcl workflows ls`."""
    model: ModelConfig = ModelConfig()
    """The base model."""
    start: Annotated[str, Field(min_length=1)] | None = None
    """Adapter to go on with, instead of a new one: a run directory, whose last adapter it is, an adapter's folder, or its hub id."""
    finetune: FinetuneConfig | None = None
    """Learn the domain. Left out: recovery begins with the adapter of an earlier `opdcl finetune`, or with `start`."""
    recover: RecoverConfig | None = None
    """Win back what was forgotten."""
    eval: EvalConfig | None = None
    """Measure base, tuned and recovered."""
    gates: Gates = Gates()
    """Scores to reach."""
    track: list[Literal["trackio", "tensorboard", "wandb", "mlflow"]] = []
    """Trackers that show metrics as they come, and then scores, samples and verdict. The run's files hold all that anyway."""
    arms: dict[Annotated[str, Field(pattern=NAME)], dict[str, Any]] = {}
    """Several runs of one workflow: name -> the settings in which that run differs. What they have in common is made once."""
    seeds: list[Annotated[int, Field(ge=0, strict=True)]] = []
    """Repeat every run with each of these as the seed of fine-tune and recovery."""

    @model_validator(mode="after")
    def _measures_on_what_was_not_learned(self) -> Workflow:
        reward = self.recover.reward if self.recover else None
        if reward and self.eval and reward.suite in self.eval.suites():
            raise ValueError(
                f"recover.reward learns from {reward.suite}, so eval cannot measure on it: name another suite"
            )
        return self

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, value: list[int]) -> list[int]:
        if len(set(value)) < len(value):
            raise ValueError("a seed is named twice, which would count one result as two")
        return value

    def adapters(self) -> dict[str, str]:
        """Return the places of the adapters that it starts from or is taught by, by their keys."""
        teachers = self.recover.all_teachers() if self.recover else {}
        places = {"start": self.start} | {
            f"recover.{name}.adapter": teacher.adapter for name, teacher in teachers.items()
        }
        return {key: place for key, place in places.items() if place}
