"""A chat template may ask for today's date, and prompts of different days must be the same all the same."""

from datetime import datetime

from helpers.families import FAMILIES, make_tokenizer

from opdcl.data.chat import encode_prompt, note_on_clock, render
from opdcl.data.formats import Row


def test_a_template_that_asks_for_the_date_writes_the_same_prompt_on_every_day(monkeypatch):
    """Answers of base, measured today, are paired with those of recovered, measured tomorrow."""
    from transformers.utils import chat_template_utils

    question = {"role": "user", "content": "What day is it?"}

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2031, 5, 17)

    dated, plain = make_tokenizer(FAMILIES["qwen3"]), make_tokenizer(FAMILIES["qwen3"])
    dated.chat_template = "{{ strftime_now('%Y-%m-%d, %d %b') }} {{ messages[0].content }}"
    monkeypatch.setattr(chat_template_utils, "datetime", Later)
    assert dated.apply_chat_template([question], tokenize=False).startswith("2031-05-17")
    row = Row(prompt=[question], answer=None, text=None, where="x")
    assert render(dated, row.prompt, True).startswith("2024-07-26, 26 Jul")
    assert dated.decode(encode_prompt(row, dated, 999)).startswith("2024-07-26, 26 Jul")
    assert "26 July 2024" in note_on_clock(dated)
    assert note_on_clock(plain) == ""
