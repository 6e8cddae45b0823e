"""A reward on completions: loss as in TRL, scores as in the evaluation, and the student learns from it."""

import json
import statistics

import pytest
import torch
from datasets import Dataset
from helpers.near import ROUNDING, flat, relative_error
from helpers.recovering import SHORT, log_probs, make_trainer, whole_and_resumed
from helpers.stock import write_stock
from helpers.teaching import taught
from trl import GRPOConfig, GRPOTrainer

from opdcl.config.evaluate import EvalConfig
from opdcl.config.recover import RecoverConfig, RewardSection
from opdcl.config.workflow import Workflow
from opdcl.data.chat import encode_prompt
from opdcl.data.prompts import count_short_of_room, load_reward_task, read_recovery_source, reward_rows
from opdcl.data.suites import load_suite
from opdcl.errors import UsageError
from opdcl.rundir.files import read_jsonl
from opdcl.train.reward import Reward, group_advantages
from opdcl.train.teachers import Teacher
from opdcl.words import Prompt, Rollout

GROUP = 4
REWARDED = {"suite": "instructions_train", "metric": "inst_level_strict_acc", "group": GROUP}
SETTINGS = {"lmbda": 1.0, "keep": "last", "rollouts": 8, "reward": REWARDED}


def make_reward(backbone, context=None, kind=Reward, notify=print, **settings):
    config = RewardSection(**REWARDED | settings)
    task = load_reward_task(config.suite)
    return kind(config, task, reward_rows(config, task), backbone, context, notify)


def test_an_advantage_is_the_distance_from_the_groups_mean_in_deviations():
    rewards = [0.0, 1.0, 1.0, 0.5, 0.25, 0.25, 0.25, 0.25]
    mean, deviation = statistics.mean(rewards[:4]), statistics.stdev(rewards[:4])
    advantages = group_advantages(rewards, GROUP)
    assert advantages[:4] == pytest.approx([(r - mean) / (deviation + 1e-4) for r in rewards[:4]])
    assert advantages[4:] == [0, 0, 0, 0]  # equal rewards teach nothing
    assert sum(advantages[:4]) == pytest.approx(0, abs=1e-12)
    assert group_advantages([0.1] * 3 + [0.7] * 3, 3) == [0.0] * 6  # whatever their rounding
    assert group_advantages([10 * r + 3 for r in rewards], GROUP) == pytest.approx(advantages, rel=1e-3)


def test_a_reward_is_the_score_that_an_evaluation_gives(backbone):
    """After the suite's stops and its filters, whatever these leave: a text, or a list of texts."""
    from lm_eval.filters import build_filter_ensemble

    reward = make_reward(backbone, metric="prompt_level_strict_acc")
    seen = []
    score = reward.task.config.process_results
    reward.task.config.process_results = lambda doc, results: seen.append(results[0]) or score(doc, ["x"])
    reward.task.config.generation_kwargs["until"] = " here"  # as text, which lm-eval takes for one stop
    written = backbone.tokenizer("No title, no title here.", add_special_tokens=False)["input_ids"]
    find = ["regex", {"regex_pattern": "(title)", "group_select": -1, "fallback": "?"}]
    for steps in ([["take_first", None]], [find, ["take_first", None]], [find]):
        reward.task._filters = [build_filter_ensemble("none", steps)]
        reward([Rollout(Prompt([1], number=0), written, [], True)])
    assert seen == ["No title, no title", "title", ["title"]]


def test_prompts_with_examples_are_asked_as_an_evaluation_asks_them(backbone, tmp_path):
    file = write_stock(tmp_path, "gsm8k")
    suite = load_suite("gsm8k", EvalConfig(data={"gsm8k": str(file)}), trusted=True)
    asked = suite.encode(2, backbone.tokenizer)
    suite.task.dataset["test"] = suite.task.dataset["test"].select(range(2))
    rows = reward_rows(RewardSection(suite="gsm8k"), suite.task)
    assert len(rows[0].prompt) == 11  # five examples, each a turn of its own
    assert [encode_prompt(row, backbone.tokenizer, 100_000) for row in rows] == asked


