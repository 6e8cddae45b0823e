"""Write `prompts.jsonl`: prompts in the format of google/IFEval, with all 25 instruction types.

    python evals/ifeval/make.py

Its rows have the keys of google/IFEval: key, prompt, instruction_id_list, kwargs. The requests were written
by hand for this file; each stands in `requests.txt` beside two words that an answer is likely to have.
The seed deals them one to three instructions that do not conflict. To score a run by lm-eval's functions:

    opdcl eval RUN --retention ifeval --data ifeval=evals/ifeval/prompts.jsonl
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from opdcl.data.stock_tasks import ensure_punkt

HERE = Path(__file__).parent
# How many rows have one, two and three instructions, in parts of 20.
SHARES = {1: 11, 2: 6, 3: 3}
ARGUMENTS = (
    *("num_highlights", "relation", "num_words", "num_placeholders", "prompt_to_repeat", "num_bullets"),
    *("section_spliter", "num_sections", "capital_relation", "capital_frequency", "keywords"),
    *("language", "let_relation", "letter", "let_frequency", "end_phrase", "forbidden_words", "keyword"),
    *("frequency", "num_sentences", "num_paragraphs", "postscript_marker", "first_word", "nth_paragraph"),
)

YES_NO = "detectable_format:constrained_response"
REPEAT = "combination:repeat_prompt"
ENDINGS = ("That is the whole story.", "Now you know.", "I hope this helps.", "More on that another day.")
FIRST_WORDS = ("however", "later", "finally", "today", "meanwhile", "instead")
LANGUAGES = {
    "de": "German",
    "fr": "French",
    "es": "Spanish",
    "it": "Italian",
    "pt": "Portuguese",
    "ru": "Russian",
}
ORDINALS = ("first", "second", "third")

# Several wordings of each instruction. Markers are named rather than shown where that is natural, so that a
# copied prompt does not follow its own instructions.
WORDINGS = {
    "keywords:existence": (
        "Use the words {both} in your answer.",
        "Your answer has to contain both {both}.",
        "Make sure that {both} occur in what you write.",
    ),
    "keywords:forbidden_words": (
        "Do not use the words {both}.",
        "Neither {either} may appear in your answer.",
        "Keep {both} out of the text.",
    ),
    "keywords:frequency at least": (
        'The word "{keyword}" should occur at least {frequency} times.',
        'Use the word "{keyword}" {frequency} times or more.',
    ),
    "keywords:frequency less than": (
        'The word "{keyword}" should occur fewer than {frequency} times.',
        'Use the word "{keyword}" less than {frequency} times.',
    ),
    "keywords:letter_frequency at least": (
        "The letter {letter} must appear at least {let_frequency} times.",
        "Write in such a way that the letter {letter} turns up {let_frequency} times or more.",
    ),
    "keywords:letter_frequency less than": (
        "The letter {letter} must appear less than {let_frequency} times.",
        "Keep the letter {letter} rare: fewer than {let_frequency} times in the whole answer.",
    ),
    "language:response_language": (
        "Answer in {language} only; no other language is allowed.",
        "Your entire reply must be in {language}.",
    ),
    "length_constraints:number_sentences at least": (
        "Write at least {num_sentences} sentences.",
        "Your answer should have {num_sentences} sentences or more.",
    ),
    "length_constraints:number_sentences less than": (
        "Use fewer than {num_sentences} sentences.",
        "Your answer must have less than {num_sentences} sentences.",
    ),
    "length_constraints:number_words at least": (
        "Write at least {num_words} words.",
        "Your answer should be {num_words} words long or longer.",
    ),
    "length_constraints:number_words less than": (
        "Use fewer than {num_words} words.",
        "Stay under {num_words} words.",
    ),
    "length_constraints:number_paragraphs": (
        "Write exactly {num_paragraphs} paragraphs, separated by the markdown divider of three asterisks.",
        "There should be {num_paragraphs} paragraphs; a line of three asterisks stands between two of them.",
    ),
    "length_constraints:nth_paragraph_first_word": (
        "Write {num_paragraphs} paragraphs with a blank line between them; the {ordinal} one must start with "
        'the word "{first_word}".',
        "Separate exactly {num_paragraphs} paragraphs by blank lines. The first word of the {ordinal} "
        'paragraph is "{first_word}".',
    ),
    "detectable_content:number_placeholders": (
        "Include at least {num_placeholders} placeholders in square brackets, such as an address.",
        "Leave {num_placeholders} or more gaps to fill in, each named in square brackets.",
    ),
    "detectable_content:postscript": (
        'Put a postscript marked "{postscript_marker}" at the end.',
        'After the answer there should be a postscript, with "{postscript_marker}" in front of it.',
    ),
    "detectable_format:number_bullet_lists": (
        "Your answer must have exactly {num_bullets} bullet points, lines that start with an asterisk.",
        "Give exactly {num_bullets} bullets, in markdown, no more and no fewer.",
    ),
    YES_NO: (
        'Reply with the words "My answer is" and then yes, no or maybe, closed by a full stop.',
        'Your reply has to be "My answer is" followed by one of yes, no and maybe, and a full stop.',
    ),
    "detectable_format:number_highlighted_sections": (
        "Highlight at least {num_highlights} parts of the answer in markdown, between single asterisks.",
        "Set {num_highlights} or more phrases in markdown italics, with an asterisk on either side.",
    ),
    "detectable_format:multiple_sections": (
        "Divide the answer into {num_sections} parts; each begins with {section_spliter} and its number.",
        "Your answer must have {num_sections} sections. Mark each with {section_spliter} and a number.",
    ),
    "detectable_format:json_format": (
        "The whole output has to be in JSON.",
        "Reply with valid JSON and nothing else.",
    ),
    "detectable_format:title": (
        "Give the answer a title in double angular brackets.",
        "There must be a title, wrapped in double angular brackets.",
    ),
    "combination:two_responses": (
        "Give two different answers, separated by a line of six asterisks.",
        "I would like two alternatives. Put six asterisks between them, and nowhere else.",
    ),
    # It stands before the request, so that the prompt does not begin with what is to be repeated.
    REPEAT: (
        "First repeat the text below word for word, then answer it. Say nothing before the repetition, and "
        "leave out these two sentences.",
        "Copy the request that follows without any change, and then respond to it. Do not repeat this line.",
    ),
    "startend:end_checker": (
        'The last words must be "{end_phrase}" and nothing may come after them.',
        'Finish with exactly this sentence: "{end_phrase}" No other words should follow it.',
    ),
    "startend:quotation": (
        "Put the whole answer in double quotation marks.",
        "Wrap your entire reply in double quotation marks.",
    ),
    "change_case:capital_word_frequency at least": (
        "Write at least {capital_frequency} words in capital letters only.",
        "Words in all capitals should occur {capital_frequency} times or more.",
    ),
    "change_case:capital_word_frequency less than": (
        "Words in all capitals should occur fewer than {capital_frequency} times.",
        "Use less than {capital_frequency} words in capital letters only.",
    ),
    "change_case:english_capital": (
        "Answer in English, in capital letters only.",
        "The entire reply should be in English and in capitals.",
    ),
    "change_case:english_lowercase": (
        "Answer in English, in lowercase letters only.",
        "The entire reply should be in English without a single capital letter.",
    ),
    "punctuation:no_comma": (
        "Do not use any commas, please.",
        "Commas are, without exception, not allowed in your answer.",
    ),
}
TYPES = tuple(dict.fromkeys(name.split(" ")[0] for name in WORDINGS))

# Pairs that the official table allows and yet can hardly be kept together, or read as a contradiction.
MORE_CONFLICTS = """
    number_words: number_sentences number_paragraphs nth_paragraph_first_word letter_frequency
    number_words: multiple_sections number_bullet_lists
    number_sentences: multiple_sections letter_frequency
    number_paragraphs: number_highlighted_sections number_bullet_lists multiple_sections
    nth_paragraph_first_word: title multiple_sections number_bullet_lists postscript existence
    existence: forbidden_words frequency
    forbidden_words: frequency
    response_language: letter_frequency capital_word_frequency nth_paragraph_first_word
    end_checker: postscript english_capital english_lowercase
    english_lowercase: postscript multiple_sections
    english_capital: multiple_sections
    number_bullet_lists: number_highlighted_sections
