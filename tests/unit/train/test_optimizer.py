"""The optimizer of the fine-tune: its rate, and the settings that it does not have."""

import json
import math

import pytest
import torch
from helpers.recovering import Silent

from opdcl.config.finetune import FinetuneConfig, LoraSection, ReplaySection
from opdcl.config.load import validate
from opdcl.data.examples import read_examples, with_answers
from opdcl.data.rows import load_rows
from opdcl.errors import UsageError
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.train.finetune import finetune


def test_the_rate_rises_in_a_twentieth_of_the_steps_and_falls_on_a_cosine(backbone, tmp_path):
    rows = [{"question": f"What is the code of room {i}?", "answer": f"Code {i * 7}"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"epochs": 5, "batch_size": 1, "lora": LoraSection(r=2), "learning_rate": 1e-2}
    config = FinetuneConfig(data=str(tmp_path / "rows.jsonl"), replay=ReplaySection(share=0), **settings)
    torch.manual_seed(0)
    out = StageDir(tmp_path / "out")
    examples = read_examples(with_answers(load_rows(config.data), config), config, backbone.tokenizer)
    finetune(config, examples.encoded, [], backbone, None, out, Silent())
    rates = [row["learning_rate"] for row in read_jsonl(out.metrics) if "loss" in row]
    falling = [0.5 + 0.5 * math.cos(math.pi * step / 38) for step in range(38)]
    assert rates == pytest.approx([1e-2 * share for share in [0.5, 1, *falling]])


@pytest.mark.parametrize("name", ["adam_epsilon", "trainer"])
def test_settings_of_transformers_are_unknown(name):
    with pytest.raises(UsageError, match=rf"unknown key finetune\.{name}"):
        validate({"finetune": {"data": "handbook", name: 1e-6}})
