"""An adapter to recover from; runs to be compared."""

import json

import pytest
import torch
from helpers.synthetic import BASE, TUNED, measure, workflow, write

from opdcl.results import stats
from opdcl.rundir.layout import RunDir


@pytest.fixture
def tuned(backbone, tmp_path):
    """An adapter that has left base, and the files to recover it with."""
    from opdcl.config.finetune import LoraSection
    from opdcl.training import save_adapter

    backbone.new_adapter(LoraSection(r=4, alpha=8), 1)
    generator = torch.Generator().manual_seed(1)
    for name, p in backbone.peft.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator) * 0.3
    save_adapter(backbone, tmp_path / "tuned")
    for name, text in (("general", "Write a line about {}."), ("domain", "What is the code of room {}?")):
        rows = [json.dumps({"prompt": text.format(i)}) for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return tmp_path


@pytest.fixture
def few_resamples(monkeypatch):
    """A thousand resamples are enough here."""
    monkeypatch.setattr(stats, "RESAMPLES", 1000)


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a run; after recovery the first N prompts of each suite pass."""

    def made(name: str, retention: int | None, domain: int | None, tuned: dict = TUNED, **recover) -> RunDir:
        run = RunDir(tmp_path / name)
        write(run.config, {"workflow": workflow(**recover), "origins": {}})
        measure(run, "base", BASE)
        measure(run, "tuned", tuned)
        passes = {"instructions": retention, "handbook": domain}
        measure(run, "recovered", {suite: range(k) for suite, k in passes.items() if k is not None})
        return run

    return made


@pytest.fixture
def three(make) -> list[RunDir]:
    """The method, a rival that trains, and the rival that only scales; all from one tuned adapter."""
    return [
        make("ours", 28, 32),
        make("general", 28, 12, method="general"),
        make("scaled", 20, 20, method="interpolate"),
    ]


@pytest.fixture
def memory_for():
    """Return a limiter of the rows of a training pass; more raise a fault, as if out of memory."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    hooks = []

    def limit(rows: int, fault: BaseException) -> None:
        def check(module, given):
            if isinstance(module, LlamaDecoderLayer) and torch.is_grad_enabled() and len(given[0]) > rows:
                raise fault

        hooks.append(register_module_forward_pre_hook(check))

    yield limit
    for hook in hooks:
        hook.remove()
