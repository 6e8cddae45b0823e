"""Write Ollama's Modelfile for a GGUF file: the chat template in Go's template language, and the stop tokens.

A GGUF file contains its chat template, but Ollama does not run it (ollama/ollama#10222): it picks a similar
template of its own, or passes the prompt on unformatted. The template is therefore derived here from what the
tokenizer renders, and written only if it renders exactly the same text.
"""

from __future__ import annotations

import json
from typing import Any

from opdcl.data.chat import render

# Texts that no template contains: everything around them comes from the template.
MARKS = {"system": "⟦a system message⟧", "user": "⟦a question⟧", "assistant": "⟦an answer⟧"}

# The roles of conversations on which the derived template must agree with the tokenizer's.
TRIALS = (
    ["user"],
    ["system", "user"],
    ["user", "assistant", "user"],
    ["system", "user", "assistant", "user", "assistant", "user"],
)

NO_TEMPLATE = (
    "the Modelfile has no TEMPLATE: this chat template cannot be translated for Ollama, which uses the most "
    "similar template it knows, if any: compare an answer with opdcl chat, or write TEMPLATE yourself"
)

Messages = list[dict[str, str]]


def modelfile(tokenizer: Any, ends: list[int]) -> tuple[str, list[str]]:
    """Return the text of a Modelfile for a `model.gguf` beside it, and notes; tokens `ends` end an answer."""
    lines = ["FROM ./model.gguf"]
    translation = go_template(tokenizer)
    if translation:
        template, default = translation
        lines.append(f'TEMPLATE """{template}"""')
        if default:
            lines.append(f'SYSTEM """{default}"""')
    stops = tokenizer.convert_ids_to_tokens(ends)
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    return "\n".join(lines) + "\n", [] if translation else [NO_TEMPLATE]


def go_template(tokenizer: Any) -> tuple[str, str] | None:
    """Return a chat template in Go and its default system message, or None if it is too complex.

    It must put the same text around each message of a role, and a fixed text before the answer.
    """
    try:
        around, opening, default = _split(tokenizer)
        for roles in TRIALS:
            messages = [{"role": role, "content": f"{MARKS[role]} {i}"} for i, role in enumerate(roles)]
            if _join(messages, around, opening, default) != _render(tokenizer, messages):
                return None
    except Exception:  # a template may raise anything for a conversation that it does not support
        return None
    texts = [text for pair in around.values() for text in pair] + [opening, default]
    if any(reserved in text for text in texts for reserved in ('"""', "{{", "}}")):
        return None
    cases = [
        f'{{{{ if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{ end }}}}'
        for role, (before, after) in around.items()
    ]
    return f"{{{{- range .Messages }}}}{''.join(cases)}{{{{ end }}}}{opening}", default


def _split(tokenizer: Any) -> tuple[dict[str, tuple[str, str]], str, str]:
    """Return the texts around each role's messages and before the answer, and the default system message."""
    messages = [{"role": role, "content": MARKS[role]} for role in ("system", "user", "assistant", "user")]
    conversation = _render(tokenizer, messages, generation=False)
    before_system, rest = conversation.split(MARKS["system"])
    to_user, to_assistant, and_back, after_user = rest.replace(MARKS["assistant"], MARKS["user"]).split(
        MARKS["user"]
    )
    after_assistant = _render(tokenizer, messages[:3], generation=False).split(MARKS["assistant"])[1]
    before_user = and_back.removeprefix(after_assistant)
    around = {
        "system": (before_system, to_user.removesuffix(before_user)),
        "user": (before_user, after_user),
        "assistant": (to_assistant.removeprefix(after_user), after_assistant),
    }
    before_first = _render(tokenizer, messages[1:2], generation=False).split(MARKS["user"])[0]
    default = before_first.removeprefix(before_system).removesuffix(to_user)
    opening = _render(tokenizer, messages).removeprefix(conversation)
    return around, opening, "" if before_first == before_user else default


def _join(messages: Messages, around: dict[str, tuple[str, str]], opening: str, default: str) -> str:
    """Render a conversation as Ollama does with this template and SYSTEM line."""
    if default and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": default}, *messages]
    return "".join(m["content"].join(around[m["role"]]) for m in messages) + opening


def _render(tokenizer: Any, messages: Messages, generation: bool = True) -> str:
    text = str(render(tokenizer, messages, generation, tokenize=False))
    # If the tokenizer starts every text with BOS, llama.cpp adds it, so the template must not.
    adds_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return text.removeprefix(tokenizer.bos_token) if adds_bos else text
