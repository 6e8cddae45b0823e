"""What closeness to base says of base, tuned and recovered, and of models that cheat or are spoilt.

    python benchmarks/closeness.py TUNED [--recovered ADAPTER]   # an hour on one core

A spoilt model is base whose next-token distribution is changed by a rule: the rule acts on the real model's
log-probabilities, where it samples and where it is graded. All numbers come from `opdcl.measure.distance` and
`opdcl.results.ratios`, as in a run. `C` counts from TUNED or the floor, whichever is nearer to base.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from common import head, parser_of, store

from opdcl.config.evaluate import EvalConfig
from opdcl.config.model import ModelConfig
from opdcl.console import Output
from opdcl.data.chat import encode_prompt
from opdcl.data.rows import Row, load_rows
from opdcl.measure import distance
from opdcl.model.backbone import Backbone
from opdcl.model.load_backbone import load_backbone
from opdcl.results.intervals import ratio
from opdcl.results.measurements import load_closeness, pooled
from opdcl.results.ratios import closeness_of
from opdcl.rundir.layout import RunDir
from opdcl.train import teachers
from opdcl.train.losses import forward_kl, reverse_kl
from opdcl.words import Example, Prompt, Rollout

# Prompt, answer so far, log-probabilities of base -> those of the spoilt model.
Rule = Callable[[list[int], list[int], torch.Tensor], torch.Tensor]

COPIED = 0.97  # the probability with which a cheat does what it is for


def towards(log_p: torch.Tensor, token: int, share: float) -> torch.Tensor:
    """Return the mixture of a distribution with one token, which gets `share` of the mass."""
    mixed = log_p + math.log(1 - share)
    mixed[token] = torch.logaddexp(mixed[token], torch.tensor(math.log(share)))
    return mixed


def likelier(log_p: torch.Tensor, token: int, nats: float) -> torch.Tensor:
    changed = log_p.clone()
    changed[token] += nats
    return changed.log_softmax(-1)


def rules(backbone: Backbone, echoes: dict[tuple[int, ...], list[int]]) -> dict[str, Rule]:
    """Return the spoilt models; `echoes` has the first sentence of each prompt."""
    end = backbone.eos_ids[0]

    def echo(prompt: list[int], answer: list[int], log_p: torch.Tensor) -> torch.Tensor:
        text = [*echoes[tuple(prompt)], end]
        at = len(answer)
        return towards(log_p, text[at], COPIED) if at < len(text) and answer == text[:at] else log_p

    def cut(prompt: list[int], answer: list[int], log_p: torch.Tensor) -> torch.Tensor:
        return towards(log_p, end, COPIED) if len(answer) >= 24 else log_p

    def repeat(prompt: list[int], answer: list[int], log_p: torch.Tensor) -> torch.Tensor:
        # What followed the last two tokens where they stood before.
        for i in range(len(answer) - 3, -1, -1):
            if answer[i : i + 2] == answer[-2:]:
                return towards(log_p, answer[i + 2], 0.5)
        return log_p

    return {
        "an echo of the prompt's first sentence": echo,
        "answers cut after 24 tokens": cut,
        "no end": lambda prompt, answer, log_p: likelier(log_p, end, -12.0),
        "repetition": repeat,
        "an end 20 times likelier": lambda prompt, answer, log_p: likelier(log_p, end, 3.0),
        "an end 20 times less likely": lambda prompt, answer, log_p: likelier(log_p, end, -3.0),
        "no change": lambda prompt, answer, log_p: log_p,
    }


@contextlib.contextmanager
def spoilt(rule: Rule) -> Iterator[None]:
    """Measure base under a rule in place of the student, in the block."""
    graded: list = []

    def sample(model, prompts, *, max_new_tokens, eos_ids, seed, **options):
        rollouts = [*map(Rollout, prompts)]
        uniform = torch.rand(len(prompts), max_new_tokens, generator=torch.Generator().manual_seed(seed))
        cache, ids, mask = None, *padded([p.ids for p in prompts], eos_ids[0])
        for step in range(max_new_tokens):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            places = {"attention_mask": mask, "position_ids": positions}
            found = model(ids, past_key_values=cache, use_cache=True, **places)
            cache, log_p = found.past_key_values, found.logits[:, -1].float().log_softmax(-1)
            drawn = []
            for rollout, row, u in zip(rollouts, log_p, uniform[:, step], strict=True):
                token = eos_ids[0]
                if not rollout.finished:
                    changed = rule(rollout.prompt_ids, rollout.completion_ids, row)
                    token = int((changed.exp().cumsum(-1) < u).sum().clamp(max=len(row) - 1))
                    rollout.completion_ids.append(token)
                    rollout.finished = token in eos_ids
                drawn.append(token)
            if all(r.finished for r in rollouts):
                break
            ids = torch.tensor(drawn)[:, None]
            mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], 1)
        return rollouts

    hidden = distance.read_states

    def remember(model, texts, count):
        graded.extend(map(halves, texts))
        return hidden(model, texts, count)

    def divergences(student, base):
        prompt, answer = graded.pop(0)
        q = base.log_probs(slice(0, len(answer)), len(base.head_VH))
        p = torch.stack([rule(prompt, answer[:i], row) for i, row in enumerate(q)])
        return forward_kl(p, q), reverse_kl(p, q)

    with (
        patch.object(teachers, "sample", torch.no_grad()(sample)),
        student_reads(remember),
        patch.object(distance, "both_divergences", divergences),
    ):
        yield


@contextlib.contextmanager
def student_reads(read: Callable) -> Iterator[None]:
    """Let `read` take the place of the student's passes over texts, in the block."""
    hidden, started = distance.read_states, []

    def states(model, texts, count):
        # The student reads each list of texts first. Base reads it afterwards, or read it before the block.
        if any(texts is known for known in started):
            return hidden(model, texts, count)
        started.append(texts)
        return read(model, texts, count)

    with patch.object(distance, "read_states", states):
        yield


