"""The order of rows, and the fine-tune's loss against a plain computation."""

import json
import math
from collections import Counter

import pytest
import torch
from helpers.learning import encode_example
from helpers.near import ROUNDING, flat, relative_error
from helpers.recovering import Notes, Silent
from safetensors.torch import load_file

from opdcl import parallel
from opdcl.config.finetune import FinetuneConfig, LoraSection, ReplaySection
from opdcl.config.model import ModelConfig
from opdcl.console import Output
from opdcl.data.chat import encode_prompt
from opdcl.data.examples import read_examples, with_answers
from opdcl.data.rows import Row, load_rows
from opdcl.errors import OpdclError
from opdcl.model.load_backbone import load_backbone
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.stage import StageDir
from opdcl.train.finetune import finetune, finetune_streams, interleave, lay_out, planned_steps
from opdcl.train.learner import Learner, mean_loss
from opdcl.train.teachers import Teacher
from opdcl.words import Batch, Example, Prompt, Rollout

QA = Row([{"role": "user", "content": "What is the code?"}], "Seven", None, "here:1")


STREAMS = finetune_streams(FinetuneConfig(data="d"))


def rows_of(lengths) -> list[Example]:
    """Return rows of these lengths, each with an id of its own in front, whose last three ids are learned."""
    return [Example.of([i] + [0] * (length - 4), [1] * 3) for i, length in enumerate(lengths)]


def batches_of(stream, rows, size, steps) -> list[Batch]:
    laid_out = lay_out(rows, size, steps, 0)
    return [Batch(STREAMS[stream], of_step, STREAMS[stream].author) for of_step in laid_out]


@pytest.mark.parametrize(("rows", "batch", "steps"), [(10, 4, 5), (7, 3, 7), (200, 16, 25), (3, 8, 2)])
def test_every_epoch_has_every_row_once_and_every_step_is_full(rows, batch, steps):
    laid_out = lay_out(rows_of([4 + i % 9 for i in range(rows)]), batch, steps, seed=0)
    assert [len(step) for step in laid_out] == [batch] * steps
    order = [row.ids[0] for step in laid_out for row in step]
    for start in range(0, len(order) - rows + 1, rows):
        assert set(Counter(order[start : start + rows]).values()) == {1}


def test_the_order_is_fixed_by_the_seed_and_a_shorter_run_is_its_beginning():
    rows = rows_of([4 + i % 13 for i in range(40)])
    assert lay_out(rows, 4, 20, 1) == lay_out(rows, 4, 20, 1)
    assert lay_out(rows, 4, 20, 1) != lay_out(rows, 4, 20, 2)
    assert lay_out(rows, 4, 20, 1)[:4] == lay_out(rows, 4, 4, 1)


def test_rows_of_like_length_share_a_step():
    steps = lay_out(rows_of([4 + i % 50 for i in range(400)]), 8, 50, 0)
    lengths = [[len(row.ids) for row in step] for step in steps]
    assert sum(max(step) - min(step) for step in lengths) / len(steps) < 5


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("rows", [4, 12, 23, 100, 210, 420, 1000, 1099])
def test_the_domain_has_its_share_of_the_loss_for_any_number_of_rows(rows, share):
    """Each step's loss is a mean over tokens: a step of both kinds would be of the longer answers."""
    config = FinetuneConfig(data="d", batch_size=16, replay=ReplaySection(share=share, most=10_000))
    domain = rows_of([40 + i % 20 for i in range(rows)])
    replayed = rows_of([60 + i % 90 for i in range(config.replayed(rows))])
    domain_steps, replay_steps = planned_steps(config, rows)
    of_rows = batches_of("domain", domain, 16, domain_steps)
    batches = interleave(of_rows, batches_of("general", replayed, 16, replay_steps))
    of_domain = [batch.stream.name == "domain" for batch in batches]
    assert abs(sum(of_domain) - (1 - share) * len(batches)) <= 0.5 + 1e-9  # the nearest whole number of steps
    assert sum(of_domain) == domain_steps
    # Evenly spread: any stretch of the run has that share, but for a step.
    for start in range(0, len(batches) - 10, 10):
        stretch = of_domain[start : start + 10]
        assert abs(sum(stretch) - 10 * domain_steps / len(batches)) < 1 + 1e-9