@pytest.fixture
def rollouts():
    generator = torch.Generator().manual_seed(3)
    found = []
    for i in range(8):
        written = torch.randint(3, 400, (3 + i % 4,), generator=generator).tolist()
        found.append(Rollout(Prompt([1, 520, 3690, 198, 40 + i // GROUP]), written, [], False))
    rewards = [0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.0]
    for rollout, reward, advantage in zip(found, rewards, group_advantages(rewards, GROUP), strict=True):
        rollout.reward, rollout.advantage = reward, advantage
    return found


def rewarded_trainer(backbone, tuned, max_new_tokens=6, **reward):
    backbone.drop_adapters()
    backbone.load_adapter(tuned / "tuned", "student", trainable=True)
    backbone.load_adapter(tuned / "tuned", "tuned")
    settings = {"keep": "last", "rollouts": 8, "max_new_tokens": max_new_tokens, "weighting": "tokens"}
    return make_trainer(backbone, tuned, reward=REWARDED | reward, **settings)


def gradient(trainer, rollouts):
    trainer.model.zero_grad()
    trainer.model.train()
    sums = trainer.learn(rollouts, "general")
    return sums["loss"] / sums["tokens"], {
        n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None
    }


def with_logprobs(trainer, rollouts, drift=0.0):
    """Give each rollout the log-probabilities of a sampler that differs from the student by `drift`."""
    for rollout in rollouts:
        steps = zip(rollout.completion_ids, log_probs(trainer.model, rollout), strict=True)
        rollout.logprobs = [float(row[token]) + drift * (-1) ** i for i, (token, row) in enumerate(steps)]
    return rollouts


@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_loss_and_gradient_are_those_of_trls_grpo(backbone, tuned, rollouts, drift):
    ours = rewarded_trainer(backbone, tuned, teacher=0.0)
    rollouts = with_logprobs(ours, rollouts, drift)
    loss, mine = gradient(ours, rollouts)

    args = GRPOConfig(
        output_dir=str(tuned / "grpo"),
        per_device_train_batch_size=8,
        num_generations=GROUP,
        beta=0.0,
        loss_type="dapo",
        max_steps=1,
        bf16=False,
        use_cpu=True,
        report_to="none",
        temperature=1.0,
        gradient_checkpointing=False,
        epsilon=0.2,
    )
    theirs = GRPOTrainer(
        model=ours.model,
        reward_funcs=lambda **_: [0.0],
        args=args,
        processing_class=backbone.tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
    )
    width = max(len(r.completion_ids) for r in rollouts)

    def padded(rows, dtype):
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)

    prompt_ids = torch.tensor([r.prompt_ids for r in rollouts])
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": padded([r.completion_ids for r in rollouts], torch.long),
        "completion_mask": padded([[1] * len(r.completion_ids) for r in rollouts], torch.long),
        "advantages": torch.tensor([r.advantage for r in rollouts], dtype=torch.float32),
        "old_per_token_logps": padded([r.logprobs for r in rollouts], torch.float32),
        "num_items_in_batch": torch.tensor(sum(len(r.completion_ids) for r in rollouts)),
    }
    theirs.current_gradient_accumulation_steps = args.steps_per_generation
    theirs.model.train()
    theirs.model.zero_grad()
    reference = theirs._compute_loss(theirs.model, batch)
    reference.backward()
    assert loss == pytest.approx(float(reference.detach()), rel=1e-4, abs=1e-6)
    expected = {n: p.grad for n, p in theirs.model.named_parameters() if p.grad is not None}
    assert mine.keys() == expected.keys()
    assert relative_error(flat(mine.values()), flat(expected[name] for name in mine)) < ROUNDING


def test_a_completion_is_scored_as_the_evaluation_scores_it(backbone):
    reward = make_reward(backbone)
    task = load_reward_task(REWARDED["suite"])
    requests = load_suite(REWARDED["suite"]).requests(40, backbone.tokenizer)
    rows = reward_rows(reward.config, task)
    assert len(rows) == len(list(task.eval_docs))
    scores = set()
    for instance in requests:
        ids = backbone.tokenizer(instance.args[0], add_special_tokens=False)["input_ids"]
        prompt = Prompt(ids, number=instance.doc_id)
        constraints = json.loads(instance.doc["constraints"])
        asked = " ".join(word for c in constraints for word in c.get("words", []))
        for answer in (f"<<Title>>\n\n{asked}.", "no", "One. Two. Three.\n\nP.S. More."):
            written = backbone.tokenizer(answer, add_special_tokens=False)["input_ids"]
            (score,) = reward([Rollout(prompt, [*written, backbone.eos_ids[0]], [], True)])
            parts = task.process_results(instance.doc, [answer])["inst_level_strict_acc"]
            assert score == sum(parts) / len(parts)
            scores.add(score)
    assert {0.0, 1.0} < scores  # and halves, where an answer keeps one of two constraints


@pytest.mark.parametrize(
    "extra",
    [{}, {**taught({"kind": "ema", "context": "{prompt} {answer} {feedback}"}, "general")}],
    ids=["base", "shown the best"],
)
def test_a_rewarded_recovery_resumes_to_the_same_bits(backbone, tuned, extra):
    steps = {"general_per_domain": 2, "sample_ahead": 2, "validate_every": 2, "domain_rollouts": 4}
    config = RecoverConfig(domain=str(tuned / "domain.jsonl"), **SHORT | steps | SETTINGS | extra)
    whole, resumed = whole_and_resumed(backbone, tuned, config, stop=3)
    rows = [r for r in read_jsonl(whole.metrics) if "loss" in r]
    assert [("reward" in r) == (r["stream"] == "general") for r in rows] == [True] * 6
    assert all(0 <= r["reward"] <= 1 and 0 <= r["reward_tied"] <= 1 for r in rows if "reward" in r)
    assert [r["reward"] for r in rows if "reward" in r] == [
        r["reward"] for r in read_jsonl(resumed.metrics) if "reward" in r
    ]


CONTEXT = "{prompt}\n\nThis answer did well: {answer}\n\nOf yours the checker says: {feedback}\n\nAgain."


def test_the_teacher_of_a_worse_completion_sees_the_best_of_the_group_and_the_feedback(backbone):
    """SDPO's contexts: only the teacher sees the successful sibling and the environment's feedback."""
    reward = make_reward(backbone, CONTEXT)
    decode = backbone.tokenizer.decode
    rows = [row for row, _ in reward._sources]
    number = next(i for i, row in enumerate(rows) if "title" in row.prompt[-1]["content"])
    row, prompt = rows[number], Prompt(encode_prompt(rows[number], backbone.tokenizer, 512), number=number)
    answers = ["<<Bread>>\n\nIt rose.", "no", "nothing", "<<Bread>>\n\nIt fell."]
    group = [
        Rollout(prompt, backbone.tokenizer(a, add_special_tokens=False)["input_ids"], [], True, reward=r)
        for a, r in zip(answers, (1.0, 0.0, 0.0, 1.0), strict=True)
    ]
    reward._demonstrate(group)
    assert [r.prompt.context is not None for r in group] == [False, True, True, False]
    teacher_prompt = decode(group[1].prompt.context)
    assert row.prompt[-1]["content"] in teacher_prompt
    assert "This answer did well: <<Bread>>\n\nIt rose." in teacher_prompt
    assert "Not kept:" in teacher_prompt
    assert "<<" in teacher_prompt.split("checker says:")[1]  # the checker's own words name the constraint
    assert "did well" not in decode(group[1].prompt_ids)

    equal = [Rollout(prompt, [5], [], True, reward=0.5) for _ in range(GROUP)]
    reward._demonstrate(equal)
    assert all(r.prompt is prompt for r in equal)


def test_a_demonstration_that_does_not_fit_is_not_shown_and_said_once(backbone):
    notes = []
    reward = make_reward(backbone, CONTEXT, notify=notes.append)
    word = backbone.tokenizer(" bread", add_special_tokens=False)["input_ids"]

    def demonstrate(prompt, longest):
        answers = [word * longest, [5, 6], [7]]
        group = [Rollout(prompt, a, [], True, reward=float(a is answers[0])) for a in answers]
        reward._demonstrate([*group, Rollout(prompt, [8], [], True, reward=0.0)])
        return [r.prompt.context is not None for r in group]

    prompts = [Prompt([1], number=i) for i in range(2)]
    assert demonstrate(prompts[0], 100) == [False, True, True]
    assert notes == []
    for prompt in prompts:  # the model's context has 512 tokens
        assert demonstrate(prompt, 600) == [False, False, False]
    assert notes == ["a demonstration does not fit into the context: it is not shown"]


def test_a_live_teacher_changes_only_completions_with_a_context(backbone, tuned):
    trainer = rewarded_trainer(backbone, tuned, weight=0.0, teacher=1.0)
    trainer.learner.teachers["general"] = {"": Teacher(backbone, "student")}
    prompt = Prompt([1, 520, 3690, 198, 40])
    rollouts = with_logprobs(
        trainer, [Rollout(prompt, [7, 9, 11], [], False, reward=float(i == 0)) for i in range(GROUP)]
    )
    same_loss, same_gradient = gradient(trainer, rollouts)
    rollouts[1].prompt = Prompt(prompt.ids, context=[1, 520, 3690, 7, 9, 11, 198, 40])
    loss, slope = gradient(trainer, rollouts)
    assert loss > 1e-3
    assert abs(same_loss) < ROUNDING * loss
    assert flat(same_gradient.values()).norm() < ROUNDING * flat(slope.values()).norm()
    with torch.no_grad():
        mine, seen = (
            trainer.model(torch.tensor([[*prompt, 7, 9, 11]])).logits[0, -4:-1].log_softmax(-1)
            for prompt in (rollouts[1].prompt.ids, rollouts[1].prompt.context)
        )
    expected = float((seen.exp() * (seen - mine)).sum())
    assert loss * GROUP * 3 == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lmbda": 0.5}, "the student's own completions"),
        ({"rollouts": 6}, "multiple of reward.group"),
        ({"keep": "best"}, "keep last"),
        (taught({"kind": "base", "context": "{prompt}{answer}{feedback}"}), "only general_teacher"),
    ],
)
def test_settings_that_conflict_with_a_reward_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        RecoverConfig(**SETTINGS | settings)


