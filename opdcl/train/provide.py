"""What a recovery needs besides prompts and its own models, made from its settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from opdcl.config.recover import RecoverConfig
from opdcl.data.chat import check_turn_end
from opdcl.data.prompts import RecoverySource
from opdcl.model.adapters import find_adapter
from opdcl.model.backbone import Backbone
from opdcl.rundir.stage import StageDir
from opdcl.train.answer_cache import CompletionCache
from opdcl.train.external_teachers import ServedStudent, make_teacher, reach_own_model
from opdcl.train.reward import Reward
from opdcl.train.teachers import Provided, Teacher
from opdcl.words import Prompts, StreamName


@contextlib.contextmanager
def provided(
    config: RecoverConfig,
    source: RecoverySource,
    prompts: Mapping[StreamName, Prompts],
    backbone: Backbone,
    out: StageDir,
    notify: Callable[[str], None],
) -> Iterator[Provided]:
    """Yield what the settings of a recovery ask for; afterwards its servers are left.

    `notify` receives messages for the user.

    Raises:
        UsageError: The chat template ends no answer, or a teacher or the student's server does not fit.
    """
    check_turn_end(backbone.tokenizer, backbone.eos_ids)
    reward = None
    if config.reward:
        context, rows = config.teacher_of("general").context, source.rows["general"]
        reward = Reward(config.reward, source.reward_task, rows, backbone, context, notify)
    adapters = {t.adapter: find_adapter(t.adapter) for t in config.teachers.values() if t.adapter}
    asked = {config.general_teacher, config.domain_teacher}
    for of_stream in prompts.values():
        asked |= {prompt.teacher for prompt in of_stream.train + of_stream.held_out}
    with contextlib.ExitStack() as stack:
        elsewhere: dict[str, Teacher] = {}
        for name, section in config.teachers.items():
            if name in asked and section.kind in ("model", "remote"):
                teacher = make_teacher(section, backbone, notify, config.served_tokens)
                elsewhere[name] = stack.enter_context(contextlib.closing(teacher))
        student = None
        if config.server:
            server = reach_own_model(config.server.url, backbone, notify)
            student = ServedStudent(backbone, server, out.trainer / "served")
            stack.callback(student.close)
        yield Provided(reward, adapters, elsewhere, student, CompletionCache(backbone))
