"""Take the picture of a report's head that the pages show: docs/images/report.png.

    python benchmarks/report_picture.py runs/quickstart

Needs Chromium (Debian's package `chromium`, or `--browser PATH`) and Pillow, which comes with matplotlib. The
picture ends where the examples begin; nothing in between is cut.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from opdcl.rundir.layout import RunDir

OUT = Path(__file__).parents[1] / "docs" / "images" / "report.png"
WIDTH, TALLEST, MARGIN = 1200, 2400, 24
HEAD_ONLY = "<style>main > section ~ section { display: none; } body { padding-bottom: 0; }</style></head>"


def head(page: str) -> str:
    """Return a report's page without the sections below its head."""
    return page.replace("</head>", HEAD_ONLY, 1)


def photograph(page: str, browser: str, picture: Path) -> None:
    """Render a page in a window that is taller than it, in its light colours."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        words = [
            *(browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/user"),
            *("--blink-settings=preferredColorScheme=1", f"--window-size={WIDTH},{TALLEST}"),
            *(f"--screenshot={picture}", file.as_uri()),
        ]
        subprocess.run(words, check=True, capture_output=True, timeout=120)


def trim(picture: Path) -> None:
    """Cut off the empty space below the page, and store the picture in 128 colours."""
    image = Image.open(picture).convert("RGB")
    background = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, background).getbbox()
    if box is None or box[3] + MARGIN >= image.height:
        raise SystemExit(f"the page is empty, or taller than {TALLEST} pixels")
    image.crop((0, 0, image.width, box[3] + MARGIN)).quantize(128).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="a run directory with a report")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    asked = parser.parse_args()
    page = RunDir(asked.run).reports[1].read_text(encoding="utf-8")
    if asked.browser is None:
        raise SystemExit("no Chromium found: apt install chromium, or --browser PATH")
    photograph(head(page), asked.browser, asked.out.resolve())
    trim(asked.out)
    print(f"wrote {asked.out}, {asked.out.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
