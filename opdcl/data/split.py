"""Rows set aside for a test, chosen so that no learned row asks or answers nearly the same."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from opdcl.data.formats import Row
from opdcl.data.messages import Spelled
from opdcl.data.own_words import content_words, pairs_alike
from opdcl.data.rows import check_all
from opdcl.errors import UsageError
from opdcl.rundir.hashes import hash_value

# Fewer test rows that say different things show nothing.
FEWEST = 10

# Two texts at least this similar say nearly the same; of two questions with one answer, `ASKED` is enough.
SAME, ASKED = 0.8, 0.3

# An answer of fewer content words, such as "yes" or "2006", is shared by rows that have nothing in common.
LONG = 4

# If so few rows have an answer, and at most a twentieth of all, they say one thing in several wordings. More
# rows share a label.
FEW = 10


def split_rows(
    records: list[tuple[dict[str, Any], str]], columns: Mapping[Any, str], share: float
) -> tuple[str, str, str]:
    """Set about a `share` of the rows aside; `records` are the rows as they are written, with their places.

    Returns: The rows to learn and those to test, as the text of JSONL files, and what to know of them. If
        too few can be set aside, none are, and the last text says why.

    Rows that say nearly the same stay together. The choice follows from their content alone, so that the same
    rows are set aside whatever the seed of the training, and runs can be compared.

    Raises:
        UsageError: A row is bad.
    """
    if not 0 <= share <= 0.5:
        raise UsageError(f"--test-share {share:g} is below 0 or above 0.5", "--test-share 0.1")
    rows = check_all(records, columns).all()
    wanted, chosen, things = round(share * len(rows)), dict[int, str](), 0
    said, groups = [f"{row.key()}\n{row.answer}" for row in rows], _groups(rows) if share else []
    for first, alike in sorted((hash_value(min(said[i] for i in alike)), alike) for alike in groups):
        if len(chosen) + len(alike) <= wanted and all(rows[i].prompt and rows[i].answer for i in alike):
            named = next((rows[i].cluster for i in alike if rows[i].cluster), first if len(alike) > 1 else "")
            chosen |= dict.fromkeys(alike, named)
            things += 1
    if things < FEWEST:
        chosen = {}
    lines = []
    for i, (record, _) in enumerate(records):
        spelled = {key: str(value) for key, value in record.items() if isinstance(value, Spelled)}
        # Wordings of one thing are right or wrong together, which an interval has to know.
        group = "" if rows[i].cluster else chosen.get(i)
        of_one = {columns.get("cluster", "cluster"): group} if group else {}
        lines.append(json.dumps(record | spelled | of_one, ensure_ascii=False, default=str) + "\n")
    test = "".join(lines[i] for i in sorted(chosen))
    learned = "".join(line for i, line in enumerate(lines) if i not in chosen)
    if not chosen:
        note = f"{len(rows)} rows: none set aside"
        if share:
            # A few more than the fewest, because groups are set aside whole.
            larger = max(share * 1.5, math.ceil(120 * FEWEST / len(groups)) / 100)
            more = f"; --test-share {larger:.2g} may find enough" if larger <= 0.5 else ""
            note += f"; {things} could be, and fewer than {FEWEST} different questions show nothing{more}"
        return learned, test, note
    answers = _answers(rows)
    known = {answers[i] for i in range(len(rows)) if i not in chosen}
    shared = sum(answers[i] in known for i in chosen)
    of = f", which say {things} different things," if things < len(chosen) else ""
    note = f"{len(chosen)} of {len(rows)} rows{of} are set aside as a test; no learned row says nearly the "
    note += f"same, but {shared} have an answer that learned rows have too" if shared else "same"
    note += ". They show what carries over to new questions, not facts: nobody knows one that was held back"
    return learned, test, note


def _answers(rows: list[Row]) -> list[str]:
    """Return the content words of each answer; those of a text without any, the text."""
    return [" ".join(content_words(row.answer or "")) or str(row.answer) for row in rows]


def _groups(rows: list[Row]) -> list[list[int]]:
    """Return the numbers of the rows, those together that say nearly the same."""
    import numpy as np
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count, numbers = len(rows), np.arange(len(rows))
    for left, right in _pairs(rows):
        # Behind the rows stands a node for each group so far.
        left, right = np.append(left, np.arange(count)), np.append(right, count + numbers)
        pairs = coo_array((np.ones(len(left)), (left, right)), shape=(2 * count, 2 * count))
        numbers = np.unique(connected_components(pairs)[1][:count], return_inverse=True)[1]
    groups = defaultdict(list)
    for i, number in enumerate(numbers):
        groups[number].append(i)
    return [*groups.values()]


def _pairs(rows: list[Row]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of rows that say nearly the same, as two arrays of their numbers."""
    import numpy as np

    asked = [" ".join(m["content"] for m in row.prompt if m["role"] != "system") for row in rows]
    answers = np.array(_answers(rows), object)
    often, few = Counter(answers), min(FEW, len(rows) // 20)
    answered = [text if rows[i].answer and often[text] <= few else i for i, text in enumerate(answers)]
    # The same words, of which none may be a content word; the same fact or person, where rows name it; and an
    # answer that hardly any others have.
    for keys in (asked, [row.cluster or i for i, row in enumerate(rows)], answered):
        first = {key: i for i, key in reversed([*enumerate(keys)])}
        yield np.arange(len(rows)), np.array([first[key] for key in keys])
    for left, right, near in pairs_alike(asked, ASKED):
        same = (near >= SAME) | (answers[left] == answers[right])
        yield left[same], right[same]
    long = np.array([i for i, answer in enumerate(answers) if len(answer.split()) >= LONG], int)
    for left, right, _ in pairs_alike(list(answers[long]), SAME):
        yield long[left], long[right]
