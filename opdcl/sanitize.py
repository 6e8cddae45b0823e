"""Make foreign text safe to show: secrets blanked, control characters visible."""

from __future__ import annotations

import os
import re
import unicodedata

# What a hub, a cloud or an API hands out as a key, credentials inside a URL, and values that call themselves secret.
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:sk|pk|ghp|gho|xox[abp]|AKIA)[-_]?[A-Za-z0-9_-]{16,}|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?i:(?<=token=)|(?<=password=)|(?<=secret=)|(?<=api_key=)|(?<=apikey=)|(?<=bearer ))[^\s&,;'\"]{6,}"
)

REDACTED = "[redacted]"


def redact(text: str) -> str:
    """Blank out secrets: what looks like one, and the values of environment variables that are named like one."""
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search(r"(?i)token|secret|password|api_?key|credential", name):
            text = text.replace(value, REDACTED)
    return SECRET.sub(REDACTED, text)


def harmless(text: str) -> str:
    """Make control characters, terminal escapes, bidi overrides and lone surrogates visible instead of active."""

    def shown(char: str) -> str:
        # Zero-width joiners hold emoji and several scripts together.
        if char in "\n\t\u200c\u200d" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return char
        code = ord(char)
        return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"

    return "".join(map(shown, text.replace("\r\n", "\n")))
