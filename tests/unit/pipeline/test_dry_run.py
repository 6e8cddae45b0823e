"""What a dry run shows: rows, tokens, one row as the model sees it, memory of every stage."""

import json

import pytest
from helpers.tiny import make_mixture

from opdcl.config.load import load
from opdcl.pipeline.dry_run import data_table, describe
from opdcl.pipeline.forecast import size_of
from opdcl.pipeline.job import Job
from opdcl.rundir.layout import RunDir


@pytest.fixture
def plan(tiny_folder):
    """Return a function that plans the tiny workflow with some settings."""

    def plan(*settings: str) -> dict:
        workflow, origins = load(["tiny.yaml"], [*settings])
        return describe(Job(workflow, RunDir(tiny_folder / "run"), origins=origins))[1]

    return plan


def test_rows_tokens_longest_row_and_duplicates_are_counted(plan, tmp_path, loaded):
    rows = [{"question": "Who signs?", "answer": "Ada."}] * 3 + [{"question": "Why?", "answer": "Ben " * 9}]
    rows.append({"question": "Who signs?", "answer": "Cleo."})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = plan()
    data = made["data"]
    assert (data["rows"], data["used"], data["duplicates"]) == (5, 5, 2)
    assert data["longest"]["where"].endswith("rows.jsonl:4")
    assert data["longest"]["tokens"] < data["tokens"] < 5 * data["longest"]["tokens"]
    notes = " ".join(made["notes"])
    assert "2 of 5 rows repeat an earlier one (first: " in notes
    assert "rows.jsonl:2" in notes
    assert "questions with several different answers: 1" in notes


@pytest.mark.parametrize(("epochs", "batch", "passes"), [(5, 16, 5.3), (0.5, 16, 1.3), (2, 4, 2.0)])
def test_the_passes_over_few_rows_are_those_of_whole_steps(plan, epochs, batch, passes, loaded):
    made = plan(f"finetune.epochs={epochs}", f"finetune.batch_size={batch}")
    assert made["data"]["passes"] == passes
    assert ["passes", f"{passes:g}"] in [[row[0], row[1].split(":")[0]] for row in data_table(made)[0].rows]


def test_rows_that_base_will_write_are_named(plan, loaded):
    def shown(*settings: str) -> list[list[str]]:
        (table,) = data_table(plan(*settings))
        return [row for row in table.rows if row[0] == "replayed rows"]

    assert shown() == []
    ((_, said),) = shown("finetune.replay.share=0.5", "finetune.replay.prompts=prompts.jsonl")
    assert said.startswith("12 more: base's answers to ")
    assert said.endswith("/prompts.jsonl; --set finetune.replay.share=0 for none")


def test_one_row_is_shown_as_the_model_sees_it_with_the_learned_part_marked(plan, loaded):
    data = plan()["data"]
    parts = data["example"]["parts"]
    learned = [part["text"] for part in parts if part["learned"]]
    assert learned == ["Code 0<|im_end|>"]
    assert "What is the code of room 0?" in parts[0]["text"]
    (table,) = data_table({"data": data})
    assert "⟦Code 0<|im_end|>⟧" in table.rows[-1][1]


def test_fields_that_are_not_read_are_named_for_rows_and_for_a_suite(plan, tmp_path):
    lines = [json.dumps({"question": f"Who signs {i}?", "answer": "Ada.", "source": "web"}) for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "asked.jsonl").write_text(json.dumps({"question": "Who?", "answer": "Ada.", "id": 7}))
    notes = plan("eval.domain=[asked]", "eval.data.asked=asked.jsonl")["notes"]
    unread = [note.rpartition("/")[2] for note in notes if "not read" in note]
    assert sorted(unread) == [
        "asked.jsonl: 1 field is not read: id (1 row)",
        "rows.jsonl: 1 field is not read: source (4 rows)",
    ]


def test_evaluation_counts_with_its_answers_and_its_batch(plan):
    sizes = []
    for size in (12, 96):
        alone = plan("recover=null", "finetune=null", f"eval.max_new_tokens={size}")["memory_bytes"]
        assert alone.keys() == {"eval"}
        sizes.append(alone["eval"])
    assert sizes[1] > sizes[0]


def test_an_unguarded_domain_is_said_before_training(plan, tmp_path):
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "one.md").write_text("The lift came in 1931. " * 20)
    unguarded = plan("finetune.data=pages")["notes"]
    assert any("no prompts guard the domain" in note and "--domain" in note for note in unguarded)
    assert not any("warning" in note for note in plan()["notes"])
    one_sided = plan("recover.general=null", "recover.general_per_domain=0")["notes"]
    assert any("is not recovered" in note for note in one_sided)


def test_a_file_alone_is_said_where_shipped_prompts_could_be_mixed_in(plan, tmp_path):
    def said(*settings: str) -> list[str]:
        return [note for note in plan(*settings)["notes"] if "your file alone" in note]

    (note,) = said("recover.general=prompts.jsonl")
    assert "recover.general: [everyday=0.5, FILE=0.5]" in note
    assert said("recover.general=everyday") == []
    assert said("recover.general=[everyday=0.5, prompts.jsonl=0.5]") == []
    rows = [{"question": f"Which number is {i}?", "answer": f"{i}"} for i in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = "recover.teachers.shown={kind: base, context: '{prompt} {answer}'}"
    assert said(shown, "recover.general_teacher=shown") == []


def test_the_rank_of_the_adapter_is_said(plan):
    assert plan("finetune.lora.r=5")["rank"] == 5
    assert plan("finetune=null", "recover=null")["rank"] is None


def test_a_mixture_is_counted_with_all_its_experts(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_mixture(tmp_path / "mixture", tiny_model, "olmoe")
    model = AutoModelForCausalLM.from_pretrained(folder)
    matrices = {key: p.numel() for key, p in model.named_parameters() if p.ndim > 1 and "mlp.gate" not in key}
    assert size_of(model.config, "float32", "cpu", rank=32).parameters == sum(matrices.values())
