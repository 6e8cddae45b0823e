"""Log-likelihoods on the resident model are those of lm-eval's own `HFLM`, also after an interrupt."""

import copy

import pytest
from helpers.likelihood import ROWS, reference, write_rows
from helpers.recovering import Silent

from opdcl.config.evaluate import EvalConfig
from opdcl.config.finetune import LoraSection
from opdcl.data.suites import load_suite
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir
from opdcl.stages import evaluate as stage
from opdcl.training import save_adapter


class Counter(Silent):
    """Count the batches, and interrupt after number `stop`."""

    def __init__(self, stop=None):
        self.batches, self.stop, self.counts = 0, stop, []

    def progress(self, done, total, **values):
        self.batches += 1
        self.counts.append((done, total))
        if self.batches == self.stop:
            raise KeyboardInterrupt


@pytest.fixture
def measure(backbone, tmp_path):
    """Return a function that measures base or an adapter on a task; it returns result, rows and the counter."""

    def run(task, name="run", stop=None, adapter=None, batch_size=4, rows=None):
        data = {task: str(write_rows(tmp_path, task, rows))}
        config = EvalConfig(retention=[task], data=data, batch_size=batch_size)
        backbone.drop_adapters()
        if adapter:
            backbone.load_adapter(adapter, "student")
        counter, out, result = Counter(stop), RunDir(tmp_path / name), None
        try:
            result = stage.evaluate(
                config, load_suite(task, config), backbone, "state", out, {}, counter, adapter
            )
        except KeyboardInterrupt:
            assert stop
        return result, read_jsonl(out.eval_samples("state", task)), counter

    return run


@pytest.fixture
def adapter(backbone, tmp_path):
    backbone.new_adapter(LoraSection(r=4, alpha=8), 1)
    for layer in backbone.adapted_layers():
        layer.lora_B["student"].weight.data.normal_()
    save_adapter(backbone, tmp_path / "adapter")
    backbone.drop_adapters()
    return tmp_path / "adapter"


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize("task", ROWS)
def test_scores_and_likelihoods_are_those_of_lm_evals_own_model(
    measure, backbone, adapter, tmp_path, task, adapted
):
    from lm_eval.models.huggingface import HFLM
    from peft import PeftModel

    plain = copy.deepcopy(backbone.causal_lm)
    before = backbone.fingerprint()
    result, rows, _ = measure(task, adapter=adapter if adapted else None)
    assert backbone.fingerprint() == before
    if adapted:
        plain = PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload()
    own = HFLM(plain, tokenizer=copy.deepcopy(backbone.tokenizer), batch_size=4)
    expected = reference(task, tmp_path / f"{task}.jsonl", own)
    metrics = {k.removesuffix(",none"): v for k, v in expected["results"][task].items() if k.endswith("none")}
    samples = sorted(expected["samples"][task], key=lambda row: row["doc_id"])
    for metric in result["metrics"]:
        assert [row["scores"][metric] for row in rows] == [sample[metric] for sample in samples]
        assert sum(row["scores"][metric] for row in rows) / len(rows) == pytest.approx(
            metrics[metric], abs=1e-15
        )
        assert result["metrics"][metric] == round(metrics[metric], 6)
    likelihoods = [[answer[0][0] for answer in sample["resps"]] for sample in samples]
    if adapted:  # PEFT adds the same numbers in another order
        for ours, theirs in zip(rows, likelihoods, strict=True):
            assert ours["likelihoods"] == pytest.approx(theirs, rel=1e-4)
    else:
        assert [row["likelihoods"] for row in rows] == likelihoods


def test_the_adapter_changes_the_likelihoods(measure, adapter):
    base, tuned = measure("arc_easy", "a")[1], measure("arc_easy", "b", adapter=adapter)[1]
    assert [r["likelihoods"] for r in base] != [r["likelihoods"] for r in tuned]


def test_an_interrupted_evaluation_computes_no_batch_twice(measure, tmp_path):
    _, clean, whole = measure("arc_easy", "clean")
    assert measure("arc_easy", stop=3)[1] == []
    _, resumed, rest = measure("arc_easy")
    assert resumed == clean
    assert rest.batches == whole.batches - 3
    # Three batches of four texts; then the whole file.
    assert (rest.counts[0], rest.counts[-1]) == ((16, 37), (37, 37))
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
    small, wide = measure("arc_easy", "a", batch_size=64)[2], measure("arc_easy", "b", batch_size=3)[2]
    assert 37 / 64 < wide.batches / 3 <= small.batches <= wide.batches
    monkeypatch.setattr(stage, "LOGIT_BYTES", 1)
    assert measure("arc_easy", "c", batch_size=64)[2].batches == 37