"""
# These leave no room for others, or only for those that the official table names.
PICKY = (YES_NO, "combination:two_responses", REPEAT, "detectable_format:json_format")


def conflicts() -> dict[str, set[str]]:
    """Return the types that may not stand beside each type: by the official table, and by ours."""
    ensure_punkt()  # lm-eval would download it
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_CONFLICTS, conflict_make

    table = {name: {*others} for name, others in INSTRUCTION_CONFLICTS.items()}
    whole = {name.split(":")[1]: name for name in TYPES}
    for line in MORE_CONFLICTS.strip().splitlines():
        name, others = line.strip().split(": ")
        table[whole[name]] |= {whole[other] for other in others.split()}
    return conflict_make(table)


def arguments(name: str, words: list[str], rng: random.Random) -> dict:
    """Return the arguments of an instruction; `words` bind it to what the answer is about."""
    # An empty answer keeps almost every "less than", so "at least" comes more often.
    relation = rng.choice(["at least", "at least", "less than"])
    less = relation == "less than"
    match name.split(":")[1]:
        case "existence":
            return {"keywords": words}
        case "forbidden_words":
            return {"forbidden_words": words}
        case "frequency":
            return {
                "keyword": rng.choice(words),
                "frequency": 3 if less else rng.choice([2, 3]),
                "relation": relation,
            }
        case "letter_frequency":
            letter, times = rng.choice("bkvwy" if less else "bgpvw"), 3 if less else rng.choice([4, 6, 8])
            return {"letter": letter, "let_frequency": times, "let_relation": relation}
        case "response_language":
            return {"language": rng.choice([*LANGUAGES])}
        case "number_sentences":
            return {"num_sentences": rng.choice([3, 4, 5] if less else [4, 5, 6, 8]), "relation": relation}
        case "number_words":
            return {"num_words": rng.choice([30, 40, 60] if less else [80, 120, 150]), "relation": relation}
        case "number_paragraphs":
            return {"num_paragraphs": rng.choice([2, 3, 4])}
        case "nth_paragraph_first_word":
            word = rng.choice(FIRST_WORDS)
            return {
                "num_paragraphs": rng.choice([2, 3]),
                "nth_paragraph": rng.choice([1, 2]),
                "first_word": word,
            }
        case "number_placeholders":
            return {"num_placeholders": rng.choice([2, 3])}
        case "postscript":
            return {"postscript_marker": rng.choice(["P.S.", "P.P.S"])}
        case "number_bullet_lists":
            return {"num_bullets": rng.choice([2, 3, 4, 5])}
        case "number_highlighted_sections":
            return {"num_highlights": rng.choice([2, 3])}
        case "multiple_sections":
            return {"section_spliter": rng.choice(["Section", "SECTION"]), "num_sections": rng.choice([2, 3])}
        case "end_checker":
            return {"end_phrase": rng.choice(ENDINGS)}
        case "capital_word_frequency":
            return {"capital_frequency": rng.choice([2, 3, 4]), "capital_relation": relation}
    return {}


def wording(name: str, kwargs: dict, rng: random.Random) -> str:
    """Return a sentence that demands an instruction."""
    relations = [kwargs[key] for key in ("relation", "let_relation", "capital_relation") if key in kwargs]
    known = {**kwargs}
    if words := kwargs.get("keywords") or kwargs.get("forbidden_words"):
        known["both"], known["either"] = (f" {x} ".join(f'"{w}"' for w in words) for x in ("and", "nor"))
    if "language" in kwargs:
        known["language"] = LANGUAGES[kwargs["language"]]
    if "nth_paragraph" in kwargs:
        known["ordinal"] = ORDINALS[kwargs["nth_paragraph"] - 1]
    return rng.choice(WORDINGS[" ".join([name, *relations])]).format(**known)


def choose(count: int, used: Counter, table: dict[str, set[str]], rng: random.Random) -> list[str]:
    """Return up to `count` types that do not conflict, the least used first."""
    chosen: list[str] = []
    while len(chosen) < count:
        allowed = [t for t in TYPES if t != YES_NO and not any(t in table[c] for c in chosen)]
        if count > 1 and not chosen:  # a picky type in front would leave room for few others
            allowed = [t for t in allowed if t not in PICKY]
        if not allowed:
            break
        least = min(used[t] for t in allowed)
        chosen.append(rng.choice([t for t in allowed if used[t] == least]))
        used[chosen[-1]] += 1
    return chosen


def make_row(key: int, request: str, words: list[str], types: list[str], rng: random.Random) -> dict:
    """Return one row in the official form."""
    kwargs = [arguments(name, words, rng) for name in types]
    demands = [wording(t, given, rng) for t, given in zip(types, kwargs, strict=True) if t != REPEAT]
    rng.shuffle(demands)
    in_front = rng.random() < 0.15 and YES_NO not in types
    prompt = " ".join([*demands, request] if in_front else [request, *demands])
    if REPEAT in types:
        kwargs[types.index(REPEAT)] = {"prompt_to_repeat": prompt}
        prompt = f"{rng.choice(WORDINGS[REPEAT])}\n\n{prompt}"
    filled = [{**dict.fromkeys(ARGUMENTS), **given} for given in kwargs]
    return {"key": key, "prompt": prompt, "instruction_id_list": types, "kwargs": filled}


def make_rows(seed: int = 20) -> list[dict]:
    """Return all rows, the same for the same seed."""
    rng = random.Random(seed)
    table, used, rows = conflicts(), Counter(), []
    lines = (HERE / "requests.txt").read_text(encoding="utf-8").splitlines()
    rng.shuffle(lines)
    for key, line in enumerate(lines):
        request, _, words = (part.strip() for part in line.partition("|"))
        count = rng.choices([*SHARES], weights=[*SHARES.values()])[0]
        # A question without words is to be answered by yes, no or maybe.
        types = choose(count, used, table, rng) if words else [YES_NO]
        rows.append(make_row(key, request, words.split(", "), types, rng))
    return rows


if __name__ == "__main__":
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in make_rows())
    (HERE / "prompts.jsonl").write_text(text, encoding="utf-8")