def test_a_large_data_set_has_as_few_replayed_steps_as_replayed_rows():
    config = FinetuneConfig(data="d", batch_size=16, epochs=2, replay=ReplaySection(share=0.7, most=100))
    assert config.replayed(1000) == 100
    assert planned_steps(config, 1000) == (125, 12)  # each row once an epoch, as without the limit


@pytest.mark.parametrize(
    ("rows", "epochs", "batch", "share"),
    [(2, 5, 1, 0.1), (49, 5, 2, 0.01), (4, 20, 4, 0.1), (2, 5, 16, 0.25)],
)
def test_few_rows_and_a_small_share_make_steps_of_both_kinds_or_no_replay(rows, epochs, batch, share):
    """Rows and steps are rounded apart: a step without a row to fill it would never be laid out."""
    config = FinetuneConfig(data="d", batch_size=batch, epochs=epochs, replay=ReplaySection(share=share))
    domain_steps, replay_steps = planned_steps(config, rows)
    assert domain_steps >= 1
    assert not replay_steps or config.replayed(rows)


def test_a_share_too_small_for_a_step_is_said(learn, replay):
    notes = Notes()
    _, steps = learn("few", replay=replay | {"share": 0.01}, report=notes)
    assert len(steps) == 2  # as without replay
    assert any("nothing is replayed" in line for line in notes.lines)


def test_without_replay_the_steps_are_those_of_the_domain_alone():
    rows = rows_of([4 + i % 13 for i in range(23)])
    steps = batches_of("domain", rows, 4, 11)
    assert interleave(steps, []) == steps


def test_only_the_answer_is_learned_and_it_ends_with_the_turn(backbone):
    (encoded,) = encode_example(QA, backbone.tokenizer, 500)
    learned = [i for i, m in zip(encoded.ids, encoded.learned, strict=True) if m]
    assert backbone.tokenizer.decode(learned) == "Seven<|im_end|>"
    prompt = encode_prompt(QA, backbone.tokenizer, 500)
    assert encoded.ids[: len(prompt)] == prompt


class StopAt(Silent):
    """A report that interrupts training after a step, or base when it has written a number of answers."""

    def __init__(self, step=None, answers=None):
        self.step, self.answers, self.first = step, answers, None

    def progress(self, done, total, **values):
        if done == self.step:
            raise KeyboardInterrupt

    def part(self, what, done, total):
        self.first = done if self.first is None else self.first
        if done == self.answers:
            raise KeyboardInterrupt


@pytest.fixture
def learn(tmp_path, tiny_model):
    """Return a function that fine-tunes on eight rows: the adapter, and each step's loss and field."""
    rows = [{"question": f"Code of {i}?", "answer": f"Code {i * 7}" + " again" * i} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    usual = {"data": str(tmp_path / "rows.jsonl"), "epochs": 2, "batch_size": 8, "learning_rate": 1e-3}
    usual |= {"lora": LoraSection(r=4, alpha=8), "replay": ReplaySection(share=0)}

    def run(name, field="grad_norm", report=None, start=None, **settings):
        config = FinetuneConfig(**usual | settings)
        base = ModelConfig(id=str(tiny_model), dtype="float32")
        out = StageDir(tmp_path / name)
        backbone = load_backbone(base)
        replay = load_rows(config.replay.prompts) if config.replay.share else []
        rows = with_answers(load_rows(config.data), config)
        read = read_examples(rows, config, backbone.tokenizer, replay)
        report = report or Output("quiet").stage("finetune")
        try:
            finetune(config, read.encoded, read.replay, backbone, start, out, report)
        except KeyboardInterrupt:
            return {}, []
        steps = [(r["loss"], r[field]) for r in read_jsonl(out.metrics)]
        return load_file(out.adapter / "adapter_model.safetensors"), steps

    return run


@pytest.mark.parametrize(
    "fault", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("std::bad_alloc")]
)
def test_out_of_memory_cuts_the_batch_and_changes_no_gradient(learn, memory_for, caplog, fault):
    whole, steps = learn("whole")
    memory_for(2, fault)
    cut, cut_steps = learn("cut")
    assert cut_steps == [pytest.approx(step, rel=1e-3) for step in steps]  # Adam alone would hide a factor
    # Adam turns rounding of a gradient close to zero into a step of full size: compare the whole.
    assert relative_error(flat(cut.values()), flat(whole[name] for name in cut)) < 10 * ROUNDING
    assert "continuing with micro-batches of" in caplog.text


