"""Suites that are answered at a temperature: the same draws whatever the batches, interrupts and limits."""

import pytest
from helpers.recovering import Silent, forget_texts
from lm_eval.api.instance import Instance

from opdcl.config.evaluate import EvalConfig
from opdcl.config.shipped import package_folder
from opdcl.data.suites import load_suite
from opdcl.measure import evaluate as stage
from opdcl.measure.evaluate import Asking, write_answers
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.hashes import hash_files
from opdcl.rundir.layout import RunDir

EVALS = package_folder("evals")
QUESTIONS = [f"What is the code of room {i}{'?' * (i % 3 + 1)}" for i in range(7)]
SAMPLED = {"until": [], "do_sample": True, "temperature": 0.7, "max_gen_toks": 8}
GREEDY = {"until": [], "do_sample": False, "temperature": 0.7, "max_gen_toks": 8}


class Interrupted(Silent):
    """Interrupt when the evaluation comes to answer number `stop`."""

    def __init__(self, stop=None):
        self.stop = stop

    def progress(self, done, total, **values):
        if self.stop and done >= self.stop:
            raise KeyboardInterrupt


@pytest.fixture
def ask(backbone, tmp_path, monkeypatch):
    """Return a function that answers questions with base, three at a time."""
    monkeypatch.setattr("opdcl.measure.ask.SAMPLING_BATCH", 3)

    def run(options=SAMPLED, name="kept", questions=QUESTIONS, stop=None, batch_size=2):
        forget_texts()
        config = EvalConfig(batch_size=batch_size)
        asking = Asking(config, backbone, RunDir(tmp_path), "base", name, Interrupted(stop))
        requests = [Instance("generate_until", {}, (text, options), 0) for text in questions]
        try:
            return [answer["response"] for answer in write_answers(asking, requests)]
        except KeyboardInterrupt:
            assert stop
            return read_jsonl(asking.file)

    return run


def test_the_same_answers_are_drawn_again_and_greedy_decoding_gives_others(ask):
    answers = ask(name="a")
    assert ask(name="b") == answers
    assert ask(GREEDY, name="c") != answers
    assert ask(SAMPLED | {"temperature": 1.5}, name="d") != answers
    assert len({*answers}) > 1


def test_answers_depend_neither_on_batches_nor_on_how_many_questions_follow(ask):
    # Under a flat distribution the rounding of another batch moves a draw to the neighbouring token.
    peaked = SAMPLED | {"temperature": 0.2}
    answers = ask(peaked, name="a")
    assert ask(peaked, name="b", batch_size=5) == answers
    assert ask(peaked, name="c", questions=QUESTIONS[:4]) == answers[:4]
    assert ask(GREEDY, name="d") != answers


def test_a_resumed_evaluation_draws_what_an_uninterrupted_one_does(ask, tmp_path):
    clean = ask(name="clean")
    assert len(ask(stop=4)) == 3
    assert ask() == clean
    # Half a batch on disk changes no draw either.
    folder = tmp_path / "evals" / "base"
    lines = (folder / ".clean.partial.jsonl").read_text().splitlines(keepends=True)
    (folder / ".kept.partial.jsonl").write_text("".join(lines[:4]) + lines[4][:20])
    assert ask() == clean


def test_answers_drawn_at_another_temperature_are_not_reused(ask):
    hot = SAMPLED | {"temperature": 1.5}
    ask(stop=4)
    assert ask(hot) == ask(hot, name="clean")
    ask(GREEDY, name="other", stop=4)
    assert ask(name="other") == ask(name="clean2")


def test_the_shipped_suite_samples_the_prompts_of_instructions():
    sampled, plain = load_suite("instructions_sampled"), load_suite("instructions")
    assert (sampled.answering.temperature, plain.answering.temperature) == (0.7, 0)
    assert sampled.documents(None) == plain.documents(None)
    assert (sampled.metrics, sampled.content) == (plain.metrics, True)
    assert sampled.answering.max_tokens == plain.answering.max_tokens
    assert sampled.floors(20, [""] * 20) == plain.floors(20, [""] * 20)


def test_a_change_of_the_shared_files_changes_the_file_on_which_results_depend():
    shared = [EVALS / "instructions" / name for name in ("instructions.yaml", "test.jsonl", "utils.py")]
    assert load_suite("instructions_sampled").task.config.metadata["instructions"] == hash_files(shared)


def test_a_result_depends_on_the_temperature(backbone, tmp_path):
    config, suite = EvalConfig(limit=3, max_new_tokens=8, batch_size=3), load_suite("instructions_sampled")

    def responses(name, temperature):
        suite.task.config.generation_kwargs["temperature"] = temperature
        run = RunDir(tmp_path / name)
        result = stage.evaluate(Asking(config, backbone, run, "base", suite.name, Silent()), suite)
        assert (result["metric"], result["n"]) == ("passed", 3)
        return [row["response"] for row in read_jsonl(run.eval_samples("base", suite.name))]

    assert responses("a", 0.7) == responses("b", 0.7) != responses("c", 0.2)


def test_base_alone_answers_twice_and_only_where_answers_are_drawn(backbone, tmp_path):
    config, sampled = EvalConfig(limit=3, max_new_tokens=8, batch_size=3), load_suite("instructions_sampled")
    seeds = []

    def seen(asking, requests, seed):
        answers = write_answers(asking, requests, seed)
        seeds.append((seed, [answer["response"] for answer in answers]))
        return answers

    def rows(suite):
        run = RunDir(tmp_path / suite.name)
        stage.evaluate(Asking(config, backbone, run, "base", suite.name, Silent()), suite)
        assert [path.name for path in (run.evals / "base").iterdir() if "partial" in path.name] == []
        return read_jsonl(run.eval_samples("base", suite.name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "write_answers", seen)
        drawn = rows(sampled)
        greedy = rows(load_suite("instructions"))
    (first, texts), (second, other), _ = seeds
    assert first != second
    assert [row["response"] for row in drawn] == texts != other
    assert all(isinstance(row["again"], bool) for row in drawn)
    assert not any("again" in row for row in greedy)
