"""Conversations that the model goes on with itself: against answers token by token, without a cache."""

import json

import pytest
import torch
from helpers.recovering import PROMPT, Notes, make_trainer, recover_rows, short_recovery, whole_and_resumed

from opdcl.config.model import LoraSection
from opdcl.model.backbone import Backbone
from opdcl.rundir.stage import StageDir
from opdcl.train.checkpoints import save_adapter
from opdcl.train.rollouts import RolloutQueue
from opdcl.train.teachers import Provided
from opdcl.words import Prompt, Step

# Two and three turns, and the ids around the answers before each later one; a prompt that is asked at once.
TALKS = [
    Prompt([*PROMPT, 9], following=[[[*PROMPT, 9], [2, 11]], [[*PROMPT, 7], [2, 11], [2, 12]]]),
    Prompt([*PROMPT, 8], following=[[[*PROMPT, 8], [2, 13]]]),
    Prompt([*PROMPT, 10]),
]
LIMIT = 12


@pytest.fixture
def ending(backbone, tmp_path):
    """A backbone that ends most answers within the limit, with a student that is not base."""
    backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    save_adapter(backbone, tmp_path / "tuned")
    backbone.load_adapter(tmp_path / "tuned", "tuned")
    backbone.eos_ids = list(range(0, backbone.causal_lm.config.vocab_size, 6))
    return backbone


def greedy(backbone, ids):
    """Return the likeliest answer, token by token, each after a forward pass over all before it."""
    answer = []
    with torch.no_grad(), backbone.state("student") as model:
        while len(answer) < LIMIT and not (answer and answer[-1] in backbone.eos_ids):
            answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return answer


def conversation(backbone, prompt):
    """Return ids and answer of each turn up to the first answer that does not end."""
    turns, said = [], []
    for parts in [[prompt.ids], *prompt.following]:
        ids = [*parts[0]]
        for answer, part in zip(said, parts[1:], strict=True):
            ids += answer + part
        turns.append((ids, greedy(backbone, ids)))
        if turns[-1][1][-1] not in backbone.eos_ids:
            break
        said.append(turns[-1][1][:-1])
    return turns


def test_the_student_goes_on_with_its_own_answers_up_to_one_that_does_not_end(ending, tmp_path):
    settings = {"on_policy": {"temperature": 0.0}, "max_new_tokens": LIMIT, "rollouts": 6}
    trainer = make_trainer(ending, tmp_path, sample_ahead=1, steps=1, **settings)
    queue = trainer.queue
    more = [Prompt([*PROMPT, i], following=[[[i], [2, i]]]) for i in range(20, 40)]
    queue.prompts["general"] = talks = TALKS + more
    queue.steps[0] = Step("general", tuple(range(len(talks))), True, True)
    expected = [conversation(ending, prompt) for prompt in talks]
    rollouts = queue.take(0).rollouts
    turns = [(r.prompt_ids, r.completion_ids) for r in rollouts]
    assert turns == [turn for talk in expected for turn in talk]
    lengths = [len(talk) for talk in expected]
    assert {1, 2} <= {length for length, prompt in zip(lengths, talks, strict=True) if prompt.following}
    assert queue.unasked == sum(prompt.turns for prompt in talks) - sum(lengths) > 0
    assert trainer.learn(rollouts, "general")["tokens"] == sum(len(r.completion_ids) for r in rollouts)


def test_a_step_has_as_many_answers_as_it_was_to_have_prompts(ending, tmp_path):
    """Or up to a conversation more; no prompt is passed over."""
    before = make_trainer(ending, tmp_path, steps=4, rollouts=3).queue
    queue = RolloutQueue(
        before.config, {"general": TALKS, "domain": TALKS}, before.teachers, Provided(), Notes()
    )
    drawn = [[s.prompts for s in q.steps if s.stream == "general"] for q in (before, queue)]
    in_order, dealt = ([number for own in steps for number in own] for steps in drawn)
    assert dealt == in_order[: len(dealt)]
    assert {len(own) for own in drawn[0]} == {3}
    assert {3, 4} >= {sum(TALKS[number].turns for number in own) for own in drawn[1]}


@pytest.mark.parametrize("lmbda", [0.0, 1.0])
def test_a_recovery_on_conversations_resumes_exactly_and_says_what_was_not_asked(backbone, tuned, lmbda):
    ends = list(range(0, backbone.causal_lm.config.vocab_size, 6))
    backbone.causal_lm.generation_config.eos_token_id = ends
    turns = [{"role": "user", "content": text} for text in ("Name {}.", "Why?", "And then?")]
    rows = [{"messages": json.loads(json.dumps(turns[: 1 + i % 3]).replace("{}", str(i)))} for i in range(9)]
    (tuned / "general.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = short_recovery(tuned, lmbda=lmbda, steps=5, validate_every=2, health=False)
    whole_and_resumed(backbone, tuned, config, stop=3)
    notes = Notes()
    backbone = Backbone(backbone.causal_lm, backbone.tokenizer)
    recover_rows(config, backbone, tuned / "tuned", StageDir(tuned / "n"), notes)
    (found,) = [line for line in notes.lines if "not asked" in line]
    assert found.endswith("the answer before each ran into its maximum length, recover.max_new_tokens")
