"""Log-likelihoods on the resident model are those of lm-eval's own `HFLM`, also after an interrupt."""

import copy

import pytest
from helpers.likelihood import ROWS, check_against, reference, write_rows
from helpers.recovering import Counting, write_tuned

from opdcl.config.evaluate import EvalConfig
from opdcl.data.suites import load_suite
from opdcl.measure import evaluate as stage
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir


@pytest.fixture
def measure(backbone, tmp_path):
    """Return a function that measures base or an adapter; it returns result, rows and the counting."""

    def run(task, name="run", stop=None, adapter=None, batch_size=4, rows=None):
        data = {task: str(write_rows(tmp_path, task, rows))}
        config = EvalConfig(retention=[task], data=data, batch_size=batch_size)
        backbone.drop_adapters()
        if adapter:
            backbone.load_adapter(adapter, "student")
        counting, out, result = Counting(stop), RunDir(tmp_path / name), None
        try:
            asking = stage.Asking(config, backbone, out, "state", task, counting, adapter)
            result = stage.evaluate(asking, load_suite(task, config))
        except KeyboardInterrupt:
            assert stop
        return result, read_jsonl(out.eval_samples("state", task)), counting

    return run


@pytest.fixture
def adapter(backbone, tmp_path):
    write_tuned(backbone, tmp_path / "adapter")
    backbone.drop_adapters()
    return tmp_path / "adapter"


def test_likelihoods_of_an_adapter_are_those_of_lm_evals_own_model(measure, backbone, adapter, tmp_path):
    from lm_eval.models.huggingface import HFLM
    from peft import PeftModel

    plain, before = copy.deepcopy(backbone.causal_lm), backbone.fingerprint()
    measured = {task: measure(task, adapter=adapter) for task in ROWS}
    assert backbone.fingerprint() == before
    plain = PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload()
    own = HFLM(plain, tokenizer=copy.deepcopy(backbone.tokenizer), batch_size=4)
    expected = reference(tmp_path, own)
    for task, (result, rows, _) in measured.items():
        # PEFT adds the same numbers in another order, and lm-eval puts texts of all tasks into one batch.
        for row, likelihoods in zip(rows, check_against(expected, task, result, rows), strict=True):
            assert row["likelihoods"] == pytest.approx(likelihoods, rel=1e-4)


def test_likelihoods_of_one_task_are_those_of_hflm_bit_for_bit(measure, backbone, tmp_path):
    from lm_eval.models.huggingface import HFLM

    _, rows, _ = measure("arc_easy")
    task = load_suite("arc_easy", EvalConfig(data={"arc_easy": str(tmp_path / "arc_easy.jsonl")})).task
    task.build_all_requests(limit=None, rank=0, world_size=1)
    own = HFLM(copy.deepcopy(backbone.causal_lm), tokenizer=backbone.tokenizer, batch_size=4)
    expected = [likelihood for likelihood, _ in own.loglikelihood(task.instances)]
    assert [likelihood for row in rows for likelihood in row["likelihoods"]] == expected


def test_an_interrupted_evaluation_computes_no_batch_twice(measure, tmp_path):
    _, clean, whole = measure("arc_easy", "clean")
    _, rows, begun = measure("arc_easy", stop=3)
    _, resumed, rest = measure("arc_easy")
    assert (rows, resumed) == ([], clean)
    assert begun.counts + rest.counts == whole.counts
    assert whole.counts[-1] == (37, 37)
    assert not [*tmp_path.glob("run/evals/*/.*partial*")]


def test_answers_to_other_choices_are_not_reused(measure):
    measure("arc_easy", stop=3)
    other = [row | {"question": row["question"].upper()} for row in ROWS["arc_easy"]]
    assert measure("arc_easy", rows=other)[1] == measure("arc_easy", "clean", rows=other)[1]


def test_rows_hold_what_a_reader_needs_and_no_measure_of_writing(measure):
    result, rows, _ = measure("arc_easy")
    assert result["metric"] == "acc_norm"
    assert result["floor"] == {
        "chance": {"acc_norm": pytest.approx(0.2833, abs=1e-4), "acc": pytest.approx(0.2833, abs=1e-4)}
    }
    for row, source in zip(rows, ROWS["arc_easy"], strict=True):
        texts = source["choices"]["text"]
        assert row["prompt"] == f"Question: {source['question']}\nAnswer:"
        assert row["target"] == texts["ABCD".index(source["answerKey"])]
        assert row["response"] in texts
        assert row["scores"]["acc_norm"] == (row["response"] == row["target"])
        assert row["floor"] == 1 / len(texts)
        assert not {"tokens", "ended"} & row.keys()
    _, rows, _ = measure("winogrande")
    assert rows[0]["prompt"].split("\n") == [
        f"The table does not fit into the car because the {thing} is too large." for thing in ("table", "car")
    ]
    assert rows[0]["target"] == "The table does not fit into the car because the table"
    assert (rows[0]["floor"], len(rows[0]["likelihoods"])) == (0.5, 2)
    result, rows, _ = measure("lambada_openai")
    assert (result["metric"], result["floor"]) == ("acc", {"chance": {"acc": 0.0}})
    assert (rows[0]["response"], rows[0]["target"]) == (None, " key")


def test_a_batch_is_as_large_as_the_memory_for_its_logits(measure, monkeypatch, backbone):
    longest = 40 * 2 * 4 * len(backbone.head_VH)  # no text of the file has 40 tokens
    monkeypatch.setattr(stage, "LOGIT_BYTES", 3 * longest)
    small, three = measure("arc_easy", "a", batch_size=64)[2], measure("arc_easy", "b", batch_size=3)[2]
    assert 1 < len(small.counts) <= len(three.counts)
    monkeypatch.setattr(stage, "LOGIT_BYTES", 1)
    single = measure("arc_easy", "c", batch_size=64)[2], measure("arc_easy", "d", batch_size=1)[2]
    assert single[0].counts == single[1].counts


def test_a_prompt_that_is_all_in_its_choices_shows_them(measure):
    rows = [
        {"sentence_good": f"The {animal} sleeps.", "sentence_bad": f"The {animal} sleep."}
        for animal in ("cat", "dog", "owl")
    ]
    result, samples, _ = measure("blimp_animate_subject_passive", rows=rows)
    assert (result["metric"], result["n"]) == ("acc", 3)
    assert [sample["prompt"] for sample in samples] == ["\n".join(row.values()) for row in rows]
    assert {sample["target"] for sample in samples} == {row["sentence_good"] for row in rows}
