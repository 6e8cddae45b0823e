"""Closeness to base: against a naive reference, at known answers, and after an interrupt."""

import pytest
import torch
from helpers.recovering import Silent
from transformers import AutoModelForCausalLM

from opdcl.config.evaluate import EvalConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.formats import check_row
from opdcl.data.prompts import encode_turns
from opdcl.errors import OpdclError, UsageError
from opdcl.measure import ask as asking
from opdcl.measure.ask import SEED
from opdcl.measure.distance import measure_closeness
from opdcl.model.backbone import Backbone
from opdcl.results.measurements import load_closeness
from opdcl.results.ratios import closeness_of
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir
from opdcl.train.teachers import Teacher
from opdcl.words import Prompt

CONFIG = EvalConfig(max_new_tokens=10, batch_size=4)
ASKED = [check_row({"prompt": f"Tell of {i}.", "group": "ab"[i % 2]}, f"row {i}") for i in range(6)]


class StopAt(Silent):
    """Interrupt once the first chunk is stored and the next one is being answered."""

    def progress(self, done, total, **values):
        if done > 4:
            raise KeyboardInterrupt


def measure(backbone, run, state="base", adapter=None, config=CONFIG, asked=ASKED, report=None):
    place = asking.Asking(config, backbone, run, state, "closeness", report or Silent(), adapter)
    result = measure_closeness(place, asked)
    return result, read_jsonl(run.eval_samples(state, "closeness"))


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "run")


@pytest.fixture
def adapted(backbone, tuned):
    """A backbone that holds an adapter as its student, and the adapter's folder."""
    backbone.drop_adapters()
    backbone.load_adapter(tuned / "tuned", "student")
    return backbone, tuned / "tuned"


def naive(model, other, prompt, completion, others_prompt=None):
    """Return the mean KL(model, other) over a completion, token by token, in double precision."""
    sides = []
    for reader, asked in ((model, prompt), (other, others_prompt or prompt)):
        with torch.no_grad():
            logits = reader(torch.tensor([asked + completion])).logits[0].double()
        sides.append(logits.log_softmax(-1)[len(asked) - 1 : -1])
    rows = [float((p.exp() * (p - q)).sum()) for p, q in zip(*sides, strict=True)]
    return sum(rows) / len(rows)


def test_the_divergences_are_those_of_a_naive_reference(adapted, run, tiny_model):
    backbone, adapter = adapted
    asked, config = ASKED[:2], EvalConfig(max_new_tokens=4, batch_size=4)
    _, base_rows = measure(backbone, run, asked=asked, config=config)
    _, rows = measure(backbone, run, "tuned", adapter, asked=asked, config=config)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompts = [Prompt(encode_prompt(ask, backbone.tokenizer, 500)) for ask in asked]
    written = Teacher(backbone, "student").complete(prompts, max_new_tokens=4, seed=SEED)
    for ask, base_row, row, answer in zip(asked, base_rows, rows, written, strict=True):
        prompt, own = encode_prompt(ask, backbone.tokenizer, 500), answer.completion_ids
        assert row["response"] == backbone.tokenizer.decode(own, skip_special_tokens=True)
        with backbone.state("student") as student:
            text = base_row["completion_ids"]
            assert row["scores"]["forward"] == pytest.approx(naive(base, student, prompt, text), rel=1e-3)
            assert row["scores"]["reverse_base"] == pytest.approx(naive(student, base, prompt, text), 1e-3)
            assert row["scores"]["reverse"] == pytest.approx(naive(student, base, prompt, own), rel=1e-3)
        assert row["scores"]["distance"] == max(row["scores"]["forward"], row["scores"]["reverse"])
    first, second = (encode_prompt(ask, backbone.tokenizer, 500) for ask in asked)
    texts = [row["completion_ids"] for row in base_rows]
    halves = [
        naive(base, base, mine, text, others)
        for mine, others, text in ((first, second, texts[0]), (second, first, texts[1]))
    ]
    assert [row["floor"] for row in base_rows] == pytest.approx([max(halves)] * 2, rel=1e-3)


def test_a_model_that_is_base_has_its_answers_no_distance_and_no_c(adapted, run):
    backbone, adapter = adapted
    _, base_rows = measure(backbone, run)
    with backbone.scaled(0.0):
        for state in ("tuned", "recovered"):
            _, rows = measure(backbone, run, state, adapter)
            assert max(row["scores"]["distance"] for row in rows) < 1e-5
            assert [row["response"] for row in rows] == [row["response"] for row in base_rows]
    found = closeness_of([load_closeness(run)])
    assert (found.c, found.why) == (None, "tuned is not measurably away from base")


