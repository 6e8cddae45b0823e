"""A recovery of the two-layer model from the `tuned` fixture."""

from opdcl.config import ModelConfig, RecoverConfig
from opdcl.distill.backbone import Backbone
from opdcl.models import ModelRef
from opdcl.rundir import StageDir, read_jsonl
from opdcl.stages.recover import recover


class Silent:
    def progress(self, done, total, **values): ...

    def note(self, text): ...


def train(backbone, folder, name, config, stop=None):
    """Recover the adapter in `folder / "tuned"`, up to an interruption after step `stop` if one is given; return the stage."""
    class StopAt(Silent):
        def progress(self, done, total, **values):
            if done == stop:
                raise KeyboardInterrupt

    out = StageDir(folder / name)
    fresh = Backbone(backbone.causal_lm, backbone.tokenizer)
    try:
        recover(config, fresh, ModelRef(ModelConfig(), folder / "tuned"), out, StopAt())
    except KeyboardInterrupt:
        assert stop
    finally:
        fresh.drop_adapters()
    return out


def whole_and_resumed(backbone, folder, config, stop):
    """Return the stages of a recovery that went through and of one that was interrupted, after their adapters agree bit by bit."""
    whole = train(backbone, folder, "whole", config)
    train(backbone, folder, "cut", config, stop)
    resumed = train(backbone, folder, "cut", config)
    one, other = ((s.adapter / "adapter_model.safetensors").read_bytes() for s in (whole, resumed))
    assert one == other
    return whole, resumed


def run(backbone, folder, **settings):
    config = RecoverConfig(general=str(folder / "general.jsonl"), domain=str(folder / "domain.jsonl"), **{
        "steps": 6, "teacher_first": 0, "rollouts": 4, "max_new_tokens": 6, "validate_every": 3, "validation_prompts": 2, "learning_rate": 5e-3,
        **settings})  # fmt: skip
    out = StageDir(folder / "out")
    before = backbone.fingerprint()
    found = recover(config, backbone, ModelRef(ModelConfig(), folder / "tuned"), out, Silent())
    backbone.drop_adapters()
    assert backbone.fingerprint() == before
    assert (found.adapter / "adapter_model.safetensors").exists()
    return read_jsonl(out.metrics)
