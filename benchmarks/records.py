"""Hold the numbers of the pages against the records in this folder, and write the tables made from them.

    python benchmarks/records.py           # rewrite the tables; also `make records`
    python benchmarks/records.py --check   # list tables that are out of date and numbers without a record

In a page, three comments say where the numbers of the next block (a paragraph, a list or a table) come from:

    <!-- table: NAME -->  ... <!-- /table -->           made by a function of page_tables.py from a record
    <!-- record: FILE PATH; PATH; given 32 128 -->      each number is one of the record's below these paths,
                                                        rounded, or is given: a setting or a condition;
                                                        ` + ` joins two records
    <!-- no record: REASON -->                          a definition, or a number that others published

A block with a measured number (see `MEASURED`) and none of the three is a fault.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_tables import TABLES

ROOT = Path(__file__).parents[1]
DOCS = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "workflows/README.md", *DOCS]

TABLE = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- /table -->", re.S)
MARK = re.compile(r"<!-- (record|no record): (.*?) -->", re.S)
CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|\d{4}\.\d{5}|\d{1,2} [A-Z][a-z]+ \d{4}", re.S)
NUMBER = re.compile(r"(?<![\w.-])[-+\u2212]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?!\w)")

# What only a measurement gives: an interval, a ratio, decimals with a unit, a rate, a table of decimals.
MEASURED = re.compile(
    r"\[[-+]?\d+(\.\d+)?, ?[-+]?\d+(\.\d+)?\]|\b[RD] (=|of) [*]*-?\d|\d\.\d+ (s|GB|points|seconds|minutes)\b"
    r"|\d\.\d+ %|\d nats|\d tokens/s|\| [*+-]*\d+\.\d+[*]* \||\*\d+\.\d+\*|\d\.\d+ (times|instead of)"
)
# How a value of a record may be shown: as it is, in percent or points, in GB, in MB, in thousandths.
SCALES = (1, 100, 1e-9, 1e-6, 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is wrong")
    options = parser.parse_args()
    faults = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        if not options.check and (written := with_tables(text)) != text:
            (ROOT / page).write_text(written, encoding="utf-8")
            print(f"{page}: tables written")
            text = written
        faults += [f"{page}: {fault}" for fault in find_faults(text)]
    print("\n".join(faults))
    sys.exit(1 if faults else 0)


def with_tables(text: str) -> str:
    """Return a page with its tables made again."""
    return TABLE.sub(lambda m: f"<!-- table: {m[1]} -->\n\n{TABLES[m[1]]()}\n\n<!-- /table -->", text)


def find_faults(text: str, folder: Path = ROOT) -> list[str]:
    """Return what is wrong with a page's numbers, in words."""
    faults = [f"table {name} is out of date: make records" for name in stale_tables(text)]
    for mark, block in marked_blocks(TABLE.sub("", text)):
        kind, _, rest = mark.partition(": ")
        if kind == "record":
            sources = [record_numbers(source, folder) for source in rest.split(" + ")]
            known = [number for numbers, _ in sources for number in numbers]
            given = {number for _, numbers in sources for number in numbers}
            shown = NUMBER.findall(CODE.sub(" ", block))
            unknown = [number for number in shown if number not in given and not is_known(number, known)]
            faults += [f"{number} is not in {rest.split()[0]}" for number in unknown]
        elif not kind and (found := MEASURED.search(CODE.sub(" ", block))):
            faults.append(f"no record for {found[0]!r} in: {' '.join(block.split())[:80]}")
    return faults


def stale_tables(text: str) -> list[str]:
    written = with_tables(text)
    return [
        m[1] for m, now in zip(TABLE.finditer(text), TABLE.finditer(written), strict=True) if m[0] != now[0]
    ]


def marked_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield each block of a page with its mark, `kind: rest`, or "" if it has none."""
    mark = ""
    for block in re.split(r"\n\s*\n", re.sub(r"^ *```(?!text).*?^ *```$", "", text, flags=re.S | re.M)):
        if found := MARK.fullmatch(block.strip()):
            mark = f"{found[1]}: {' '.join(found[2].split())}"
        elif block.strip():
            yield mark, block
            mark = ""


def record_numbers(rest: str, folder: Path = ROOT) -> tuple[list[float], set[str]]:
    """Return the numbers of a record below the paths of a mark, and the numbers that the mark gives."""
    file, _, paths = rest.partition(" ")
    parts = [part.strip() for part in paths.split(";") if part.strip()]
    given = {number for part in parts if part.startswith("given ") for number in part.split()[1:]}
    text, known = (folder / file).read_text(encoding="utf-8"), []
    record = list(map(json.loads, text.splitlines())) if file.endswith(".jsonl") else json.loads(text)
    for path in [part for part in parts if not part.startswith("given ")] or [""]:
        value = record
        for key in filter(None, path.split("/")):
            value = value[int(key)] if isinstance(value, list) else value[key]
        known += numbers_of(value)
    return known, given


def numbers_of(value: Any) -> list[float]:
    """Return all numbers in a JSON value, also those within its texts, and the lengths of its lists."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers_of(item)]
    if isinstance(value, list):
        return [len(value), *(number for item in value for number in numbers_of(item))]
    if isinstance(value, str):
        return [float(number.replace(",", "").replace("\u2212", "-")) for number in NUMBER.findall(value)]
    return [float(value)] if isinstance(value, int | float) else []


def is_known(shown: str, known: list[float]) -> bool:
    """Return whether a number of a page is one of these values, rounded to the digits that it shows."""
    plain = shown.replace(",", "").replace("\u2212", "-").lstrip("+")
    if "e" in plain:
        digits = len(plain.split("e")[0].partition(".")[2])
        return any(f"{float(plain):.{digits}e}" == f"{value:.{digits}e}" for value in known)
    digits = len(plain.partition(".")[2])
    return any(
        f"{float(plain):.{digits}f}" == f"{value * scale:.{digits}f}" for value in known for scale in SCALES
    )


if __name__ == "__main__":
    main()
