"""What a recovery needs besides prompts and models, made from its settings."""

from __future__ import annotations

from collections.abc import Callable

from opdcl.config.recover import RecoverConfig
from opdcl.data.prompts import RecoverySource
from opdcl.distill.reward import Reward
from opdcl.model.backbone import Backbone
from opdcl.stages.recover import Provided


def provided(
    config: RecoverConfig, source: RecoverySource, backbone: Backbone, notify: Callable[[str], None]
) -> Provided:
    """Return what the settings of a recovery ask for; `notify` receives messages for the user."""
    reward = None
    if config.reward:
        context, rows = config.teacher_of("general").context, source.rows["general"]
        reward = Reward(config.reward, source.reward_task, rows, backbone, context, notify)
    return Provided(reward)
