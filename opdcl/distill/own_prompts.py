"""General prompts that base writes itself.

Base gets its chat template up to where a user turn begins. What it writes until the turn ends is a prompt
(Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from pathlib import Path

from opdcl import parallel
from opdcl.config.recover import RecoverConfig
from opdcl.data.chat import user_turn
from opdcl.data.rows import Row, load_rows
from opdcl.data.similarity import nearest, similarity
from opdcl.distill.mixture import LONGEST
from opdcl.errors import OpdclError
from opdcl.model.backbone import Backbone
from opdcl.repetition import repetition
from opdcl.rundir.files import write_atomic
from opdcl.sampling.rollout import Prompt, Rollout
from opdcl.sampling.sample import sample
from opdcl.training import StageReport

# The length of the shortest prompt, in characters.
SHORTEST = 10

# Turns that are written at once, and in all for each prompt wanted.
ROUND, TRIES = 128, 4

# Share of the wanted prompts that is enough; maximum share of 4-grams that occurred earlier in a prompt.
ENOUGH, MOST_REPETITION = 0.25, 0.3

# Cosines of wording above which a prompt repeats another one, or is near to a test.
REPEATED, NEAR = 0.8, 0.6


def own_prompts(
    config: RecoverConfig, count: int, backbone: Backbone, tests: list[str], file: Path, report: StageReport
) -> list[Row]:
    """Return `count` prompts that base has written into `file`, or writes now if it does not exist.

    Prompts near to one of `tests` are left out. The same seed and base give the same prompts.

    Raises:
        OpdclError: Base writes too few usable prompts.
    """
    if not file.exists():
        prompts = _write(config, count, backbone, tests, report)
        lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
        write_atomic(file, "".join(f"{line}\n" for line in lines))
    report.note(f"general prompts of base's own are in {file}")
    return load_rows(str(file))


def _write(
    config: RecoverConfig, count: int, backbone: Backbone, tests: list[str], report: StageReport
) -> list[str]:
    tokenizer, turn, seeds = backbone.tokenizer, user_turn(backbone.tokenizer), random.Random(config.seed)
    prompts: list[str] = []
    dropped: Counter[str] = Counter()
    while len(prompts) < count and len(prompts) + dropped.total() < TRIES * count:
        with backbone.merged("base") as model:
            rollouts = sample(
                model,
                [Prompt(turn.opening)] * ROUND,
                max_new_tokens=LONGEST,
                eos_ids=sorted({*backbone.eos_ids, turn.end}),
                temperature=1.0,
                seed=seeds.getrandbits(31),
            )
        texts = [tokenizer.decode(r.completion_ids[:-1]).strip() for r in rollouts]
        faults = [fault(text, r, turn.markup) for text, r in zip(texts, rollouts, strict=True)]
        faults = parallel.on_first_worker(partial(with_repeats, texts, faults, prompts, tests))
        dropped.update(filter(None, faults))
        prompts += [text for text, reason in zip(texts, faults, strict=True) if not reason]
        report.progress(min(len(prompts), count), count)
    found = f"base wrote {len(prompts)} usable prompts; left out: "
    found += ", ".join(f"{n} {reason}" for reason, n in dropped.most_common()) or "none"
    if len(prompts) < ENOUGH * count:
        hint = "--prompts everyday; or name a file of prompts"
        raise OpdclError(f"{found}; {count} were wanted", hint)
    report.note(found)
    return prompts[:count]


def fault(text: str, rollout: Rollout, markup: set[int]) -> str:
    """Return why a text that base wrote is no prompt; "" if it is one."""
    if not rollout.finished:
        return "cut off"
    if len(text) < SHORTEST:
        return "too short"
    ids, visible = rollout.completion_ids[:-1], [char for char in text if not char.isspace()]
    if markup & {*ids} or "\ufffd" in text or 2 * sum(map(str.isalpha, visible)) < len(visible):
        return "not text"
    return "repetitive" if repetition([ids]) > MOST_REPETITION else ""


def with_repeats(texts: list[str], faults: list[str], prompts: list[str], tests: list[str]) -> list[str]:
    """Return `faults` with those of texts that repeat a prompt or an earlier text, or are near to a test."""
    near = nearest(texts, tests) if tests else [0.0] * len(texts)
    earlier = [*prompts, *texts]
    cosine, kept, found = similarity(texts, earlier), [*range(len(prompts))], [*faults]
    for i, text in enumerate(texts):
        if found[i]:
            continue
        if near[i] > NEAR:
            found[i] = "near to a test"
        elif cosine[i, kept].max(initial=0) > REPEATED or text in (earlier[j] for j in kept):
            found[i] = "repeated"
        else:
            kept.append(len(prompts) + i)
    return found
