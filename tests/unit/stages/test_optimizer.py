"""Every setting of the fine-tune's optimizer changes what is learned; those of transformers are unknown."""

import json

import pytest
import torch
from helpers.recovering import Silent

from opdcl.config.finetune import FinetuneConfig, LoraSection
from opdcl.config.load import validate
from opdcl.data.examples import read_examples, with_answers
from opdcl.data.rows import load_rows
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.stages.finetune import finetune

# Values of each setting that differ from the default.
CHANGES = {"weight_decay": [0.5], "schedule": ["linear", "constant"], "warmup": [0.5, 0.75]}
STEPS = 8


@pytest.fixture
def learn(backbone, tuned):
    """Return a function that fine-tunes for eight steps: the adapter's bytes, and each step's rate."""
    rows = [{"question": f"What is the code of room {i}?", "answer": f"Code {i * 7}"} for i in range(8)]
    (tuned / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(**settings) -> tuple[bytes, list[float]]:
        config = FinetuneConfig(
            data=str(tuned / "rows.jsonl"),
            epochs=4,
            batch_size=4,
            lora=LoraSection(r=4),
            learning_rate=1e-2,
            **settings,
        )
        torch.manual_seed(0)
        out = StageDir(tuned / f"out{len([*tuned.glob('out*')])}")
        fresh = Backbone(backbone.causal_lm, backbone.tokenizer)
        examples = read_examples(with_answers(load_rows(config.data), config), config, fresh.tokenizer)
        finetune(config, examples, fresh, None, out, Silent())
        fresh.drop_adapters()
        rates = [row["learning_rate"] for row in read_jsonl(out.metrics) if "loss" in row]
        assert len(rates) == STEPS
        return (out.adapter / "adapter_model.safetensors").read_bytes(), rates

    return run


def test_every_setting_changes_what_is_learned(learn):
    plain = learn()
    assert learn() == plain
    for name, values in CHANGES.items():
        for value in values:
            assert learn(**{name: value})[0] != plain[0], (name, value)


@pytest.mark.parametrize(
    ("settings", "eighths"),
    [
        ({"schedule": "linear", "warmup": 0}, [8, 7, 6, 5, 4, 3, 2, 1]),
        ({"schedule": "linear", "warmup": 0.5}, [2, 4, 6, 8, 8, 6, 4, 2]),
        ({"schedule": "constant", "warmup": 0.5}, [2, 4, 6, 8, 8, 8, 8, 8]),
        ({"schedule": "constant", "warmup": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_the_rate_goes_as_its_schedule_says(learn, settings, eighths):
    assert learn(**settings)[1] == pytest.approx([1e-2 * part / 8 for part in eighths])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup": 3}, "warmup: must be at most 1"),
        ({"schedule": "polynomial"}, "schedule: must be 'cosine', 'linear' or 'constant'"),
        ({"adam_epsilon": 1e-6}, r"unknown key finetune\.adam_epsilon"),
        ({"trainer": {"weight_decay": 0.1}}, r"unknown key finetune\.trainer"),
        ({"method": "self-distill", "warmup": 0.5}, "finetune.warmup has no effect with method self-distill"),
    ],
)
def test_other_values_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        validate({"finetune": {"data": "handbook", **settings}})
