"""The schema of a whole workflow."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from opdcl.config.evaluate import CLOSENESS, EvalConfig, Gates
from opdcl.config.finetune import FinetuneConfig
from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.section import Section, Seed, as_list, differ_in_case
from opdcl.config.teacher import TeacherSection

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Trackers = Annotated[list[Literal["trackio", "tensorboard", "wandb", "mlflow"]], BeforeValidator(as_list)]
Column = Literal["question", "answer", "messages", "text", "system", "context", "tools", "teacher", "cluster"]

# Settings that change where or how fast a result is made, not what it is: of the model, a stage, a server.
# Sizes of batches are not among them: they change rounding, which training amplifies.
MACHINE = {"device", "deterministic", "shard"}
WITHOUT_MEANING = {"save_steps"}
URL = {"url"}


class Workflow(Section):
    """One run: a model, and the stages to run on it."""

    unused = (("finetune.lora", lambda s: s.start is not None, "with start, whose adapter keeps its shape"),)

    name: str = Field(default="run", pattern=NAME)
    """Name of the run directory under `runs/`."""
    description: str = ""
    """One line for `opdcl workflows ls`."""
    model: ModelConfig = ModelConfig()
    """The base model."""
    columns: dict[Column, Annotated[str, Field(min_length=1)]] = {}
    """Columns of your files of rows that have other names than ours: `{question: Frage, answer: Antwort}`."""
    start: Annotated[str, Field(min_length=1)] | None = None
    """Adapter to continue instead of a new one: a run directory (its last adapter is used), an adapter
    folder, or a Hub id. Or a model that was fine-tuned or merged as a whole: a folder, or a Hub id."""
    finetune: FinetuneConfig | None = None
    """Learn the domain. Without this section, recovery starts from the run's own fine-tune or `start`."""
    recover: RecoverConfig | None = None
    """Win back what was forgotten."""
    eval: EvalConfig | None = None
    """Measure base, tuned and recovered."""
    gates: Gates = Gates()
    """Minimum scores."""
    track: Trackers = []
    """Trackers that show metrics during the run, then scores, samples and verdict."""
    arms: dict[Annotated[str, Field(pattern=NAME)], dict[str, Any]] = {}
    """Several runs of one workflow: name -> settings in which that run differs. Common stages run once."""
    seeds: list[Seed] = []
    """Repeat every run with each of these seeds for fine-tune and recovery."""

    @model_validator(mode="after")
    def _arms_differ_in_more_than_case(self) -> Workflow:
        if twins := differ_in_case([*self.arms]):
            raise ValueError(f"the arms {twins} would share their folder where file names ignore case")
        return self

    @model_validator(mode="after")
    def _does_not_measure_on_the_reward(self) -> Workflow:
        reward = self.recover.reward if self.recover else None
        if reward and self.eval and reward.suite in self.eval.suites():
            raise ValueError(f"recover.reward trains on {reward.suite}: evaluate on another suite")
        return self

    @model_validator(mode="after")
    def _does_not_learn_what_closeness_asks(self) -> Workflow:
        closeness = self.eval.closeness if self.eval else None
        for key, source in self.data_sources().items():
            if source == closeness and key != "eval.closeness":
                raise ValueError(f"{key} learns from the prompts of eval.closeness: name others")
        return self

    @model_validator(mode="after")
    def _gates_are_on_measured_suites(self) -> Workflow:
        limits = self.gates.max_drop
        if self.eval and isinstance(limits, dict):
            retention = self.eval.retention
            for name in limits:
                if name not in retention and name != CLOSENESS:
                    raise ValueError(
                        f"gates.max_drop names {name}; eval.retention has {', '.join(retention)}"
                    )
        return self

    @model_validator(mode="after")
    def _samples_without_merging_if_quantized(self) -> Workflow:
        for name in ("recover", "eval"):
            stage = getattr(self, name)
            if self.model.quantization and stage and stage.server:
                hint = {"key": f"{name}.server", "hint": "remove the setting"}
                raise PydanticCustomError("quantized", "would not hold the quantized base", hint)
        return self

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, value: list[int]) -> list[int]:
        if len(set(value)) < len(value):
            raise ValueError("a seed is repeated, so one result would count twice")
        return value

    def system_of(self, stage: Literal["recover", "eval"]) -> str | None:
        """Return the system prompt with which a stage has its prompts answered."""
        recovery = self.recover.system if self.recover else None
        own = self.eval.system if stage == "eval" and self.eval else None
        return own or recovery

    def teachers(self) -> dict[str, TeacherSection]:
        """Return the teachers that the recovery defines, by name."""
        return self.recover.teachers if self.recover else {}

    def models(self) -> list[ModelConfig]:
        """Return the models that the run loads: its base, and those of teachers."""
        template = self.model.model_dump(include={"chat_template", "chat_template_kwargs"})
        return [self.model, *(t.model.resident(**template) for t in self.teachers().values() if t.model)]

    def data_sources(self) -> dict[str, str]:
        """Return the sources of all rows by their keys."""
        sources: dict[str, str | None] = {}
        if finetune := self.finetune:
            replayed = finetune.replay.prompts if finetune.replays else None
            sources = {"finetune.data": finetune.data, "finetune.replay.prompts": replayed}
        if recover := self.recover:
            for number, source in enumerate(recover.general_sources()):
                is_one = isinstance(recover.general, str)
                sources["recover.general" if is_one else f"recover.general.{number}"] = source
            sources["recover.domain"] = recover.domain
            sources |= {f"recover.teachers.{k}.prompts": t.prompts for k, t in recover.teachers.items()}
        if self.eval:
            sources["eval.closeness"] = self.eval.closeness
        return {key: source for key, source in sources.items() if source}

    def adapters(self) -> dict[str, str]:
        """Return the adapters that the run starts from or learns from: key -> path or Hub id."""
        places = {
            f"recover.teachers.{name}.adapter": teacher.adapter for name, teacher in self.teachers().items()
        }
        return {key: place for key, place in {"start": self.start, **places}.items() if place}


# Settings that runs of earlier versions do not name, and the values of today that mean what those did.
ADDED_LATER = {"given_answers": False, "author": "base", "beta": 0.5, "temperature": 1}.items()


def meaningful_settings(config: dict[str, Any], ignored: set[str] = WITHOUT_MEANING) -> dict[str, Any]:
    """Return the settings of a stage that determine its result, at every depth."""
    # Where rows are refused nothing is made, so `refuse` is no part of a result.
    settings = {
        k: v for k, v in config.items() if k not in ignored and v != "refuse" and (k, v) not in ADDED_LATER
    }
    for key, value in settings.items():
        if isinstance(value, dict):
            settings[key] = meaningful_settings(value, {"server": URL, "model": MACHINE}.get(key, set()))
    return settings