def test_the_first_loss_is_the_mean_over_all_answer_tokens_and_over_no_others(learn, tmp_path, backbone):
    _, steps = learn("whole", "tokens")  # a new adapter changes nothing yet
    total, count, length = 0.0, 0, 0
    for row in load_rows(str(tmp_path / "rows.jsonl")):
        (encoded,) = encode_example(row, backbone.tokenizer, 500)
        ids = torch.tensor(encoded.ids)
        length += len(ids)
        with torch.no_grad():
            log_p = backbone.causal_lm(ids[None]).logits[0].log_softmax(-1)
        for i in range(1, len(ids)):
            if encoded.learned[i]:
                total, count = total - float(log_p[i - 1, ids[i]]), count + 1
    assert steps[0] == (pytest.approx(total / count, rel=1e-4), length)  # a step has all rows


def test_once_a_base_is_loaded_nothing_of_it_is_read_again(tmp_path, backbone):
    backbone.causal_lm.config._name_or_path = str(tmp_path / "deleted")
    config = FinetuneConfig(
        data="rows", batch_size=2, learning_rate=1e-3, epochs=1, replay=ReplaySection(share=0)
    )
    rows = [Row(QA.prompt, answer, None, "x") for answer in ("Seven", "Eight")]
    out = StageDir(tmp_path / "out")
    examples = read_examples(with_answers(rows, config), config, backbone.tokenizer)
    finetune(config, examples.encoded, [], backbone, None, out, Silent())
    assert (out.adapter / "adapter_model.safetensors").exists()


def learned(backbone, stream, examples):
    """Let the student learn from one batch; return the mean loss per token."""
    learner = Learner(backbone, {"general": {"": Teacher(backbone, "base")}}, "finetune.max_length")
    backbone.peft.zero_grad()
    return float(mean_loss(learner.learn(Batch(STREAMS[stream], examples, STREAMS[stream].author))))


@pytest.mark.parametrize("stream", ["domain", "general"])
def test_a_worker_without_a_row_of_the_batch_adds_no_loss_and_no_gradient(backbone, monkeypatch, stream):
    """The other worker's loss and gradient come with the sums, which are not those of this process here."""
    model = backbone.new_adapter(LoraSection(r=2, alpha=4), 0)
    monkeypatch.setattr(parallel, "_count", 2)
    monkeypatch.setattr(parallel, "_rank", 1)
    monkeypatch.setattr(parallel, "all_values", lambda value: [value])
    monkeypatch.setattr(parallel, "add_gradients", lambda model: None)
    row = Rollout(Prompt([5, 6, 7]), [8, 9])
    assert learned(backbone, stream, [row.to_example()]) == 0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_rate_schedule_and_shape_of_the_adapter_are_those_asked_for(learn):
    """The rate rises in a twentieth of the steps, here two of forty, and falls on a cosine."""
    lora = {"r": 2, "alpha": 8}
    adapter, steps = learn("plain", "learning_rate", epochs=5, batch_size=1, learning_rate=1e-2, lora=lora)
    assert {len(w) for name, w in adapter.items() if "lora_A" in name} == {2}
    falling = [0.5 + 0.5 * math.cos(math.pi * step / 38) for step in range(38)]
    assert [rate for _, rate in steps] == pytest.approx([1e-2 * share for share in [0.5, 1, *falling]])


def test_the_seed_chooses_the_rows_of_the_first_step(learn):
    first = [learn(f"seed {seed}", seed=seed, batch_size=1, epochs=0.3)[1][0][0] for seed in (0, 2)]
    assert first[0] != first[1]


def test_a_last_part_of_an_epoch_counts_as_a_step():
    config = FinetuneConfig(data="d", epochs=1.5, batch_size=8, replay=ReplaySection(share=0))
    assert [planned_steps(config, rows) for rows in (1, 8, 16, 17)] == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_a_fault_that_is_no_lack_of_memory_ends_the_fine_tune(learn, memory_for):
    memory_for(0, RuntimeError("a broken kernel"))
    with pytest.raises(RuntimeError, match="a broken kernel"):
        learn("never")


