"""One record says which rows a fine-tune has learned and set aside; notes, arms, chains and hints ask it."""

import pytest
from helpers.synthetic import N, change, compared, measure, measure_states, pages, workflow, write

from opdcl.errors import UsageError
from opdcl.results.compare import compare_runs
from opdcl.results.measurements import load_suites
from opdcl.results.origins import question_key, sets_asked
from opdcl.results.samples import regained_prompts
from opdcl.results.summary import Results
from opdcl.rundir.files import read_json
from opdcl.rundir.hashes import hash_files
from opdcl.rundir.layout import RunDir


def record(run: RunDir, learned: list[str], rows: str = "rows", content: str = "1" * 16) -> RunDir:
    """Give a run a fine-tune that has learned questions, and has set rows aside."""
    test, stage = run.data / "test-rows.jsonl", run.stage(1, "finetune")
    write(test, [{"question": f"{rows} {i}", "answer": "Yes"} for i in range(N)])
    keys = [question_key(question, False) for question in learned]
    write(stage.learned, {"learned": keys, "set_aside": hash_files([test])})
    write(stage.record, {"status": "done", "inputs": {"content of data": content}, "rows": N})
    change(run, "finetune", data=str(run.data / "finetune.data.jsonl"))
    return run


def test_learned_prompts_are_counted_in_notes_and_report(make):
    run = record(make("a", 28, 32), [f"Prompt {i}" for i in range(7)])
    said = "handbook: 7 of 40 prompts are in rows that were learned."
    assert any(note.startswith(said) for note in Results(run).summary.notes)
    assert said in pages(run)["report.md"]
    record(run, ["Another"])
    assert "were learned" not in " ".join([*Results(run).summary.notes, pages(run)["report.md"]])


def test_a_question_is_the_same_with_and_without_a_system_prompt():
    alone = question_key("Where?", False)
    assert alone == question_key("system: Be brief.\n\nuser: Where?", True)
    assert alone != question_key("user: Who?\n\nassistant: Ida\n\nuser: Where?", True)


def own_rows(run: RunDir, seed: int, content: str) -> RunDir:
    """A run of `finetune ROWS --test-share`: each has its own copy of what it learned and set aside."""
    record(run, [], content=content)
    change(run, "finetune", seed=seed)
    change(run, "recover", seed=seed, domain=str(run.data / "finetune.data.jsonl"))
    inputs = {"inputs": {"content of domain": content}, "status": "done"}
    write(run.stage(2, "recover").record, inputs)
    change(run, "eval", domain=["test-rows"], data={"test-rows": str(run.data / "test-rows.jsonl")})
    ask(run, "Yes")
    return run


def ask(run: RunDir, answer: str) -> None:
    measure_states(run, "test-rows", (4, 36, 32), fields=lambda i: {"target": answer})
    for state in ("base", "tuned", "recovered"):
        file = run.eval_result(state, "test-rows")
        write(file, read_json(file) | {"role": "domain"})


def test_seeds_that_set_the_same_rows_aside_are_one_arm_and_other_rows_are_not(make):
    runs = [own_rows(make(f"a-{seed}", 28, 32), seed, "1" * 16) for seed in (0, 1)]
    comparison = compared(runs)
    assert [arm["seeds"] for arm in comparison["arms"]] == [2]
    assert not any("measured with different settings" in note for note in comparison["notes"])
    others = own_rows(make("b-2", 28, 32), 2, "2" * 16)
    assert [arm["seeds"] for arm in compared([*runs, others])["arms"]] == [2, 1]


def test_other_expected_answers_are_no_same_suite(make):
    runs = [own_rows(make(f"a-{seed}", 28, 32), seed, "1" * 16) for seed in (0, 1)]
    ask(runs[1], "No")
    with pytest.raises(UsageError, match="test-rows has other prompts, or answers to them"):
        compared(runs)


