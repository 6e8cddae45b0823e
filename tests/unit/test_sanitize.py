"""Secrets are redacted from everything that is written."""

import json
import re

import pytest

from opdcl.config.load import load
from opdcl.errors import UsageError
from opdcl.sanitize import harmless_json, readable, redact

# Made-up values in the forms of well-known issuers, and in the places where secrets stand.
SECRETS = [
    "hf_abcdefghijklmnopqrstuvwx",
    "api_org_abcdefghijklmnopqrstuvwx",
    "sk-proj-abcdefghijklmnop1234",
    "sk-ant-api03-abcdefghijklmnop1234",
    "sk_live_abcdefghijklmnop1234",
    "ghp_abcdefghijklmnop1234",
    "ghs_abcdefghijklmnop1234",
    "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz",
    "glpat-abcdefghijkl_mnop12",
    "AIzaSyAbcdefghijklmnopqrstuvwxyz0123456",
    "gsk_abcdefghijklmnop1234ABCD",
    "nvapi-abcdefghijklmnop1234-ABCD_efg",
    "r8_abcdefghijklmnop1234ABCD",
    "xoxb-123456789012-abcdefghijkl",
    "AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijklmnopqrstuvwxyz",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEabcdefgh\n-----END RSA PRIVATE KEY-----",
    "https://me:pa55word@host/x",
    "https://host/x?token=abcdef123456",
    "https://host/v1?key=abcdef123456",
    "https://host/blob?se=2026&sig=abc%2Fdef1234%3D",
    "https://host/object?X-Amz-Signature=0123456789abcdef",
    "Authorization: Basic bWU6cGE1NXdvcmQ=",
    "Basic bWU6cGE1NXdvcmQ=",
    "Bearer abcdef123456",
    "password: pa55word",
    "password=correcthorse",
    "HF_TOKEN=abcdefgh",
    '{"api_key": "abcdefgh"}',
    "{'client_secret': 'abcdefgh'}",
    "--api-key abcdefgh12",
    "DefaultEndpointsProtocol=https;AccountKey=abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJ==",
    "https://discord.com/api/webhooks/123456789012345678/abcdefghijklmnopqrstuvwxyz",
    "https://hooks.slack.com/services/T00000000/B00000000/abcdefghijklmnopqrstuvwx",
    "wandb login 0123456789abcdef0123456789abcdef01234567",
    "wandb_api_key: 0123456789abcdef0123456789abcdef01234567",
]
# What only resembles them.
HARMLESS = [
    "runs/quickstart",
    "opdcl run quickstart --set recover.steps=60",
    "https://example.org/a?b=c",
    "https://example.org/rows?sort=key&page=12",
    "http://127.0.0.1:8000/v1",
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-135M@0123456789abcdef0123456789abcdef01234567",
    "sketches-of-something-2024.jsonl",
    "sk-learn/notes",
    "runs/r8_alpha_16_seeds_1_2_3",
    "https://discord.com/channels/123456789012345678",
    "AccountKey= is missing",
    "The password is what the guest said at the door.",
    "Token: {answer}",
    "secret: honesty",
    "basic information about bearer certificates",
    "eos_token=<|im_end|>",
    "pad_token: 151643",
    "max_new_tokens: 384, thought_tokens=1024",
    "--tokenizer-mode mistral_common",
]


# In each of them, what has to go.
SECRET_PARTS = re.compile(
    r"abcdef\w*|pa55word|correcthorse|bWU6\w*|0123456789abcdef\w*|abc%2Fdef1234|123456789012|MIIE\w*"
)


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_redacted(text):
    clean = redact(f"loading {text} now")
    assert "[redacted]" in clean
    assert not [part for part in SECRET_PARTS.findall(text) if part in clean]
    assert clean.startswith("loading ")
    assert clean.endswith(" now")


def test_the_values_of_secret_variables_are_redacted(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "plain-looking-words")
    assert redact("sent plain-looking-words there") == "sent [redacted] there"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZER_DIR", "/models/tokenizers/mine"),
        ("TOKENIZERS_PARALLELISM", "disabled"),
        ("HF_TOKEN_PATH", "/home/me/.cache/huggingface/token"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/google.json"),
        ("MAX_TOKENS", "12345678"),
        ("SECRETS_DIR", "run-secrets"),
    ],
)
def test_the_values_of_other_variables_stay(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert redact(f"loading {value} now") == f"loading {value} now"
    assert load(["quickstart"], [f"description={value!r}"])[0].description == value


def test_what_a_terminal_obeys_is_escaped_in_json_without_changing_the_values():
    value = {"text": "a\x9b31m b\x1b[0m c\u202e d\ud800 e\U000e0001 \u00e9\u200d\n"}
    document = json.dumps(value, indent=2, ensure_ascii=False)
    safe = harmless_json(document)
    assert json.loads(safe) == value
    assert "\u00e9" in safe
    assert not [char for char in safe if char != "\n" and (ord(char) < 32 or 0x7F <= ord(char) < 0xA0)]
    assert "\u202e" not in safe


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_text_is_unchanged(text):
    assert redact(text) == text


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_in_the_configuration_is_refused_without_repeating_it(text):
    with pytest.raises(UsageError, match="looks like a secret") as caught:
        load(["quickstart"], flags={"model.id": text})
    assert text not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("wrote {}/runs/a b/x.md", "wrote runs/a b/x.md"),
        ("'{}/a b' or NAME={}/rows.jsonl:3", "'a b' or NAME=rows.jsonl:3"),
        ("/mnt{}/x {}-2/x {}/ ~{}/x file://{}/x", "/mnt{}/x {}-2/x {}/ ~{}/x file://{}/x"),
    ],
)
def test_paths_below_the_working_directory_begin_there(tmp_path, monkeypatch, text, shown):
    monkeypatch.chdir(tmp_path)
    assert readable(text.replace("{}", str(tmp_path))) == shown.replace("{}", str(tmp_path))
    monkeypatch.chdir("/")
    assert readable("/tmp/x") == "/tmp/x"
