"""Build teachers from a configuration, after checking that their tokens mean the same as the student's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from opdcl import parallel
from opdcl.config.model import SERVED_TOKENS
from opdcl.config.teacher import EMA_RATE, TeacherSection
from opdcl.distill.losses import token_logprobs
from opdcl.distill.teachers import EmaTeacher, RemoteTeacher, SecondModel, Teacher, TrustRegionTeacher
from opdcl.errors import OpdclError, UsageError
from opdcl.model.architecture import architecture
from opdcl.model.backbone import Backbone, State
from opdcl.model.compatibility import HINT, PROBES, check_same_tokenizer
from opdcl.model.load import eos_ids, load_base, load_tokenizer
from opdcl.sampling.server import Server
from opdcl.types import Prompt, Rollout

# Nats per token by which a model may differ from its copy on a server: between rounding and another model.
SAME_MODEL = 0.3

# Nats per token by which a teacher may rate a plain text below base: a fine-tune has cost up to 3, and at
# random it would be 6 and more.
BROKEN_MODEL = 4.0

Notify = Callable[[str], None]


def make_teacher(
    config: TeacherSection,
    backbone: Backbone,
    state: State = "general",
    notify: Notify = lambda text: None,
    named: int = SERVED_TOKENS,
) -> Teacher:
    """Return the teacher that a configuration describes.

    An `ema` or `adapter` teacher needs its adapter on the backbone already, as `state`. `notify` receives
    messages about a server; `named` is how many of the likeliest tokens are requested of it.
    """
    match config.kind:
        case "live":
            return Teacher(backbone, "student")
        case "adapter":
            return Teacher(backbone, state)
        case "ema":
            return EmaTeacher(backbone, state, EMA_RATE)
        case "trust_region":
            return TrustRegionTeacher(backbone, config.mix)
        case "model":
            return SecondModel(backbone, _load_model(config, backbone))
        case "remote":
            place = config.server
            server = reach_server(place.url, backbone, notify, named, place.model)
            compare_with_base(server, backbone)
            return RemoteTeacher(backbone, server)
        case frozen:
            return Teacher(backbone, frozen)


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
            raise UsageError(f"the server at {url} has another tokenizer: {difference}", HINT)
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
    served = server.grade(prompt_ids, completion_ids).get()
    base = Teacher(backbone, "base").distribution([Rollout(Prompt(prompt_ids), completion_ids)])
    token_N, rows = torch.tensor(completion_ids), len(backbone.head_VH)
    base_N = token_logprobs(base, token_N.to(backbone.device), rows).cpu()
    return token_logprobs(served, token_N, rows), base_N


def _load_model(config: TeacherSection, backbone: Backbone) -> PreTrainedModel:
    """Load another model on the student's device, if tokenizer and end-of-sequence ids agree."""
    # The student's template writes the prompts. Whether the teacher's is the same was checked beforehand.
    own = backbone.tokenizer.chat_template
    template = own if isinstance(own, str) else None
    model_config = config.model.resident(shard=parallel.sharded(), chat_template=template)
    tokenizer = load_tokenizer(model_config)
    check_same_tokenizer(backbone.tokenizer, tokenizer, f"teacher {model_config.id}")
    model, _ = load_base(model_config, tokenizer)
    if (ids := eos_ids(model, tokenizer)) != backbone.eos_ids:
        message = (
            f"teacher {config.model.id} ends answers with ids {ids}, the student with {backbone.eos_ids}"
        )
        raise UsageError(message, HINT)
    return model.requires_grad_(False)
