"""Secrets are redacted from everything that is written."""

import json
import re

import pytest
from helpers.command import ROOT

from opdcl.config.load import load
from opdcl.errors import UsageError
from opdcl.sampling.server import KEY
from opdcl.sanitize import harmless_json, readable, redact, without_secrets

# Made-up values in the forms of well-known issuers.
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
SECRET_PARTS = re.compile(r"abcdef\w*|pa55word|123456789012|MIIE\w*")


def test_secrets_are_redacted_and_ordinary_text_is_unchanged():
    for text in SECRETS:
        clean = redact(f"loading {text} now")
        assert re.fullmatch(r"loading .*\[redacted\].* now", clean, re.DOTALL), text
        assert not [part for part in SECRET_PARTS.findall(text) if part in clean], text
    assert [redact(text) for text in HARMLESS] == HARMLESS


# Every variable that a page names, and those of others; of opdcl's own, whatever the value is.
PAGES = "".join(page.read_text() for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
NAMED = set(re.findall(r"\b[A-Z][A-Z0-9]*_(?:[A-Z0-9]+_)*(?:KEY|TOKEN|SECRET|PASSWORD)\b", PAGES))
OTHERS = ("WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "MLFLOW_KEY")


def test_the_values_of_secret_variables_are_redacted(monkeypatch):
    assert {KEY, "HF_TOKEN"} <= NAMED
    for name in sorted({*NAMED, *OTHERS, KEY}):
        values = ["plain-looking-words", "0f1e2d3c4b5a6978"]
        values += ["12345678", "/some/path"] if name.startswith("OPDCL_") else []
        for value in values:
            monkeypatch.setenv(name, value)
            said = redact(f"bad key {value}: sent {value} there")
            assert said == "bad key [redacted]: sent [redacted] there", name
            assert name not in without_secrets()
        monkeypatch.delenv(name)


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


def test_a_secret_in_the_configuration_is_refused_without_repeating_it():
    for text in SECRETS:
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
