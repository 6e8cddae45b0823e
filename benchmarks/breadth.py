"""Write the prompt files and the workflow that compare general prompts: how many, and of which kinds.

    python benchmarks/breadth.py PUBLIC.jsonl runs/breadth-prompts
    opdcl run quickstart runs/breadth-prompts/breadth.yaml -o runs/breadth     # resumes where it stopped

PUBLIC.jsonl has rows with `prompt`. Five kinds of source are compared: the shipped prompts, public ones,
those that base writes, public ones with a third of short facts, and thirds of shipped, public and own. Each
has all prompts different, and the first and the last also a quarter as many, four times each. `--tuned RUN`
adds public prompts that were chosen by how far tuned is from base at the start of base's answers.

Registered before the runs. All arms start from one fine-tune of a seed that no result uses, and are judged on
prompts for which no result is reported. The rule: the best mean of four numbers, each counted from its floor
as a share of base's: R on instructions_validation, R on neighbours_validation, C on requests that
`requests_quick` does not have, and D on the learned wordings. A difference below 0.1 of the mean counts as
none; then the simpler source is taken. 150 prompts know R of one arm to about 0.15, so only large differences
decide.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch

from opdcl.config.recover import RecoverConfig
from opdcl.config.shipped import package_folder
from opdcl.console import Output
from opdcl.data.prompt_kinds import prompt_kind
from opdcl.data.rows import Row, load_prompts
from opdcl.distill.own_prompts import own_prompts

DIFFERENT, FEW, SEED = 256, 64, 3
LONGEST = 1000  # characters of a public prompt

WORKFLOW = """\
name: breadth
description: General prompts of several sources, one seed, judged on validation prompts.
seeds: [3]
recover: {steps: 64}
eval:
  retention: [instructions_validation]
  domain: [handbook_trained]
  control: [neighbours_validation]
  closeness: %(folder)s/closeness.jsonl
  limit: 150
arms:
%(arms)s
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("public", help="JSONL file with rows that have `prompt`")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tuned", type=Path, help="a run whose tuned adapter tells how far prompts are")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    public = [row for row in load_prompts(options.public) if len(row.prompt[-1]["content"]) <= LONGEST]
    random.Random(SEED).shuffle(public)
    shipped = load_prompts("everyday")
    random.Random(SEED).shuffle(shipped)
    own = written_by_base(options.out / "own.jsonl")
    facts = [row for row in shipped if prompt_kind(row) == "fact"]
    third = DIFFERENT // 3
    sets = {
        "shipped": shipped[:DIFFERENT],
        "public": public[:DIFFERENT],
        "own": own[:DIFFERENT],
        "public-facts": public[: 2 * third] + facts[:third],
        "thirds": shipped[:third] + public[:third] + own[:third],
        "shipped-few": shipped[:FEW],
        "thirds-few": shipped[: FEW // 3] + public[: FEW // 3] + own[: FEW // 3],
    }
    if options.tuned:
        sets["public-far"] = farthest(public[: 3 * DIFFERENT], options.tuned)
    requests = package_folder("evals") / "closeness" / "prompts.jsonl"
    lines = requests.read_text(encoding="utf-8").splitlines()[40:140]
    (options.out / "closeness.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    arms = []
    for name, rows in sets.items():
        file = options.out / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"messages": r.prompt}) + "\n" for r in rows), encoding="utf-8")
        arms.append(f"  {name}: {{recover: {{general: {file.absolute()}}}}}")
    text = WORKFLOW % {"folder": options.out.absolute(), "arms": "\n".join(arms)}
    (options.out / "breadth.yaml").write_text(text, encoding="utf-8")


def written_by_base(file: Path) -> list[Row]:
    """Return prompts that base writes into a file, unless they are there."""
    from opdcl.config.model import ModelConfig
    from opdcl.model.backbone import Backbone

    backbone = Backbone.load(ModelConfig(dtype="bfloat16", device="cpu"))
    with Output().stage("prompts") as line:
        return own_prompts(RecoverConfig(seed=SEED), DIFFERENT, backbone, [], file, line)


@torch.no_grad()
def farthest(rows: list[Row], run: Path) -> list[Row]:
    """Return a third of the prompts: within each kind, those on which tuned is farthest from base.

    The distance is KL(base, tuned) per token over the first tokens of base's greedy answer.
    """
    from opdcl.config.model import ModelConfig
    from opdcl.data.chat import encode_prompt
    from opdcl.distill.losses import both_divergences
    from opdcl.distill.teachers import sequence
    from opdcl.model.backbone import Backbone
    from opdcl.model.distributions import HiddenStates
    from opdcl.model.forward import answer_states
    from opdcl.rundir.layout import RunDir
    from opdcl.sampling.rollout import Prompt
    from opdcl.sampling.sample import sample

    backbone = Backbone.load(ModelConfig(dtype="bfloat16", device="cpu"))
    backbone.load_adapter(RunDir(run).adapters()["tuned"], "student")
    prompts = [Prompt(encode_prompt(row, backbone.tokenizer, 1000)) for row in rows]
    with backbone.merged("base") as model:
        answers = sample(model, prompts, max_new_tokens=24, eos_ids=backbone.eos_ids, temperature=0.0)
        texts = [sequence(answer.prompt_ids, answer.completion_ids) for answer in answers]
        of_base = [answer_states(model, [text]) for text in texts]
    with backbone.merged("student") as model:
        of_tuned = [answer_states(model, [text]) for text in texts]
    heads = backbone.head_of("base"), backbone.head_of("student")
    distances = []
    for base, tuned in zip(of_base, of_tuned, strict=True):
        forward, _ = both_divergences(HiddenStates(tuned, heads[1]), HiddenStates(base, heads[0]))
        distances.append(float(forward.mean()))
    kinds = [prompt_kind(row) for row in rows]
    chosen: list[Row] = []
    for kind in sorted({*kinds}):
        numbers = sorted((i for i, k in enumerate(kinds) if k == kind), key=lambda i: -distances[i])
        chosen += [rows[i] for i in numbers[: round(len(numbers) / 3)]]
    return chosen


if __name__ == "__main__":
    main()
