"""The kinds of general prompt: what sort of answer a prompt asks for, told by its wording.

A recovery brings back what its prompts ask for, so a user should see which kinds they have none of. A row
that has a field `group` with one of these names is of that kind; the others are told apart by rules, in
English.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from opdcl.data.formats import Row

# Kind -> what its prompts are called.
KINDS = {
    "fact": "short facts",
    "constraints": "requests with constraints",
    "list": "lists and steps",
    "open": "explanations and free writing",
    "long": "long answers",
    "text": "work on a given text",
    "conversation": "conversations",
    "code": "code",
    "doubtful": "requests that a model may refuse",
}
FOREIGN = "foreign"

# The share of the prompts that each kind should have. A kind with less than half of it is lacking. Short
# facts have most: a fine-tune on questions and answers damages them most, and they come back last.
SHARES = dict.fromkeys(KINDS, 0.04) | {"fact": 0.3}

# Words that nearly every English sentence has, and sentences in other languages rarely.
ENGLISH = set(
    """a an and are as at be between by can could describe did do does explain for from give had has have he
    her his how i if in into is it its list make me my name not of on or our please she should tell than that
    the their they this to translate us was we what when where which who whom why will with would write you
    your""".split()  # noqa: SIM905
)
# From this many words on, a prompt with a smaller share of such words is in another language.
TELLING_WORDS, ENGLISH_SHARE = 4, 0.1

NUMBER = (
    r"(?:1?\d{1,2}|two|three|four|five|six|seven|eight|nine|ten|twelve|fifteen|twenty|thirty|forty|fifty)"
)
SIZE = r"(?:words?|sentences?|paragraphs?|lines?|stanzas?|verses?|bullets?|characters)"
EDIT = (
    "(?:rewrite|rephrase|paraphrase|translate|summari[sz]e|proofread|correct|shorten|improve|simplify|remove)"
)


def words(*alternatives: str) -> str:
    """Return a pattern that matches any of some words or phrases; `|` separates those of one argument."""
    return rf"\b(?:{'|'.join(alternatives)})\b"


# Kind -> the patterns of which one must occur. The first kind that matches is that of the prompt.
PATTERNS = {
    "code": (
        "```",
        r"#include|</\w+>|\bdef \w+\(|c\+\+|\bc#",
        words(
            "python|javascript|typescript|java|html|css|sql|bash|shell|regex|rust|golang|php|json|xml|yaml|api"
        ),
        words("excel|git|linux|docker|dataframe|pandas|numpy|algorithm|compiler?|programming|source code"),
        words("regular expression|code snippet|code example"),
        r"\b(?:write|implement|fix|debug|refactor)\b.{0,40}\b(?:code|function|class|script|program|query|loop)\b",
    ),
    "text": (
        r"\n\s*\S+(?:\s+\S+){11}",  # a passage below the request
        r"[\"“«].{25,}[\"”»]|:\s*[\"“]",  # or in quotes
        rf"\b(?:{EDIT}|turn|change|make)\b[^\n]{{0,60}}:\s*\S",
    ),
    "doubtful": (
        words(
            "bombs?|explosives?|weapons?|poison(?:s|ed|ing)?|kill(?:s|ed|ing)?|murder(?:s|ed|ing)?|suicide"
        ),
        words("steal(?:ing)?|hack(?:s|ed|ing)?|malware|phishing|counterfeit|forged?|bribe|blackmail|racist"),
        words(
            "slurs?|stalk(?:ing)?|drugs?|cocaine|heroin|meth|launder(?:ing)?|overdose|drunk|illegal(?:ly)?"
        ),
        words("fake (?:id|passport|review|document)s?|pick the lock|break into|hurt myself|lie to"),
        words(
            r"cheat(?:ing)? (?:in|on)|without (?:a prescription|\w+ (?:knowing|noticing))|how many \w+ ?pills"
        ),
    ),
    "constraints": (
        rf"\b(?:one|(?:a )?hundred|{NUMBER})[- ](?:to \d+ |or (?:so )?)?{SIZE}\b|<<|\[ ?\]",
        words("sentence|one line|single word|table|title|heading|headline|bullet points?|labels?|format"),
        words("capitals|capital letters|upper ?case|lower ?case|placeholders?|postscript|markdown|csv"),
        words(r"p\.s\.|rhym\w+|acrostic|haiku|limerick|no commas"),
        r"\b(?:include|contain|mention|avoid|us(?:e|ing)|start|begin|end|finish|answer)(?:s|ing)?\b"
        r"[^.?!]{0,30}(?:[\"“']|\bwords?\b|\bletter\b)",
        r"\bwithout (?:using )?(?:the )?(?:words?|letter|commas?)\b",
    ),
    "long": (
        words("in (?:great |full |more )?detail|in depth|at length|detailed|thorough(?:ly)?|every stage"),
        words("comprehensive(?:ly)?|essay|article|chapter|dialogue|speech|lecture|report|everything"),
        words("complete guide|step[- ]by[- ]step (?:guide|explanation)"),
        words("long (?:story|letter|text|answer|lesson|review)"),
        words(r"[2-9]\d\d words|\d,?\d{3} words"),
    ),
    "list": (
        words("lists?|steps|ideas|tips|ways|checklist|examples|ingredients|recipe|plan|itinerary|agenda"),
        words("reasons|suggest(?:ions)?|recommend(?:ations)?|pros and cons|things|how to"),
        rf"\b(?:give|name|tell)(?: me)? {NUMBER}\b|^how (?:do|can|should) (?:i|you|we)\b",
    ),
    "fact": (
        # A short question, of one line, that is answered by a name, a number, yes or no.
        r"^(?:(?:in|on|at|from|by|with) )?(?:which|what)\b[^\n]{0,90}$",
        r"^(?:who|whose|whom|when|where|is|are|was|were|does|do|did|can|name an?)\b[^\n]{0,90}$",
        r"^how (?:many|much|old|tall|long|far|big|deep|high|often|fast|heavy|hot|cold)\b[^\n]{0,90}$",
        r"^how do you (?:say|spell|call)\b[^\n]{0,90}$",
    ),
}
RULES = [(kind, re.compile("|".join(patterns), re.IGNORECASE)) for kind, patterns in PATTERNS.items()]


def prompt_kind(row: Row) -> str:
    """Return the kind of a general prompt: one of `KINDS`, or `foreign` if it is not in English."""
    if row.group in KINDS:
        return row.group
    if sum(message["role"] == "user" for message in row.prompt) > 1:
        return "conversation"
    text = str(row.prompt[-1]["content"]).strip()
    if not in_english(text):
        return FOREIGN
    return next((kind for kind, rule in RULES if rule.search(text)), "open")


def in_english(text: str) -> bool:
    """Return whether a text is English as far as its commonest words tell; a very short one is."""
    letters = [char for char in text if char.isalpha()]
    if letters and sum(char > "\u024f" for char in letters) > len(letters) / 2:
        return False
    found = re.findall(r"[^\W\d_]+", text.lower())
    return len(found) < TELLING_WORDS or sum(word in ENGLISH for word in found) >= ENGLISH_SHARE * len(found)


def count_kinds(rows: Sequence[Row]) -> Counter[str]:
    """Return how many prompts there are of each kind."""
    return Counter(map(prompt_kind, rows))


def lacking(counts: Mapping[str, int]) -> list[str]:
    """Return the kinds of which prompts have too few, given how many there are of each."""
    total = sum(counts.values())
    return [kind for kind, share in SHARES.items() if counts.get(kind, 0) < share / 2 * total]
