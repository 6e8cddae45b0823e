"""Ollama's Modelfile for a GGUF file: the chat template in Go's language, and what ends an answer.

A GGUF file carries its chat template, but Ollama does not run it (ollama/ollama#10222): it looks for one of its own templates
that is close to it, and without one passes the prompt on bare. So the template is worked out here from what the
tokenizer renders, and written only where it gives back the very same text.
"""

from __future__ import annotations

import json
from typing import Any

# What no template contains, so that what stands around it is the template's own.
MARKS = {"system": "⟦a system message⟧", "user": "⟦a question⟧", "assistant": "⟦an answer⟧"}

# Conversations on which the found template must agree with the tokenizer's.
TRIALS = (
    ["user"],
    ["system", "user"],
    ["user", "assistant", "user"],
    ["system", "user", "assistant", "user", "assistant", "user"],
)

Around = tuple[str, str]


def modelfile(tokenizer: Any, ends: list[int]) -> tuple[str, list[str]]:
    """Return a Modelfile for `model.gguf` beside it, and what its reader should know; `ends` are the tokens that end an answer."""
    lines, notes = ["FROM ./model.gguf"], []
    found = go_template(tokenizer)
    if found is None:
        notes.append(
            "the Modelfile has no TEMPLATE: this chat template cannot be put into Ollama's terms by rule. Ollama takes the closest one that it "
            "knows, if any: compare an answer with opdcl chat, or write TEMPLATE yourself"
        )
    else:
        template, default = found
        lines.append(f"TEMPLATE {quoted(template)}")
        lines += [f"SYSTEM {quoted(default)}"] if default else []
    lines += [
        f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}"
        for stop in tokenizer.convert_ids_to_tokens(ends)
    ]
    return "\n".join(lines) + "\n", notes


def quoted(text: str) -> str:
    """Return text as a Modelfile's long string."""
    return f'"""{text}"""'


def go_template(tokenizer: Any) -> tuple[str, str] | None:
    """Return a chat template in Go's language and its default system message, or None where there is no simple one.

    A simple one puts the same text before and after each message of a role, and a fixed text before the answer.
    """
    try:
        around, opening, default = _take_apart(tokenizer)
        for roles in TRIALS:
            messages = [{"role": role, "content": f"{MARKS[role]} {i}"} for i, role in enumerate(roles)]
            if _put_together(messages, around, opening, default) != _rendered(tokenizer, messages):
                return None
    except Exception:  # a template may raise what it likes at a conversation that it does not want
        return None
    texts = [part for pair in around.values() for part in pair] + [opening, default]
    if any('"""' in text or "{{" in text or "}}" in text for text in texts):
        return None
    cases = [
        f'{{{{ if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{ end }}}}'
        for role, (before, after) in around.items()
    ]
    return f"{{{{- range .Messages }}}}{''.join(cases)}{{{{ end }}}}{opening}", default


def _take_apart(tokenizer: Any) -> tuple[dict[str, Around], str, str]:
    """Return the text around each role's messages, that before the answer, and the system message that is put in by default."""
    messages = [{"role": role, "content": MARKS[role]} for role in ("system", "user", "assistant", "user")]
    whole = _rendered(tokenizer, messages, generation=False)
    before_system, rest = whole.split(MARKS["system"])
    to_user, to_assistant, and_back, after_user = rest.replace(MARKS["assistant"], MARKS["user"]).split(
        MARKS["user"]
    )
    after_assistant = _rendered(tokenizer, messages[:3], generation=False).split(MARKS["assistant"])[1]
    before_user = and_back.removeprefix(after_assistant)
    around = {
        "system": (before_system, to_user.removesuffix(before_user)),
        "user": (before_user, after_user),
        "assistant": (to_assistant.removeprefix(after_user), after_assistant),
    }
    bare = _rendered(tokenizer, messages[1:2], generation=False).split(MARKS["user"])[0]
    default = "" if bare == before_user else bare.removeprefix(before_system).removesuffix(to_user)
    return around, _rendered(tokenizer, messages).removeprefix(whole), default


def _put_together(
    messages: list[dict[str, str]], around: dict[str, Around], opening: str, default: str
) -> str:
    """Render a conversation as Ollama does with the template and the SYSTEM line."""
    if default and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": default}, *messages]
    return "".join(m["content"].join(around[m["role"]]) for m in messages) + opening


def _rendered(tokenizer: Any, messages: list[dict[str, str]], generation: bool = True) -> str:
    from opdcl.data.chat import render

    text = str(render(tokenizer, messages, generation, tokenize=False))
    # Where the tokenizer puts a first token before every text, so does llama.cpp, and the template must not.
    first = tokenizer("a")["input_ids"][0]
    return text.removeprefix(tokenizer.bos_token) if first == tokenizer.bos_token_id else text