def test_the_distance_grows_with_the_adapter(adapted, run):
    backbone, adapter = adapted
    measure(backbone, run)
    distances = []
    for alpha in (0.0, 0.1, 0.3, 1.0):
        with backbone.scaled(alpha):
            distances.append(measure(backbone, run, "tuned", adapter)[0]["metrics"]["distance"])
    assert distances == sorted(distances)
    assert distances[1] > 100 * max(distances[0], 1e-9)
    assert distances[-1] > 2 * distances[1]


def test_the_noise_is_that_of_16_bits_and_above_that_of_32(adapted, run, tmp_path):
    backbone, adapter = adapted
    noise = measure(backbone, run)[0]["metrics"]["distance"]
    with backbone.scaled(0.0):
        exact = measure(backbone, run, "tuned", adapter)[0]["metrics"]["distance"]
    tuned = measure(backbone, run, "tuned", adapter)[0]["metrics"]["distance"]
    assert exact < 1e-5 < noise < tuned / 10
    backbone.causal_lm.to(torch.bfloat16)
    rounded = measure(backbone, RunDir(tmp_path / "rounded"))[0]["metrics"]["distance"]
    assert noise / 10 < rounded < tuned / 10


def test_an_interrupted_measurement_ends_with_the_same_numbers(adapted, run, tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "SAMPLING_BATCH", 4)
    backbone, adapter = adapted
    clean = RunDir(tmp_path / "clean")
    for state, folder in (("base", None), ("tuned", adapter)):
        _, expected = measure(backbone, clean, state, folder)
        with pytest.raises(KeyboardInterrupt):
            measure(backbone, run, state, folder, report=StopAt())
        assert not run.eval_result(state, "closeness").exists()
        partial = run.evals / state / ".closeness.partial.jsonl"
        assert len(read_jsonl(partial)) == 4
        stored = partial.read_text().replace('"tokens": ', '"tokens": 7000')
        partial.write_text(stored)  # a trace, by which a row that was reused is known
        _, rows = measure(backbone, run, state, folder)
        assert [row["tokens"] > 7000 for row in rows] == [True] * 4 + [False] * 2
        strip = [{k: v for k, v in row.items() if k != "tokens"} for row in rows]
        assert strip == [{k: v for k, v in row.items() if k != "tokens"} for row in expected]
        assert not partial.exists()
        measure(backbone, run, state, folder)


def test_rows_of_another_model_or_limit_are_not_reused(backbone, run, monkeypatch):
    monkeypatch.setattr(asking, "SAMPLING_BATCH", 4)
    with pytest.raises(KeyboardInterrupt):
        measure(backbone, run, report=StopAt())
    _, rows = measure(backbone, run, config=EvalConfig(max_new_tokens=3, batch_size=4))
    assert {row["tokens"] for row in rows} <= {1, 2, 3}
    with pytest.raises(KeyboardInterrupt):
        measure(backbone, run, report=StopAt())
    backbone.causal_lm.model.layers[0].mlp.up_proj.weight.data.normal_()
    _, rows = measure(backbone, run)
    assert rows == measure(backbone, RunDir(run.path / "clean"))[1]


def test_states_draw_the_same_numbers_and_the_batch_size_does_not_matter(backbone, run, tmp_path):
    # The tiny model's words are almost equally likely, so fp32's rounding moves one draw in a hundred.
    backbone.causal_lm.double()
    _, one = measure(backbone, run)
    _, other = measure(backbone, RunDir(tmp_path / "o"), config=EvalConfig(max_new_tokens=10, batch_size=1))
    assert [row["response"] for row in one] == [row["response"] for row in other]


def test_the_floor_is_base_with_other_content_and_needs_two_prompts(adapted, run, tmp_path):
    backbone, adapter = adapted
    result, rows = measure(backbone, run)
    assert min(row["floor"] for row in rows) > 3 * result["metrics"]["distance"]
    _, rows = measure(backbone, run, "tuned", adapter)
    assert not any("floor" in row for row in rows)
    _, rows = measure(backbone, RunDir(tmp_path / "one"), asked=ASKED[:1])
    assert "floor" not in rows[0]


def test_a_row_has_prompt_answer_length_end_and_kind(backbone, run):
    turns = ["Hello", "Good day", "Who are you?"]
    roles = ["user", "assistant", "user"]
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]
    talk = check_row({"messages": messages, "group": "talk", "cluster": "c1"}, "row")
    result, rows = measure(backbone, run, asked=[talk, ASKED[0]])
    assert rows[0]["prompt"] == "user: Hello\n\nassistant: Good day\n\nuser: Who are you?"
    assert (rows[0]["group"], rows[0]["cluster"]) == ("talk", "c1")
    assert rows[1]["prompt"] == "Tell of 0."
    assert "cluster" not in rows[1]
    for row in rows:
        assert row["scores"].keys() == {"distance", "forward", "reverse", "forward_own", "reverse_base"}
        assert row["tokens"] == len(row["completion_ids"]) <= 10
        assert row["ended"] == (row["completion_ids"][-1] in backbone.eos_ids)
    assert (result["n"], result["metric"]) == (2, "distance")
    assert result["cost"]["tokens"] == sum(r["tokens"] for r in rows)
    assert result == read_json(run.eval_result("base", "closeness"))