def test_a_hint_never_measures_a_run_on_what_it_has_learned(make):
    one, other = make("one", 28, 32), make("other", 28, 32)
    change(other, "eval", domain=["manual"])
    with pytest.raises(UsageError) as fault:
        compared([one, other])
    assert fault.value.hint.startswith(f"opdcl eval {other.path} ")
    record(other, [f"Prompt {i}" for i in range(5)])
    with pytest.raises(UsageError) as fault:
        compared([one, other])
    assert "has learned 5 of the 40 prompts" in fault.value.hint
    assert "--domain handbook" not in fault.value.hint


def step(tmp_path, name: str, asked: dict[str, tuple[str, int]], start: RunDir | None = None) -> RunDir:
    """A run that set rows of its name aside; `asked` is suite -> the run whose rows it asks, and passes."""
    run = RunDir(tmp_path / name)
    settings = workflow() | {"start": start and str(start.path)}
    write(run.config, {"workflow": settings, "origins": {}})
    record(run, [], rows=name, content=name.rjust(16, "0"))
    data = {suite: str(tmp_path / owner / "data" / "test-rows.jsonl") for suite, (owner, _) in asked.items()}
    change(run, "eval", domain=[*asked], data=data)
    write(run.stage(2, "recover").record, {"status": "done"})
    for state, share in (("base", 0.1), ("recovered", 1)):
        measure(run, state, {"instructions": range(int(30 * share))})
        for suite, (owner, passes) in asked.items():
            measure(run, state, {suite: range(int(passes * share))}, prompt=owner)
            file = run.eval_result(state, suite)
            write(file, read_json(file) | {"role": "domain"})
    return run


def test_a_chain_of_runs_that_set_rows_aside_measures_what_is_forgotten_of_each(tmp_path):
    first = step(tmp_path, "first", {"test-rows": ("first", 36)})
    asked = {"test-rows": ("second", 38), "test-rows-first": ("first", 20)}
    second = step(tmp_path, "second", asked, start=first)
    assert {name: file.parts[-3] for name, file in sets_asked(second).items()} == {
        "test-rows": "second",
        "test-rows-first": "first",
    }
    comparison = compared([first, second])
    assert not any("left out" in note for note in comparison["notes"])
    (chain,) = comparison["chains"]
    assert compare_runs([first, second]).chains[0].learned == ["test-rows", "test-rows of second"]
    assert chain["average"]["value"] == pytest.approx((30 + 20 + 38) / 3 / N)
    assert chain["forgetting"]["value"] == pytest.approx(((36 - 20) + 0) / 2 / N)
    assert chain["backward_transfer"]["value"] == pytest.approx((20 - 36) / N)


def test_the_loss_of_a_fine_tune_is_that_of_the_users_rows(tmp_path):
    run = RunDir(tmp_path / "run")
    write(run.config, {"workflow": workflow() | {"eval": None}, "origins": {}})
    stage = run.stage(1, "finetune")
    write(stage.record, {"status": "done"})
    losses = [("domain", 9.0), *[("domain", 7.0), ("general", 0.2)] * 5]
    metrics = [{"step": i, "stream": s, "loss": loss} for i, (s, loss) in enumerate(losses)]
    write(stage.metrics, metrics)
    assert Results(run).summary.verdict.text == "Fine-tuned: 11 steps, loss on your rows 7; not measured yet."


def test_multiple_choice_is_no_prompt_to_try(make):
    run = make("a", None, None)
    change(run, "eval", retention=["arc_easy"], domain=[])
    for state, right in (("base", 1.0), ("tuned", 0.0), ("recovered", 1.0)):
        for suite, more in (("arc_easy", {"likelihoods": [-9.0, -3.0]}), ("other", {})):
            row = {
                "prompt": f"{suite}: which tool?",
                "response": f"a {right}",
                "scores": {"acc": right},
            } | more
            write(run.eval_samples(state, suite), [row | {"doc_id": 0}])
            result = {"role": "retention", "metric": "acc", "n": 1, "metrics": {"acc": right}, "floor": {}}
            write(run.eval_result(state, suite), result)
    assert regained_prompts(load_suites(run)) == ["other: which tool?"]
