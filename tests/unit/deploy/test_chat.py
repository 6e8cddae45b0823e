"""Chat: every state answers, with the system prompt and temperature asked for, and nothing is remembered."""

import shutil
from collections.abc import Callable

import pytest
from helpers import command as runner

import opdcl
from opdcl.config.model import ModelConfig
from opdcl.deploy.chat import Chat
from opdcl.errors import UsageError
from opdcl.rundir.files import write_json
from opdcl.rundir.hashes import adapter_hash
from opdcl.rundir.layout import RunDir


@pytest.fixture(scope="module")
def states(tiny_model):
    return Chat(ModelConfig(id=str(tiny_model), dtype="float32"), {}, max_new_tokens=8)


def ask(states: Chat, prompt: str, system: str | None = None) -> str:
    return states.answers(prompt, system, lambda state, text: None)[0]["base"]


def test_a_system_prompt_and_a_temperature_change_the_answer(states, monkeypatch):
    plain = ask(states, "Hello")
    assert ask(states, "Hello") == plain
    assert ask(states, "Hello", system="Answer in French, as a pirate would.") != plain
    monkeypatch.setattr(states, "temperature", 5.0)
    assert ask(states, "Hello") != plain


def test_a_prompt_does_not_see_the_one_before(states):
    alone = ask(states, "And then?")
    ask(states, "Tell me a story.")
    assert ask(states, "And then?") == alone


def test_an_answer_that_reaches_the_limit_is_named_as_cut(states, monkeypatch):
    text, cut = states.answers("Hello", None, lambda state, text: None)
    assert cut == ["base"]
    ids = states.backbone.tokenizer(text["base"], add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(states.backbone, "eos_ids", [ids[-1]])
    assert states.answers("Hello", None, lambda state, text: None)[1] == []


def test_an_answer_can_be_watched_while_it_grows(tuned, tiny_model):
    both = Chat(ModelConfig(id=str(tiny_model), dtype="float32"), {"adapter": tuned / "tuned"}, None, 6)
    current: dict[str, Callable[[], str]] = {}
    seen: list[tuple[str, str]] = []

    def look(*_):
        state, text = list(current.items())[-1]
        seen.append((state, text()))

    hook = both.backbone.causal_lm.get_input_embeddings().register_forward_hook(look)
    answers, _ = both.answers("Hello", None, current.__setitem__)
    hook.remove()
    for state, text in answers.items():
        parts = [part for of_state, part in seen if of_state == state]
        assert parts[0] == ""
        assert len({*parts}) > 2
        assert all(text.startswith(part.rstrip("\ufffd")) for part in parts)
    assert [*answers] == ["base", "adapter"]


def test_what_is_wrong_is_said_before_the_first_prompt_is_read(tmp_path):
    def prompts():
        raise AssertionError("a prompt was read")
        yield ""

    with pytest.raises(UsageError, match="holds no adapter"):
        opdcl.chat(tmp_path, prompts())
    with pytest.raises(UsageError, match="temperature -1 is below 0"):
        opdcl.chat(tmp_path, prompts(), temperature=-1)


def test_a_prompt_on_the_command_line_is_not_repeated(tuned):
    done = runner.opdcl("chat", tuned / "tuned", "Hello", "--max-new-tokens", 2, "--system", "Hm.", code=0)
    assert "Hello" not in done.stdout
    assert done.stdout.split()[:3] == ["state", "answer", "base"]
    assert (
        done.stderr == f"cut at 2 tokens: base, adapter\nnext: opdcl export {tuned / 'tuned'} -o my-model\n"
    )


def test_a_run_answers_with_its_own_system_prompt_unless_another_one_is_given(tuned, tiny_model, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(tuned / "tuned", run.stage(1, "finetune").adapter)
    digest = adapter_hash(run.stage(1, "finetune").adapter)
    record = {"status": "done", "fingerprint": "f", "adapter_sha256": digest}
    write_json(run.stage(1, "finetune").record, record)
    model = {"id": str(tiny_model), "dtype": "float32"}
    write_json(
        run.config,
        {"workflow": {"model": model, "recover": {"system": "Answer as a pirate would."}}, "origins": {}},
    )

    def answers(**more):
        (outcome,) = opdcl.chat(run.path, "Hello", max_new_tokens=8, quiet=True, **more)
        return outcome.data["answers"]

    assert answers() == answers(system="Answer as a pirate would.")
    assert answers() != answers(system="")
