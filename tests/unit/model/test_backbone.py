"""The quick check that the base is unchanged: it misses no bit, and leaves adapters out."""

import pytest
import torch
from helpers.recovering import Silent, recover_rows, short_recovery

from opdcl.config.model import LoraSection
from opdcl.errors import OpdclError
from opdcl.rundir.stage import StageDir


def flip_lowest_bit(weight: torch.Tensor, index: int) -> None:
    weight.data.flatten().view(torch.uint8)[index * weight.element_size()] ^= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_any_weight_changes_checksum_and_fingerprint(backbone, dtype):
    backbone.causal_lm.to(dtype)
    backbone.causal_lm.model.norm.weight = torch.nn.Parameter(torch.ones(51, dtype=dtype))  # no whole words
    checksum, fingerprint = backbone.checksum(), backbone.known_fingerprint()
    for weight in backbone.causal_lm.parameters():
        for index in (0, weight.numel() // 2, weight.numel() - 1):
            flip_lowest_bit(weight, index)
            assert backbone.checksum() != checksum
            assert backbone.known_fingerprint() != fingerprint
            flip_lowest_bit(weight, index)
    assert (backbone.checksum(), backbone.known_fingerprint()) == (checksum, fingerprint)


def test_an_adapter_is_no_part_of_the_checksum(backbone):
    checksum, fingerprint = backbone.checksum(), backbone.fingerprint()
    backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    for name, weight in backbone.peft.named_parameters():
        if "lora_" in name:
            weight.data += 1
    assert (backbone.checksum(), backbone.known_fingerprint()) == (checksum, fingerprint)
    backbone.drop_adapters()
    assert (backbone.checksum(), backbone.known_fingerprint()) == (checksum, fingerprint)


def test_a_base_that_changes_during_training_ends_the_stage_at_its_next_checkpoint(backbone, tuned):
    weights = backbone.causal_lm.named_parameters()
    weight = next(w for name, w in weights if "up_proj" in name and "lora_" not in name)
    out = StageDir(tuned / "out")

    class Spoiler(Silent):
        def progress(self, done, total, **values):
            if done == 3:
                flip_lowest_bit(weight, 77)

    config = short_recovery(tuned, validate_every=2)
    with pytest.raises(OpdclError, match="the base weights changed before step 4"):
        recover_rows(config, backbone, tuned / "tuned", out, Spoiler())
    assert out.last_checkpoint().name == "checkpoint-2"
