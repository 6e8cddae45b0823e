"""Draw the log of a real run as an animated terminal: docs/images/quickstart.svg.

    opdcl run quickstart 2>&1 | tee quickstart.log
    python benchmarks/recording.py quickstart.log    # writes the record and the picture
    python benchmarks/recording.py                   # draws the picture again from the record

Every line is one that opdcl printed; nothing is added but the command. A line of progress replaces the one
before it, as on a terminal. Progress is printed every 15 seconds of a run, so the picture runs some 60 times
faster than the run did. The last screen stays, and is all there is where animations are off.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from datetime import date
from html import escape
from pathlib import Path

from opdcl.rundir.environment import machine

RECORD = Path(__file__).with_name("quickstart.json")
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "quickstart.svg"
PROGRESS = re.compile(r"^(\D+?) [\d,]+/[\d,]+\b")
BUTTONS = ("#ff5f56", "#ffbd2e", "#27c93f")
COLUMNS, ROWS, SECONDS = 104, 30, 0.25
LEFT, TOP, HEIGHT, ADVANCE = 16, 44, 18, 7.83  # pixels: margins, a line, a character

STYLE = """
text { font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #d8dee9 }
text { white-space: pre }
.live { fill: #8fa3bf; visibility: hidden } .command { fill: #a3d9a5; font-weight: bold }
@keyframes wait { from, to { visibility: hidden } }
@keyframes pass { from, to { visibility: visible } }
.line { animation: wait backwards } .live { animation: pass }
@media (prefers-reduced-motion: reduce) { .line, .live, .scroll { animation: none !important } }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path, nargs="?", help="what `opdcl run quickstart` printed")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    if options.log:
        record = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "command": "opdcl run quickstart",
            "lines": [text for text in options.log.read_text(encoding="utf-8").splitlines() if text.strip()],
        }
        options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    record = json.loads(options.out.read_text(encoding="utf-8"))
    options.picture.write_text(draw(record), encoding="utf-8")


def draw(record: dict) -> str:
    """Return the record as an animated SVG."""
    texts, scrolls, row, now = [line(0, f"$ {record['command']}", "command", 0.0)], [(0.0, 0)], 1, 1.0
    lines = record["lines"]
    stages = [found[1] if (found := PROGRESS.match(content)) else "" for content in lines]
    for number, (content, stage) in enumerate(zip(lines, stages, strict=True)):
        is_replaced = bool(stage) and stage in stages[number + 1 :]
        now += 0 if content.startswith((" ", "R ", "D ")) else SECONDS  # a table comes at once
        for part in textwrap.wrap(content, COLUMNS) or [""]:
            texts.append(line(row, part, "live" if is_replaced else "line", now))
            row += not is_replaced
        if row > ROWS - 1:
            scrolls.append((now, row - ROWS + 1))
    return page(texts, scrolls, now, record)


def line(row: int, text: str, kind: str, now: float) -> str:
    """Return one line: `live` is shown from `now` on until the next line of progress, others stay."""
    y = TOP + HEIGHT * (row + 1) - 5
    delay = f"{SECONDS}s;animation-delay:{now:g}s" if kind == "live" else f"{now:g}s"
    place = f'class="{kind}" x="{LEFT}" y="{y}" style="animation-duration:{delay}"'
    return f"<text {place}>{escape(text, quote=False)}</text>"


def page(texts: list[str], scrolls: list[tuple[float, int]], seconds: float, record: dict) -> str:
    """Return the window around the lines, which scroll at these times by these numbers of rows."""
    scrolls = [*dict(scrolls).items()]  # the last of each moment
    steps = " ".join(
        f"{100 * time / seconds:.2f}% {{ transform: translateY({-HEIGHT * rows}px) }}"
        for time, rows in scrolls
    )
    end = -HEIGHT * scrolls[-1][1]
    moved = f'class="scroll" style="transform:translateY({end}px);animation:scroll {seconds:g}s step-end"'
    width, height = round(2 * LEFT + COLUMNS * ADVANCE), TOP + HEIGHT * ROWS + 14
    cores = f"{record['machine']['cores']} cores of {record['machine']['name']}"
    about = f"{record['command']}, {record['date']}, {cores}; sped up"
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f"<title>{escape(about)}</title>",
            f"<style>{STYLE}@keyframes scroll {{ {steps} }}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1f2430"/>',
            *(f'<circle cx="{20 + 20 * i}" cy="20" r="6" fill="{c}"/>' for i, c in enumerate(BUTTONS)),
            f'<clipPath id="screen"><rect y="{TOP}" width="{width}" height="{HEIGHT * ROWS}"/></clipPath>',
            f'<g clip-path="url(#screen)"><g {moved}>',
            *texts,
            "</g></g>",
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
