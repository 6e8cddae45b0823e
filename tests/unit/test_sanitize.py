"""Secrets are redacted from everything that is written."""

import pytest

from opdcl.config.load import load
from opdcl.errors import UsageError
from opdcl.sanitize import redact

SECRETS = [
    "hf_abcdefghijklmnopqrstuvwx",
    "sk-proj-abcdefghijklmnop1234",
    "https://me:pa55word@host/x",
    "https://host/x?token=abcdef123456",
]


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_redacted(text):
    clean = redact(f"loading {text} now")
    assert "[redacted]" in clean
    assert text not in clean
    assert clean.startswith("loading ")
    assert clean.endswith(" now")


def test_the_values_of_secret_variables_are_redacted(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "plain-looking-words")
    assert redact("sent plain-looking-words there") == "sent [redacted] there"


@pytest.mark.parametrize(
    "text",
    [
        "runs/quickstart",
        "opdcl run quickstart --set recover.steps=60",
        "https://example.org/a?b=c",
        "HuggingFaceTB/SmolLM2-135M",
    ],
)
def test_ordinary_text_is_unchanged(text):
    assert redact(text) == text


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_in_the_configuration_is_refused_without_repeating_it(text):
    with pytest.raises(UsageError, match="looks like a secret") as caught:
        load(["quickstart"], [f"model.id={text}"])
    assert text not in str(caught.value) + caught.value.hint