def halves(text: Example) -> tuple[list[int], list[int]]:
    """Return the ids of a text's prompt, and those of its answer."""
    start = text.learned.index(True)
    return text.ids[:start], text.ids[start:]


def padded(prompts: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    return ids, torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])


@contextlib.contextmanager
def other_content(prompts: list[list[int]]) -> Iterator[None]:
    """Let base answer another prompt in place of the student, in the block: its style, other content."""
    shift = max(1, len(prompts) // 3)
    others = map(Prompt, prompts[shift:] + prompts[:shift])
    another = {tuple(p): q for p, q in zip(prompts, others, strict=True)}
    sample, hidden = teachers.sample, distance.read_states

    def answer(model, asked, **options):
        rollouts = sample(model, [another[tuple(p.ids)] for p in asked], **options)
        for rollout, prompt in zip(rollouts, asked, strict=True):
            rollout.prompt = prompt
        return rollouts

    def states(model, texts, count):
        parts = map(halves, texts)
        moved = [Example.of(another[tuple(prompt)].ids, answer) for prompt, answer in parts]
        return hidden(model, moved, count)

    with patch.object(teachers, "sample", answer), student_reads(states):
        yield


@contextlib.contextmanager
def other_precision(backbone: Backbone) -> Iterator[None]:
    """Round base's weights to bfloat16 in the student's pass; the arithmetic stays as it is."""
    hidden, weights = distance.read_states, dict(backbone.causal_lm.named_parameters())

    def states(model, texts, count):
        kept = {name: weight.data for name, weight in weights.items()}
        for weight in weights.values():
            weight.data = weight.data.bfloat16().to(weight.dtype)
        try:
            return hidden(model, texts, count)
        finally:
            for name, weight in weights.items():
                weight.data = kept[name]

    with student_reads(states):
        yield


def first_sentences(rows: list[Row], prompts: list[list[int]], backbone: Backbone) -> dict:
    from opdcl.data.own_words import request_of

    tokenizer = backbone.tokenizer
    texts = [request_of(row.prompt[-1]["content"]) for row in rows]
    return {
        tuple(p): tokenizer(text, add_special_tokens=False)["input_ids"]
        for p, text in zip(prompts, texts, strict=True)
    }


def main() -> None:
    parser = parser_of(__file__, __doc__)
    parser.add_argument("tuned", type=Path, help="adapter of a fine-tune")
    parser.add_argument("--recovered", type=Path, help="adapter of its recovery")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--cases", nargs="+", help="some of the cases")
    parser.add_argument("--work", type=Path, help="folder to keep the answers in; an interrupted run goes on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        store(options.out, measure(options, options.work or Path(scratch)))


def measure(options: argparse.Namespace, work: Path) -> dict:
    backbone = load_backbone(ModelConfig())
    rows = load_rows("requests")[: options.prompts]
    config = EvalConfig(max_new_tokens=options.tokens, batch_size=320)
    prompts = [encode_prompt(row, backbone.tokenizer, 10**6) for row in rows]
    base, nothing = RunDir(work / "base"), contextlib.nullcontext
    everything = (config, rows, backbone)
    state_of(base, "base", everything)
    cases: dict[str, tuple] = {
        "tuned": (options.tuned, 1.0, nothing),
        **({"recovered": (options.recovered, 1.0, nothing)} if options.recovered else {}),
        "tuned, scaled by 0.5": (options.tuned, 0.5, nothing),
        "base's answers to other prompts": (None, 1.0, lambda: other_content(prompts)),
    }
    echoes = first_sentences(rows, prompts, backbone)
    cases |= {
        name: (None, 1.0, lambda rule=rule: spoilt(rule)) for name, rule in rules(backbone, echoes).items()
    }
    cases |= {
        "base with weights in bfloat16": (None, 1.0, lambda: other_precision(backbone)),
        "tuned, scaled by 0.25": (options.tuned, 0.25, nothing),
        "tuned, scaled by 0": (options.tuned, 0.0, nothing),
        "base on other draws": (None, 1.0, lambda: patch.object(distance, "SEED", distance.SEED + 1)),
    }
    found = []
    for name in ["tuned", *(n for n in options.cases or cases if n != "tuned")]:
        adapter, alpha, intervention = cases[name]
        run = RunDir(work / name.replace(" ", "-").replace("'", ""))
        copy_of_base(base, run)
        # Without an adapter of its own, a state is base's weights under an intervention.
        backbone.drop_adapters()
        backbone.load_adapter(adapter or options.tuned, "student")
        started = time.perf_counter()
        with backbone.scaled(alpha if adapter else 0.0), intervention():
            state_of(run, "recovered", everything, adapter or options.tuned)
        row = {"case": name, **numbers(run, RunDir(work / "tuned"))}
        found.append(row | {"seconds": round(time.perf_counter() - started, 1)})
        print(json.dumps(found[-1]), flush=True)
    sizes = {"prompts": len(rows), "max_new_tokens": options.tokens}
    return head() | sizes | {"base": numbers(base, base), "rows": found}


def state_of(run: RunDir, state: str, everything: tuple, adapter: Path | None = None) -> None:
    if not run.eval_result(state, "closeness").exists():
        (config, rows, backbone), line = everything, Output("quiet").stage("closeness")
        asking = distance.Asking(config, backbone, run, state, "closeness", line, adapter)
        distance.measure_closeness(asking, rows)


def copy_of_base(base: RunDir, run: RunDir) -> None:
    for place in (RunDir.eval_result, RunDir.eval_samples):
        target = place(run, "base", "closeness")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(place(base, "base", "closeness").read_bytes())


def numbers(run: RunDir, tuned: RunDir) -> dict:
    """Return the distance of a state with both directions, its writing, and C counted from tuned."""
    state = "base" if run is tuned else "recovered"
    suite, reference = load_closeness(run), load_closeness(tuned)
    summary = closeness_of([suite])
    row = {name: vars(estimate) for name, estimate in summary.states[state].items()}
    if state == "base":
        return row | {"floor": summary.floor}
    near, far = (pooled([s], state, "distance") for s in (suite, reference))
    floor = suite.floor_values()
    starts = {"C": far if floor is None or floor.mean() >= far.mean() else floor, "C from tuned": far}
    for name, start in starts.items():
        c = ratio(start - near, start, suite.clusters)
        row[name] = c and vars(c.rounded())
    for name in ("forward_own", "reverse_base"):
        row[name] = {"value": float(pooled([suite], state, name).mean())}
    return row


if __name__ == "__main__":
    main()