def test_a_model_that_was_tuned_as_a_whole_is_compared_with_its_own_base(loaded, whole_model, tuned, run):
    import copy

    whole = AutoModelForCausalLM.from_pretrained(whole_model, dtype=torch.float32)
    backbone = Backbone(whole, loaded.tokenizer, copy.deepcopy(loaded.causal_lm))
    backbone.load_adapter(tuned / "tuned", "student")
    _, base_rows = measure(backbone, run)
    expected = measure(Backbone(copy.deepcopy(loaded.causal_lm), loaded.tokenizer), RunDir(run.path / "b"))[1]
    assert [row["response"] for row in base_rows] == [row["response"] for row in expected]
    with backbone.scaled(1e-6):
        result, _ = measure(backbone, run, "tuned", tuned / "tuned")
    assert result["metrics"]["distance"] > 0.01


def test_a_model_that_holds_nan_is_a_fault(adapted, run):
    backbone, adapter = adapted
    measure(backbone, run)
    for layer in backbone.adapted_layers("student")[-1:]:
        layer.lora_B["student"].weight.data[:] = float("nan")
    with pytest.raises(OpdclError, match="the distance to base is not finite"):
        measure(backbone, run, "tuned", adapter)


def test_without_the_answers_of_base_no_state_is_measured(adapted, run):
    backbone, adapter = adapted
    with pytest.raises(UsageError, match=r"closeness.samples.jsonl lacks answers of base"):
        measure(backbone, run, "tuned", adapter)


def test_a_prompt_without_room_names_its_row(backbone, run):
    long = check_row({"prompt": "word " * 600}, "mine.jsonl:3")
    with pytest.raises(UsageError, match=r"mine.jsonl:3: the prompt has \d+ tokens"):
        measure(backbone, run, asked=[long])


def test_each_turn_has_a_distance_after_the_models_own_answers_in_one_cluster(adapted, run, tiny_model):
    backbone, adapter = adapted
    talks = [{"messages": [{"role": "user", "content": f"{i} {n}?"} for n in range(3 - i)]} for i in range(2)]
    asked, config = [*ASKED[:1], *map(check_row, talks, "ab")], EvalConfig(max_new_tokens=4, batch_size=4)
    first, *later = [encode_turns(row, backbone.tokenizer, 500, 4) for row in asked]
    prompts = [first, *later, *later, later[0]]  # all first turns, all second ones, the third
    before = [(), (), (), (1,), (2,), (1, 3)]
    backbone.eos_ids = list(range(0, backbone.causal_lm.config.vocab_size, 5))
    _, base_rows = measure(backbone, run, asked=asked, config=config)
    of_base = [row["completion_ids"] for row in base_rows]
    _, rows = measure(backbone, run, "tuned", adapter, asked=asked, config=config)
    base, own = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), []
    for number, (prompt, earlier) in enumerate(zip(prompts, before, strict=True)):
        after_base, after_own = (
            prompt.after([words(answers[i], backbone) for i in earlier]).ids for answers in (of_base, own)
        )
        (batch,) = [numbers for numbers in ((0, 1, 2), (3, 4), (5,)) if number in numbers]
        together = [prompts[i].after([words(own[j], backbone) for j in before[i]]) for i in batch]
        written = Teacher(backbone, "student").complete(together, max_new_tokens=4, seed=SEED + batch[0])
        own.append(written[batch.index(number)].completion_ids)
        with backbone.state("student") as student:
            forward = naive(base, student, after_base, of_base[number])
            reverse = naive(student, base, after_own, own[number])
        scores = rows[number]["scores"]
        assert (scores["forward"], scores["reverse"]) == pytest.approx((forward, reverse), rel=1e-3)
    assert {row["ended"] for row in base_rows} == {True, False}  # a conversation continues after either
    assert [row.get("turn") for row in rows] == [None, 1, 1, 2, 2, 3]
    assert [row.get("cluster", "")[-1:] for row in rows] == ["", "1", "2", "1", "2", "1"]
    assert rows[5]["prompt"] == "user: 0 0?\n\nuser: 0 1?\n\nuser: 0 2?"
    assert min(row["floor"] for row in base_rows) > 0


def words(ids, backbone):
    """Return an answer without the id that ends it, if one does."""
    return ids[:-1] if ids[-1] in backbone.eos_ids else ids
