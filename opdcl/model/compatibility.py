"""What models must have for their grades to be right: logits that are states times the head, and the same tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from opdcl.data.chat import render
from opdcl.errors import UsageError

# Spaces, case, digits, scripts, emoji, code, line ends: where tokenizers of equal size differ.
PROBES = (
    "The quick brown fox.",
    "  two  spaces",
    "12345 67,890.5",
    "naïve café",
    "Ünïcödé",
    "你好世界",
    "привет",
    "🙂👍🏽",
    "def f(x):\n\treturn x ** 2\n",
    "line one\r\nline two\n\n",
    "<|im_start|>user",
    "don't I'll we're",
    "https://a.example/b?c=d",
)

HINT = "choose a teacher of the same family; for different tokenizers see TRL's GOLD trainer"


def differences(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> list[str]:
    """Return what differs between two tokenizers that matters to distillation, in words; nothing if they agree."""
    found = []
    for probe in PROBES:
        a, b = (t(probe, add_special_tokens=False)["input_ids"] for t in (ours, theirs))
        if a != b:
            found.append(f"{probe!r} becomes {a[:8]} and {b[:8]}")
            break
    # What pads is never graded.
    for name in ("bos_token_id", "eos_token_id"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            found.append(f"{name} is {a} and {b}")
    added = [t.get_added_vocab() for t in (ours, theirs)]
    if odd := sorted(k for k in {*added[0], *added[1]} if added[0].get(k) != added[1].get(k)):
        found.append(f"added tokens differ: {', '.join(odd[:5])}")
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It."}]
    a, b = (render(t, turns, False, tokenize=False) if t.chat_template else None for t in (ours, theirs))
    if a != b:
        found.append(f"the chat template writes {a!r} and {b!r}"[:300])
    return found


def check_same_tokenizer(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a teacher whose tokens are not the student's."""
    if found := differences(ours, theirs):
        raise UsageError(f"teacher {name} has another tokenizer: {'; '.join(found)}", HINT)


def refuse_unsupported(config) -> None:
    """Refuse models whose logits are more than hidden states times the head: the loss would not be theirs."""
    config = config.get_text_config()
    names = (
        "final_logit_softcapping",
        "logit_scale",
        "logits_scaling",
        "output_multiplier",
        "lm_head_multiplier",
    )
    for name in names:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UsageError(
                f"models with {name} ({config.model_type}) cannot be recovered yet", "choose another model"
            )