def test_a_fine_tune_goes_on_from_the_adapter_that_it_starts_with(learn, tmp_path):
    first, steps = learn("first", epochs=3)
    second, more = learn("second", start=StageDir(tmp_path / "first").adapter)
    assert more[0][0] < steps[-1][0] < steps[0][0]
    assert not torch.equal(flat(second.values()), flat(first[name] for name in second))


def test_a_row_too_long_for_memory_is_an_error_with_a_hint(learn, memory_for):
    memory_for(0, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OpdclError, match="does not fit") as caught:
        learn("never")
    assert "max_length" in caught.value.hint


@pytest.fixture
def replay(tmp_path, monkeypatch):
    """Settings that replay as many rows as the domain has, with six prompts and short answers."""
    monkeypatch.setattr("opdcl.train.finetune.REPLAYED_TOKENS", 6)
    rows = [json.dumps({"prompt": f"Write a line about {i}."}) for i in range(6)]
    (tmp_path / "general.jsonl").write_text("\n".join(rows))
    return {"share": 0.5, "prompts": str(tmp_path / "general.jsonl")}


def test_base_writes_the_replayed_rows_and_their_share_is_that_asked_for(learn, replay, tmp_path, backbone):
    _, steps = learn("replayed", batch_size=4, replay=replay)
    assert len(steps) == 8  # two epochs of eight rows of the domain and eight more
    rows = read_jsonl(StageDir(tmp_path / "replayed").replay)
    prompts = [encode_prompt(row, backbone.tokenizer, 500) for row in load_rows(replay["prompts"])]
    assert len(rows) == 8
    assert Counter(tuple(row["prompt_ids"]) for row in rows).keys() == {*map(tuple, prompts)}
    ended = [row["completion_ids"][-1] in backbone.eos_ids for row in rows]
    assert all(end or len(row["completion_ids"]) == 6 for end, row in zip(ended, rows, strict=True))
    # A prompt that comes again is answered anew.
    assert len({tuple(row["completion_ids"]) for row in rows}) > 6
    # Base gives its own words more of its mass than the words of other answers.
    own, foreign = (
        sum(answer_logprob(backbone, row["prompt_ids"], other["completion_ids"]) for row, other in pairs)
        for pairs in (zip(rows, rows, strict=True), zip(rows, rows[1:] + rows[:1], strict=True))
    )
    assert own > foreign + 10
    learn("other seed", batch_size=4, replay=replay, seed=1)
    assert read_jsonl(StageDir(tmp_path / "other seed").replay) != rows


def answer_logprob(backbone, prompt, answer) -> float:
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        log_p = backbone.causal_lm(ids).logits[0].log_softmax(-1)
    return float(log_p[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).sum())


def naive_loss(model, rows, is_replayed) -> float:
    """Return the loss of one batch, row by row and word by word, in nats per answer token."""
    total, count = 0.0, 0
    for prompt, answer in rows:
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            student = model(ids).logits[0].double().log_softmax(-1)
            with model.disable_adapter():
                base = model(ids).logits[0].double().log_softmax(-1)
        for position, word in enumerate(answer, start=len(prompt) - 1):
            p, q = student[position], base[position]
            total += float((q.exp() * (q - p)).sum()) if is_replayed else -float(p[word])
            count += 1
    return total / count


@pytest.mark.parametrize("stream", ["domain", "general"])
def test_a_domain_row_is_imitated_and_a_replayed_row_has_bases_distribution(backbone, stream):
    """The loss of a batch of either stream, against a naive reference."""
    model = backbone.new_adapter(LoraSection(r=2, alpha=4), 0)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    rows = [([5, 6, 7], [8, 9]), ([5, 6], [10]), ([5, 11, 12], [13, 14, 15])]
    is_replayed = stream == "general"
    examples = [Rollout(Prompt(prompt), answer).to_example() for prompt, answer in rows]
    loss = learned(backbone, stream, examples)
    assert loss == pytest.approx(naive_loss(model, rows, is_replayed), rel=1e-4)
    assert any(p.grad.any() for name, p in model.named_parameters() if "lora_B" in name)


