"""A chat template beside an adapter: said where it differs from base's, and taken where base has none."""

import json
import shutil

import pytest
from helpers.adapters import made_by_peft
from helpers.command import opdcl
from helpers.synthetic import alter

from opdcl.config.model import ModelConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.formats import Row
from opdcl.errors import UsageError
from opdcl.model.adapters import base_of
from opdcl.model.load import load_tokenizer

OTHER = (
    "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


@pytest.fixture
def adapter(loaded, tiny_model, tmp_path):
    """An adapter whose trainer saved its tokenizer and template with it."""
    folder = made_by_peft(loaded, tmp_path / "adapter", r=4, target_modules=["q_proj"])
    loaded.tokenizer.save_pretrained(folder)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Who?"}\n{"prompt": "When?"}\n')
    return folder


@pytest.fixture
def notes(adapter):
    """Return a function that returns the notes of a dry run of a recovery."""

    def run(*options):
        words = ["recover", adapter, "--prompts", "prompts.jsonl", *options, "--dry-run", "--json"]
        done = opdcl(*words, cwd=adapter.parent, code=0)
        return [note for note in json.loads(done.stdout)["notes"] if "chat template" in note]

    return run


def test_another_template_than_base_s_is_said_with_the_way_to_take_it(adapter, notes):
    assert notes() == []
    (adapter / "chat_template.jinja").write_text(OTHER)
    (note,) = notes()
    assert "### user:" in note
    assert "<|im_start|>user" in note
    way = f"model.chat_template={adapter / 'chat_template.jinja'}"
    assert f"--set {way}" in note
    assert notes("--set", way) == []


def test_a_template_in_the_tokenizer_s_settings_counts_too(adapter, notes):
    (adapter / "chat_template.jinja").unlink()
    alter(adapter / "tokenizer_config.json", chat_template=OTHER)
    assert len(notes()) == 1


@pytest.mark.parametrize("named", [True, False], ids=["--base", "named by the adapter"])
def test_the_adapter_s_template_is_taken_if_base_has_none(named, adapter, tiny_model, notes):
    bare = adapter.parent / "bare"
    shutil.copytree(tiny_model, bare)
    (bare / "chat_template.jinja").unlink()
    (adapter / "chat_template.jinja").write_text(OTHER)
    if named:
        assert notes("--base", bare) == []
        return
    alter(adapter / "adapter_config.json", base_model_name_or_path=str(bare))
    assert base_of("mine", adapter).chat_template == OTHER
    assert notes() == []


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "conversation: RecursionError"),
        ("{{ 1 // 0 }}", "conversation: ZeroDivisionError"),
    ],
)
def test_a_template_that_fails_is_refused(template, message, tiny_model):
    tokenizer = load_tokenizer(ModelConfig(id=str(tiny_model), chat_template="{# #}" + template))
    with pytest.raises(UsageError, match=message):
        encode_prompt(Row([{"role": "user", "content": "Hello."}], None, None, "r:1"), tokenizer, 100)
