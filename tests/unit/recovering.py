"""A recovery of the two-layer model from the `tuned` fixture."""

from opdcl.config import ModelConfig, RecoverConfig
from opdcl.models import ModelRef
from opdcl.rundir import StageDir, read_jsonl
from opdcl.stages.recover import recover


class Silent:
    def progress(self, done, total, **values): ...

    def note(self, text): ...


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
