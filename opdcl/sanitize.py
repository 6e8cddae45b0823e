"""Make untrusted text safe to print: redact secrets, show control characters instead of obeying them."""

from __future__ import annotations

import os
import re
import unicodedata

# API keys by their prefixes, credentials inside a URL, and values after a name such as token=.
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:sk|pk|ghp|gho|xox[abp]|AKIA)[-_]?[A-Za-z0-9_-]{16,}"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?i:(?<=token=)|(?<=password=)|(?<=secret=)|(?<=api_key=)|(?<=apikey=)|(?<=bearer ))[^\s&,;'\"]{6,}"
)

REDACTED = "[redacted]"


def redact(text: str) -> str:
    """Replace what looks like a secret, and the values of environment variables with a secret's name."""
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search(r"(?i)token|secret|password|api_?key|credential", name):
            text = text.replace(value, REDACTED)
    return SECRET.sub(REDACTED, text)


def harmless(text: str) -> str:
    """Make control characters, terminal escapes, bidi overrides and lone surrogates visible."""

    def visible(char: str) -> str:
        # Emoji and several scripts need zero-width joiners.
        if char in "\n\t\u200c\u200d" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return char
        code = ord(char)
        return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"

    return "".join(map(visible, text.replace("\r\n", "\n")))
