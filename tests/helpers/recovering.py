"""A recovery of the two-layer model from the `tuned` fixture."""

from trl import DistillationConfig

from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.distill.schedule import plan_steps
from opdcl.distill.teachers import Teacher
from opdcl.distill.trainer import RecoveryTrainer
from opdcl.model.adapters import ModelRef
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.stages.recover import recover

PROMPT = [1, 520, 9690, 198]


class Silent:
    def progress(self, done, total, **values): ...

    def note(self, text): ...


def train(backbone, folder, name, config, stop=None):
    """Recover the adapter in `folder / "tuned"`, interrupted after step `stop` if given; return the stage."""

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
    """Check that an interrupted recovery resumes to the bits of an uninterrupted one; return both stages."""
    whole = train(backbone, folder, "whole", config)
    train(backbone, folder, "cut", config, stop)
    resumed = train(backbone, folder, "cut", config)
    one, other = ((s.adapter / "adapter_model.safetensors").read_bytes() for s in (whole, resumed))
    assert one == other
    return whole, resumed


def run(backbone, folder, **settings):
    config = RecoverConfig(
        general=str(folder / "general.jsonl"),
        domain=str(folder / "domain.jsonl"),
        **{
            "steps": 6,
            "teacher_first": 0,
            "rollouts": 4,
            "max_new_tokens": 6,
            "validate_every": 3,
            "validation_prompts": 2,
            "learning_rate": 5e-3,
            **settings,
        },
    )
    out = StageDir(folder / "out")
    before = backbone.fingerprint()
    found = recover(config, backbone, ModelRef(ModelConfig(), folder / "tuned"), out, Silent())
    backbone.drop_adapters()
    assert backbone.fingerprint() == before
    assert (found.adapter / "adapter_model.safetensors").exists()
    return read_jsonl(out.metrics)


def make_trainer(backbone, folder, **settings):
    config = RecoverConfig(
        **{
            "steps": 4,
            "teacher_first": 0,
            "rollouts": 2,
            "max_new_tokens": 6,
            "general_per_domain": 3,
            **settings,
        }
    )
    args = DistillationConfig(
        output_dir=str(folder / "t"),
        per_device_train_batch_size=1,
        max_steps=4,
        bf16=False,
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    prompts = {"general": [[*PROMPT, 9]] * 3, "domain": [[*PROMPT, 8]] * 3}
    teachers = {"general": Teacher(backbone, "base"), "domain": Teacher(backbone, "tuned")}
    return RecoveryTrainer(backbone, config, plan_steps(config, 3, 3), prompts, teachers, args, [])
