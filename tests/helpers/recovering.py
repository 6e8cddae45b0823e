"""A recovery of the two-layer model from the `tuned` fixture."""

import shutil
from types import SimpleNamespace

import torch

from helpers.near import flat
from opdcl.config.model import LoraSection
from opdcl.config.recover import RecoverConfig
from opdcl.data.prompts import encode_prompts, read_recovery_source
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.stage import StageDir
from opdcl.train.answer_cache import texts_folder
from opdcl.train.checkpoints import save_adapter
from opdcl.train.external_teachers import provided
from opdcl.train.learner import Learner
from opdcl.train.loop import StageReport
from opdcl.train.recover import recover
from opdcl.train.rollouts import RolloutQueue
from opdcl.train.teachers import Provided, Teacher
from opdcl.words import Batch, Prompt

PROMPT = [1, 520, 3690, 198]

SHORT = {"steps": 6, "rollouts": 4, "max_new_tokens": 6, "validate_every": 3, "validation_prompts": 2}
SHORT |= {"learning_rate": 5e-3, "micro_batch_tokens": 2048}


def write_tuned(backbone, folder, seed=1):
    """Give the student an adapter that differs from base, and save it."""
    backbone.new_adapter(LoraSection(r=4, alpha=8), seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in backbone.peft.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    save_adapter(backbone, folder)


class Silent(StageReport):
    """A report that nobody reads."""


class Counting(Silent):
    """Keeps each progress that is reported, and interrupts at number `stop`."""

    def __init__(self, stop=None):
        self.stop, self.counts = stop, []

    def progress(self, done, total, **values):
        self.counts.append((done, total))
        if len(self.counts) == self.stop:
            raise KeyboardInterrupt


class Notes(Silent):
    """Keeps what is said."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


def forget_texts():
    """Remove the texts that base has written or read, so that all is computed again."""
    shutil.rmtree(texts_folder(), ignore_errors=True)


def short_recovery(folder, **settings):
    """Return the settings of a few small steps on the prompts in `folder`."""
    streams = {"general": [str(folder / "general.jsonl")], "domain": str(folder / "domain.jsonl")}
    return RecoverConfig(**streams | SHORT | settings)


def recover_rows(config, backbone, tuned, out, report):
    """Recover on the rows that the settings name."""
    source = read_recovery_source(config)
    prompts = encode_prompts(config, source, backbone.tokenizer, backbone.context_length)
    with provided(config, source, prompts, backbone, out, report.note) as more:
        recover(config, prompts, backbone, tuned, out, report, more)


def train(backbone, folder, name, config, stop=None):
    """Recover the adapter in `folder / "tuned"`, interrupted after step `stop` if given; return the stage."""

    class StopAt(Silent):
        def progress(self, done, total, **values):
            if done == stop:
                raise KeyboardInterrupt

    forget_texts()  # what it samples itself is what is tested
    out = StageDir(folder / name)
    backbone.drop_adapters()
    fresh = Backbone(backbone.causal_lm, backbone.tokenizer, backbone.base_lm)
    try:
        recover_rows(config, fresh, folder / "tuned", out, StopAt())
    except KeyboardInterrupt:
        assert stop
    finally:
        fresh.drop_adapters()
    return out


def whole_and_resumed(backbone, folder, config, stop):
    """Recover uninterrupted and resumed; return both stages, which must be identical."""
    whole = train(backbone, folder, "whole", config)
    return whole, resumed_like(whole, backbone, folder, "resumed", config, stop)


def resumed_like(whole, backbone, folder, name, config, stop, meanwhile=lambda stage: None):
    """Recover with an interrupt, and return the stage, which must be identical to an uninterrupted one.

    `meanwhile` is called with the stage while it is stopped.
    """
    meanwhile(train(backbone, folder, name, config, stop))
    resumed = train(backbone, folder, name, config)
    expected, actual = ((s.adapter / "adapter_model.safetensors").read_bytes() for s in (whole, resumed))
    assert actual == expected
    # Steps after the checkpoint are repeated, so their first rows must not stay.
    of_whole, of_resumed = (
        [{k: v for k, v in row.items() if k not in ("seconds", "parts")} for row in read_jsonl(s.metrics)]
        for s in (whole, resumed)
    )
    assert of_resumed == of_whole
    return resumed


def run(backbone, folder, **settings):
    """Recover the adapter in `folder / "tuned"` in a few small steps; return the rows of its metrics."""
    trained = settings.get("steps") != 0
    on_policy = {"lmbda": 1.0} if trained and settings.get("lmbda") != 0 else {}
    config = short_recovery(folder, **on_policy | settings)
    out = StageDir(folder / "out")
    before = backbone.fingerprint()
    recover_rows(config, backbone, folder / "tuned", out, Silent())
    backbone.drop_adapters()
    assert backbone.fingerprint() == before
    assert (out.adapter / "adapter_model.safetensors").exists()
    return read_jsonl(out.metrics)


def learned(trainer, rollouts, stream):
    """Let the student learn from completions and nothing else; return the sums and the gradient."""
    trainer.model.zero_grad()
    sums = trainer.learn(rollouts, stream)
    return sums, flat(p.grad for p in trainer.model.parameters() if p.grad is not None)


def log_probs(model, rollout):
    """Return a model's log-probabilities before each token of one completion, in a plain pass, (T, V)."""
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    with torch.no_grad():
        return model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)


def make_trainer(backbone, folder, **settings):
    """Return what a recovery of four short steps works with: base teaches general prompts, tuned domain ones.

    `learn` takes completions, their stream, and whether they are fresh; it learns as if teachers had written
    them, and returns the sums.
    """
    short = {"steps": 4, "rollouts": 2, "max_new_tokens": 6, "general_per_domain": 3}
    on_policy = {} if settings.get("lmbda") == 0 else {"lmbda": 1.0}
    config = RecoverConfig(**short | {"micro_batch_tokens": 2048} | on_policy | settings)
    prompts = {"general": [Prompt([*PROMPT, 9])] * 3, "domain": [Prompt([*PROMPT, 8])] * 3}
    teachers = {"general": {"": Teacher(backbone, "base")}, "domain": {"": Teacher(backbone, "tuned")}}
    learner = Learner(backbone, teachers, "recover.max_new_tokens", config.micro_batch_tokens)
    of_student = Provided(student=Teacher(backbone, "student"))
    queue = RolloutQueue(config, prompts, teachers, of_student, Silent())

    def learn(rollouts, stream, fresh=False):
        examples = [rollout.to_example() for rollout in rollouts]
        return learner.learn(Batch(queue.streams[stream], examples, "teacher", fresh))

    return SimpleNamespace(config=config, queue=queue, learner=learner, model=backbone.peft, learn=learn)