def test_an_adapter_without_effect_has_nothing_to_learn_from_a_replayed_row(learn, replay, tmp_path):
    """With a rate of nearly 0 the student is still base after the first step, which is the domain's."""
    learn("replayed", batch_size=8, epochs=1, replay=replay, learning_rate=1e-9)
    first, second = read_jsonl(StageDir(tmp_path / "replayed").metrics)
    assert (first["stream"], first["author"]) == ("domain", "rows")
    assert first["loss"] > 1
    assert (second["stream"], second["author"]) == ("general", "base")
    assert second["loss"] == pytest.approx(0, abs=1e-5)


def test_dropout_of_the_base_makes_no_distance_to_it(backbone):
    """Families such as StarCoder2 bring dropout, which a trainer's training mode switches on."""
    backbone.new_adapter(LoraSection(r=2, alpha=4), 0)
    backbone.causal_lm.config.attention_dropout = 0.5
    for layer in backbone.causal_lm.base_model.layers:
        layer.self_attn.attention_dropout = 0.5
        layer.mlp.register_module("dropped", torch.nn.Dropout(0.5))
        layer.mlp.register_forward_hook(lambda mlp, _, output: mlp.dropped(output))
    rows = [Rollout(Prompt([5, 6, 7]), [8, 9]).to_example(), Rollout(Prompt([5, 6]), [10]).to_example()]
    assert learned(backbone, "general", rows) == pytest.approx(0, abs=1e-6)
    assert learned(backbone, "domain", rows) != learned(backbone, "domain", rows)  # it acts there


def test_base_reads_each_replayed_row_once_and_the_loss_stays_the_same(learn, replay, tmp_path, monkeypatch):
    kept, steps = learn("kept", batch_size=4, epochs=3, replay=replay)
    monkeypatch.setattr("opdcl.train.finetune.ROOM_IN_MEMORY", 0)
    anew, steps_anew = learn("anew", batch_size=4, epochs=3, replay=replay)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in steps_anew], rel=1e-4, abs=1e-6)
    assert relative_error(flat(kept.values()), flat(anew[name] for name in kept)) < 10 * ROUNDING


@pytest.mark.parametrize("stop", [1, 5])
def test_a_resumed_run_with_replay_ends_with_the_same_bits(learn, replay, tmp_path, stop):
    """It reuses base's answers; one of the stops comes before the first checkpoint."""
    settings = {"batch_size": 4, "save_steps": 3, "replay": replay, "lora": {"r": 4}}
    whole, steps = learn("whole", **settings)
    learn("resumed", report=StopAt(stop), **settings)
    written = StageDir(tmp_path / "resumed").replay.stat()
    resumed, resumed_steps = learn("resumed", **settings)
    assert StageDir(tmp_path / "resumed").replay.stat().st_mtime_ns == written.st_mtime_ns
    assert resumed_steps == steps
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_an_interrupt_while_base_writes_loses_one_piece_at_most(learn, replay, tmp_path, monkeypatch):
    learn("at once", replay=replay)
    monkeypatch.setattr("opdcl.train.finetune.REPLAYED_AT_ONCE", 3)
    learn("whole", replay=replay)
    at_once, whole = (read_jsonl(StageDir(tmp_path / name).replay) for name in ("at once", "whole"))
    assert [row["prompt_ids"] for row in whole] == [row["prompt_ids"] for row in at_once]
    file = StageDir(tmp_path / "resumed").replay
    learn("resumed", report=StopAt(answers=8), replay=replay)
    assert len(read_jsonl(file)) == 6
    report = StopAt()
    learn("resumed", report=report, replay=replay)
    assert report.first == 6
    assert file.read_bytes() == StageDir(tmp_path / "whole").replay.read_bytes()


def test_a_prompt_that_comes_again_in_another_piece_is_answered_anew(learn, replay, tmp_path, monkeypatch):
    """Each piece begins with the same place in its draws, so it needs a seed of its own."""
    monkeypatch.setattr("opdcl.train.finetune.REPLAYED_AT_ONCE", 1)
    (tmp_path / "general.jsonl").write_text(json.dumps({"prompt": "Write a line."}))
    learn("replayed", replay=replay, epochs=1)
    rows = read_jsonl(StageDir(tmp_path / "replayed").replay)
    assert len({tuple(row["completion_ids"]) for row in rows}) > 4
