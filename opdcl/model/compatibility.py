"""Check that student and teacher share their tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from opdcl.data.chat import PROBE, on_one_day, render
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

OTHER_FAMILY = "choose a teacher of the same family; for different tokenizers see TRL's GOLD trainer"


def differences(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, may_have_more: bool = False
) -> list[str]:
    """Describe the differences between two tokenizers that matter to distillation.

    With `may_have_more`, the second one may have further tokens.
    """
    pair = student, teacher
    reasons = []
    more: set[str] = set()
    if may_have_more:
        more = teacher.get_added_vocab().keys() - student.get_added_vocab().keys()
    for probe in PROBES:
        if any(token in probe for token in more):
            continue
        a, b = (t(probe, add_special_tokens=False)["input_ids"] for t in pair)
        if a != b:
            reasons.append(f"{probe!r} becomes {a[:8]} and {b[:8]}")
            break
    # Padding is never graded, so its token may differ.
    for name in ("bos_token_id", "eos_token_id"):
        a, b = (getattr(t, name) for t in pair)
        if a != b:
            reasons.append(f"{name} is {a} and {b}")
    a, b = (t.get_added_vocab() for t in pair)
    if differing := sorted(token for token in {*a, *b} - more if a.get(token) != b.get(token)):
        reasons.append(f"added tokens differ: {', '.join(differing[:5])}")
    a, b = (render(t, PROBE, False) if t.chat_template else None for t in pair)
    if a != b:
        reasons.append(f"the chat template writes {a!r} and {b!r}"[:300])
    return reasons


def template_difference(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Say how a conversation looks in a tokenizer's own chat template and in another; "" if alike."""
    own = render(tokenizer, PROBE, False)
    try:
        other = render(tokenizer, PROBE, False, chat_template=on_one_day(template))
    except UsageError as fault:
        other = f"nothing: {fault.message}"
    return "" if own == other else f"it writes {other!r:.300}, this run {own!r:.300}"


def check_same_tokenizer(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    name: str,
    hint: str = OTHER_FAMILY,
    may_have_more: bool = False,
) -> None:
    """Refuse a teacher, or another model, whose tokens are not the student's; `name` begins the message."""
    if reasons := differences(student, teacher, may_have_more):
        raise UsageError(f"{name} has another tokenizer: {'; '.join(reasons)}", hint)