def test_a_suite_that_recovery_learns_from_cannot_be_measured():
    with pytest.raises(ValueError, match="trains on instructions_train"):
        Workflow(recover=SETTINGS, eval={"control": ["instructions_train"]})


@pytest.mark.parametrize(
    ("reward", "said"),
    [({"suite": "nothing_known"}, "unknown suite"), ({"metric": "beauty"}, "has no score 'beauty'")],
)
def test_an_unknown_suite_or_metric_is_refused_before_anything_runs(reward, said):
    with pytest.raises(UsageError, match=said):
        read_recovery_source(RecoverConfig(**SETTINGS | {"reward": REWARDED | reward}))


def test_the_metric_by_default_is_the_suites_first(backbone):
    reward = make_reward(backbone, metric=None)
    row, _ = reward._sources[0]
    assert row.prompt[-1]["role"] == "user"
    assert reward([Rollout(Prompt([1]), [2], [], True)]) in ([0.0], [1.0])


@pytest.mark.parametrize(("room", "short"), [(2000, 0), (158, 1), (60, None)])
def test_room_for_demonstrations_is_counted_beforehand(backbone, room, short):
    teacher = taught({"kind": "live", "context": CONTEXT}, "general")
    config = RecoverConfig(**SETTINGS, **teacher, max_new_tokens=30)
    task = load_reward_task("instructions_train")
    rows = reward_rows(config.reward, task)[:5]
    if short is None:
        with pytest.raises(UsageError, match="leaves no room for an answer within 60 tokens"):
            count_short_of_room(config, rows, backbone.tokenizer, room)
    else:
        assert count_short_of_room(config, rows, backbone.tokenizer, room) == short
