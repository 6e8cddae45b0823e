"""An adapter to recover from, and a limit on the memory of training."""

import json

import pytest
import torch


@pytest.fixture
def tuned(backbone, tmp_path):
    """An adapter that differs from base, and the prompt files to recover it with."""
    from helpers.recovering import write_tuned

    write_tuned(backbone, tmp_path / "tuned")
    for name, text in (("general", "Write a line about {}."), ("domain", "What is the code of room {}?")):
        rows = [json.dumps({"prompt": text.format(i)}) for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return tmp_path


@pytest.fixture
def memory_for(monkeypatch):
    """Return a function that makes training passes of more than `rows` rows fail, as if memory ran out."""
    from opdcl.model import forward

    def limit(rows: int, fault: BaseException) -> None:
        states = forward._states

        def limited(causal_lm, sequences):
            if torch.is_grad_enabled() and len(sequences) > rows:
                raise fault
            return states(causal_lm, sequences)

        monkeypatch.setattr(forward, "_states", limited)

    return limit
