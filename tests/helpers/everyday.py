"""The shipped everyday prompts, as texts to compare with others."""

import json
from typing import Any

from opdcl.config.shipped import package_folder


def text_of(row: dict[str, Any]) -> str:
    """Return a row's prompt, or all that is said in its conversation."""
    return row.get("prompt") or "\n".join(message["content"] for message in row["messages"])


FILE = package_folder("workflows") / "data" / "everyday.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
TEXTS = [text_of(row) for row in ROWS]
# And how conversations begin: the rest would hide that their first request is a copy.
SAID = TEXTS + [row["messages"][0]["content"] for row in ROWS if "messages" in row]
