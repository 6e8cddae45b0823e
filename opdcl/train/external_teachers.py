"""What a recovery needs from outside, made from its settings: a reward, second models, models on a server.

Before another model is used, its tokens are checked to mean the same as the student's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from opdcl import parallel
from opdcl.config.model import SERVED_TOKENS
from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import TeacherSection
from opdcl.data.chat import check_turn_end
from opdcl.data.prompts import RecoverySource
from opdcl.errors import OpdclError, UsageError
from opdcl.model.adapters import find_adapter
from opdcl.model.architecture import architecture, eos_ids
from opdcl.model.backbone import Backbone
from opdcl.model.check_model import OTHER_FAMILY, PROBES, check_same_tokenizer
from opdcl.model.distributions import Served, TeacherDistribution, join
from opdcl.model.forward import answer_states
from opdcl.model.load import load_base, load_tokenizer
from opdcl.rundir.stage import StageDir
from opdcl.sampling.server import Server
from opdcl.train.answer_cache import CompletionCache
from opdcl.train.checkpoints import save_adapter
from opdcl.train.losses import token_logprobs
from opdcl.train.reward import Reward
from opdcl.train.teachers import Provided, Teacher
from opdcl.words import Prompt, Prompts, Rollout, StreamName

# Nats per token by which a model may differ from its copy on a server: between rounding and another model.
SAME_MODEL = 0.3

# Nats per token by which a teacher may rate a plain text below base: a fine-tune has cost up to 3, and at
# random it would be 6 and more.
BROKEN_MODEL = 4.0

Notify = Callable[[str], None]


@contextlib.contextmanager
def provided(
    config: RecoverConfig,
    source: RecoverySource,
    prompts: Mapping[StreamName, Prompts],
    backbone: Backbone,
    out: StageDir,
    notify: Notify,
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


class Elsewhere(Teacher):
    """A frozen model that is no state of the backbone, so its texts are not kept between runs."""

    def __init__(self, backbone: Backbone):
        super().__init__(backbone, "base")

    @property
    def frozen_state(self) -> None:
        """None: what writes is no state of the backbone."""


class SecondModel(Elsewhere):
    """Another model with the same tokenizer."""

    def __init__(self, backbone: Backbone, model: PreTrainedModel):
        super().__init__(backbone)
        self.model = model

    @property
    def head_VH(self) -> torch.Tensor:
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def states(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        return answer_states(self.model, self._examples(rollouts))

    @contextlib.contextmanager
    def as_sampler(self) -> Iterator[PreTrainedModel]:
        with parallel.unsharded(self.model):
            yield self.model


class RemoteTeacher(Elsewhere):
    """A model on a server, which is asked for its distribution as soon as a completion is whole."""

    def __init__(self, backbone: Backbone, server: Server):
        super().__init__(backbone)
        self.server = server

    def complete(self, prompts: Sequence[Prompt], **options: Any) -> list[Rollout]:
        def request() -> list[Rollout]:
            return self.server.complete(prompts, eos_ids=self.backbone.eos_ids, **options)

        return parallel.on_first_worker(request)

    def distribution(self, rollouts: Sequence[Rollout]) -> TeacherDistribution:
        return join([request.get() for request in self._requests(rollouts)]).to(self.backbone.device)

    def prefetch(self, rollouts: Sequence[Rollout]) -> None:
        if not self.server.is_whole:  # those of many completions would not fit into memory
            self._requests(rollouts)

    def _requests(self, rollouts: Sequence[Rollout]) -> list[AsyncResult[Served]]:
        return [self.server.score(r.prompt.shown, r.completion_ids) for r in rollouts]

    def close(self) -> None:
        self.server.close()


class ServedStudent(Teacher):
    """The student, sampled on a server that loads its current adapter from `folder` for each call."""

    def __init__(self, backbone: Backbone, server: Server, folder: Path):
        super().__init__(backbone, "student")
        self.server, self.folder = server, folder

    def complete(self, prompts: Sequence[Prompt], **options: Any) -> list[Rollout]:
        def request() -> list[Rollout]:
            save_adapter(self.backbone, self.folder)
            with self.server.adapter(self.folder) as name:
                return self.server.complete(prompts, eos_ids=self.backbone.eos_ids, model=name, **options)

        return parallel.on_first_worker(request)

    def close(self) -> None:
        self.server.close()


def make_teacher(
    config: TeacherSection, backbone: Backbone, notify: Notify = print, named: int = SERVED_TOKENS
) -> Teacher:
    """Return the second model, on the student's device, or the model on a server that is configured.

    `notify` receives messages about a server, which is asked for the `named` likeliest tokens.

    Raises:
        UsageError: It has another tokenizer or other end-of-sequence ids, or gives impossible probabilities.
    """
    if config.model:
        # The student's template writes the prompts. Whether the teacher's is the same was checked beforehand.
        own = backbone.tokenizer.chat_template
        template = own if isinstance(own, str) else None
        model_config = config.model.resident(shard=parallel.sharded(), chat_template=template)
        tokenizer = load_tokenizer(model_config)
        check_same_tokenizer(backbone.tokenizer, tokenizer, f"teacher {model_config.id}")
        model, _ = load_base(model_config, tokenizer)
        if (ids := eos_ids(model.generation_config, tokenizer)) != backbone.eos_ids:
            message = (
                f"teacher {config.model.id} ends answers with ids {ids}, the student with {backbone.eos_ids}"
            )
            raise UsageError(message, OTHER_FAMILY)
        return SecondModel(backbone, model.requires_grad_(False))
    server = reach_server(config.server.url, backbone, notify, named, config.server.model)
    compare_with_base(server, backbone)
    return RemoteTeacher(backbone, server)


def reach_server(
    url: str, backbone: Backbone, notify: Notify, named: int = SERVED_TOKENS, model: str | None = None
) -> Server:
    """Connect to a server whose tokenizer agrees with the student's.

    Raises:
        UsageError: The tokenizers differ.
    """
    vocabulary = architecture(backbone.causal_lm.config).vocabulary
    server = Server(url, vocabulary, notify, named=named, model=model)
    for probe in PROBES:
        local_ids = backbone.tokenizer(probe, add_special_tokens=False)["input_ids"]
        server_ids = server.encode(probe)
        if local_ids != server_ids:
            server.close()
            difference = f"it encodes {probe!r} as {server_ids[:8]}, the student as {local_ids[:8]}"
            raise UsageError(f"the server at {url} has another tokenizer: {difference}", OTHER_FAMILY)
    return server


def reach_own_model(url: str, backbone: Backbone, notify: Notify) -> Server:
    """Connect to a server that serves the student's own base, compared by tokenizer and by log-probabilities.

    Raises:
        UsageError: The server has another tokenizer or another model.
    """
    server = reach_server(url, backbone, notify)
    server_N, base_N = _probe(server, backbone)
    gap = float((base_N - server_N).abs().mean())
    if gap > SAME_MODEL:
        server.close()
        raise UsageError(
            f"the server at {url} serves another model as {server.model}: "
            f"on a probe the two differ by {gap:.2f} nats per token",
            "start it with `opdcl serve RUN`",
        )
    return server


def compare_with_base(server: Server, backbone: Backbone) -> None:
    """Compare a served teacher's log-probabilities with base's, and say how far apart they are.

    Raises:
        UsageError: To the teacher, a plain text is so much less likely that it must be computed wrongly.
    """
    try:
        server_N, base_N = _probe(server, backbone)
    except OpdclError:
        server.close()
        raise
    url, worse = server.url, float((base_N - server_N).mean())
    if worse > BROKEN_MODEL:
        server.close()
        raise UsageError(
            f"the teacher at {url} gives a plain text {worse:.1f} nats per token less than base does",
            "its weights or its precision are probably wrong: serve it anew, with another --dtype or without "
            "--quantization",
        )
    gap = float((base_N - server_N).abs().mean())
    sends = "whole distributions" if server.is_whole else f"the {server.named} likeliest tokens"
    who = "it is base" if gap <= SAME_MODEL else "it is another model than base"
    difference = f"on a text, the two differ by {gap:.2g} nats per token"
    server.notify(f"the teacher at {url} sends {sends}; {who}: {difference}")


def _probe(server: Server, backbone: Backbone) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of a text's tokens, `(N,)` each: on the server, and by base here."""
    probes = PROBES[:1] if server.is_whole else PROBES[:6]  # whole distributions are large
    ids = backbone.tokenizer(" ".join(probes), add_special_tokens=False)["input_ids"]
    prompt_ids, completion_ids = ids[:1], ids[1:]
    served = server.score(prompt_ids, completion_ids).get()
    base = Teacher(backbone, "base").distribution([Rollout(Prompt(prompt_ids), completion_ids)])
    token_N, rows = torch.tensor(completion_ids), len(backbone.head_VH)
    base_N = token_logprobs(base, token_N.to(backbone.device), rows).cpu()
    return token_logprobs(served, token_N, rows), base_N
