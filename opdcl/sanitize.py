"""Make untrusted text safe to print: redact secrets, show control characters instead of obeying them."""

from __future__ import annotations

import os
import re
import unicodedata

REDACTED = "[redacted]"

# Kind -> what it looks like. Where there is a group, only the group is the secret.
SECRETS = {
    # Issuers whose tokens have a prefix: those that a run, its servers, trackers and data may need.
    "Hugging Face": r"\b(?:hf_|api_org_)[A-Za-z0-9]{16,}",
    "GitHub": r"\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_[A-Za-z0-9_]{16,}",
    "GitLab": r"\bglpat-[A-Za-z0-9_-]{16,}",
    "OpenAI, Anthropic": r"\b(?:sk|pk|rk)[-_](?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}",
    "Google": r"\bAIza[A-Za-z0-9_-]{20,}|\bya29\.[A-Za-z0-9_-]{16,}|\bGOCSPX-[A-Za-z0-9_-]{16,}",
    "Groq, xAI, NVIDIA, Replicate": r"\b(?:gsk_|xai-|r8_)[A-Za-z0-9]{16,}|\bnvapi-[A-Za-z0-9_-]{16,}",
    "AWS": r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}",
    "Slack": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "JSON web token": r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)?",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    # No variable holds it.
    "user and password in a URL": r"://([^/\s:@]*:[^/\s@]+)@",
}
_PATTERNS = [re.compile(pattern) for pattern in SECRETS.values()]

# Letters and signs without ink, which make two names look alike: fillers of Hangul, Khmer and Braille.
BLANK = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"

# Names of environment variables that hold secrets; TOKENIZERS_PARALLELISM and HF_TOKEN_PATH do not.
_VARIABLE = re.compile(
    r"(?i)(?:token|secret|password|passwd|credential|(?:_|api|access|private)key)s?"
    r"(?:_(?!path$|file$|dir$|folder$|name$|url$)\w+)?$"
)
_PATH = re.compile(r"(?:~|\.{0,2})(?:/[\w.@ -]{1,40})+/?|[A-Za-z]:\\.*")


def redact(text: str) -> str:
    """Replace what looks like a secret, and the values of environment variables with a secret's name."""
    for name in secret_variables():
        text = text.replace(os.environ[name], REDACTED)
    for pattern in _PATTERNS:
        text = pattern.sub(_hide, text)
    return text


def secret_variables() -> list[str]:
    """Return the names of environment variables that hold secrets: opdcl's own whatever their value is."""
    return [
        name
        for name, value in os.environ.items()
        if _VARIABLE.search(name) and len(value) >= 8 and (name.startswith("OPDCL_") or not _is_plain(value))
    ]


def without_secrets() -> dict[str, str]:
    """Return the environment without its secrets, for a program of others."""
    return {name: value for name, value in os.environ.items() if name not in secret_variables()}


def _hide(match: re.Match[str]) -> str:
    """Return a match with its group, or all of it, redacted."""
    whole, group = match[0], match.re.groups
    if not group:
        return REDACTED
    start, end = match.start(1) - match.start(), match.end(1) - match.start()
    return whole if REDACTED in whole[start:end] else whole[:start] + REDACTED + whole[end:]


def _is_plain(value: str) -> bool:
    """Return whether the value of a variable is a number or a path, which is not secret."""
    try:
        float(value)
    except ValueError:
        return bool(_PATH.fullmatch(value)) or os.path.exists(value)
    return True


def harmless(text: str) -> str:
    """Make control characters, terminal escapes, bidi overrides and lone surrogates visible."""

    def visible(char: str) -> str:
        if not _acts(char):
            return char
        code = ord(char)
        return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"

    return "".join(map(visible, text.replace("\r\n", "\n")))


def readable(text: str) -> str:
    """Return a text for people: `harmless`, and paths below the working directory begin there."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # somebody has deleted it
        return harmless(text)
    return harmless(re.sub(rf"(?<![\w./~-]){re.escape(here)}/(?=[^\s/])", "", text) if here != "/" else text)


def harmless_json(text: str) -> str:
    """Escape in a JSON document what a terminal would obey; a parser reads the same values."""

    def escaped(char: str) -> str:
        if not _acts(char):
            return char
        units = char.encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))

    return "".join(map(escaped, text))


def _acts(char: str) -> bool:
    """Return whether a terminal or a text layout obeys a character, or shows nothing of it."""
    # Emoji and several scripts need zero-width joiners.
    if char in "\n\t\u200c\u200d":
        return False
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") or char in BLANK
