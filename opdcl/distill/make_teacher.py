"""Build teachers from a configuration, after checking that their tokens mean the same as the student's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from opdcl import parallel
from opdcl.config.model import ServerSection
from opdcl.config.teacher import TeacherSection
from opdcl.distill.losses import token_logprobs
from opdcl.distill.teachers import EmaTeacher, RemoteTeacher, SecondModel, Teacher, TrustRegionTeacher
from opdcl.errors import UsageError
from opdcl.model.architecture import architecture
from opdcl.model.backbone import Backbone, State
from opdcl.model.compatibility import HINT, PROBES, check_same_tokenizer
from opdcl.model.load import eos_ids, load_base, load_tokenizer
from opdcl.sampling.rollout import Prompt, Rollout
from opdcl.sampling.server import Server

# Nats per token by which a model may differ from its copy on a server: between rounding and another model.
SAME_MODEL = 0.3

Notify = Callable[[str], None]


def make_teacher(
    config: TeacherSection, backbone: Backbone, state: State = "general", notify: Notify = lambda text: None
) -> Teacher:
    """Return the teacher that a configuration describes.

    An `ema` or `adapter` teacher needs its adapter on the backbone already, as `state`. `notify` receives
    messages about a server that does not answer.
    """
    match config.kind:
        case "live":
            return Teacher(backbone, "student")
        case "adapter":
            return Teacher(backbone, state)
        case "ema":
            return EmaTeacher(backbone, state, config.rate)
        case "trust_region":
            return TrustRegionTeacher(backbone, config.reference, config.mix)
        case "model":
            return SecondModel(backbone, _load_model(config, backbone))
        case "remote":
            return RemoteTeacher(backbone, reach_server(config.server, backbone, notify))
        case frozen:
            return Teacher(backbone, frozen)


def reach_server(config: ServerSection, backbone: Backbone, notify: Notify) -> Server:
    """Connect to a server whose tokenizer agrees with the student's.

    Raises:
        UsageError: The tokenizers differ.
    """
    server = Server(config, architecture(backbone.causal_lm.config).vocabulary, notify)
    for probe in PROBES:
        local_ids = backbone.tokenizer(probe, add_special_tokens=False)["input_ids"]
        server_ids = server.encode(probe)
        if local_ids != server_ids:
            server.close()
            difference = f"it encodes {probe!r} as {server_ids[:8]}, the student as {local_ids[:8]}"
            raise UsageError(f"the server at {config.url} has another tokenizer: {difference}", HINT)
    return server


def reach_own_model(config: ServerSection, backbone: Backbone, notify: Notify) -> Server:
    """Connect to a server that serves the student's own base, compared by tokenizer and by log-probabilities.

    Raises:
        UsageError: The server has another tokenizer or another model.
    """
    server = reach_server(config, backbone, notify)
    ids = backbone.tokenizer(" ".join(PROBES[:6]), add_special_tokens=False)["input_ids"]
    prompt_ids, completion_ids = ids[:1], ids[1:]
    server_N = server.grade(prompt_ids, completion_ids).get().logprob_N
    base = Teacher(backbone, "base").distribution([Rollout(Prompt(prompt_ids), completion_ids)])
    token_N = torch.tensor(completion_ids, device=backbone.device)
    base_N = token_logprobs(base, token_N, len(backbone.head_VH))
    gap = float((base_N.cpu() - server_N).abs().mean())
    if gap > SAME_MODEL:
        server.close()
        raise UsageError(
            f"the server at {config.url} serves another model as {server.model}: "
            f"on a probe the two differ by {gap:.2f} nats per token",
            "start it with `opdcl serve RUN`, and set server.model to the name of the base",
        )
    return server


def _load_model(config: TeacherSection, backbone: Backbone) -> PreTrainedModel:
    """Load another model on the student's device, if tokenizer and end-of-sequence ids agree."""
    shard = parallel.sharded() and not config.model.quantization
    # The student's template writes the prompts. Whether the teacher's is the same was checked beforehand.
    own = backbone.tokenizer.chat_template
    template = own if isinstance(own, str) else None
    model_config = config.model.resident(device=str(backbone.device), shard=shard, chat_template=template)
    tokenizer = load_tokenizer(model_config)
    check_same_tokenizer(backbone.tokenizer, tokenizer, f"teacher {model_config.id}")
    model, _ = load_base(model_config, tokenizer)
    if (ids := eos_ids(model, tokenizer)) != backbone.eos_ids:
        message = (
            f"teacher {config.model.id} ends answers with ids {ids}, the student with {backbone.eos_ids}"
        )
        raise UsageError(message, HINT)
    return model.requires_grad_(False)
