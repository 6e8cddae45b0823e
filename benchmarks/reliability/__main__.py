"""Break runs on purpose in every available way and record what is lost.

A two-layer model runs the whole job in seconds. Mounting small file systems needs root; without root, those
faults are skipped, and the record says so.

    python benchmarks/reliability                   # everything; three quarters of an hour on one core
    python benchmarks/reliability --only crash      # crash, faults, hostile, network, soak or fuzz
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}

from attempts import ROOT, import_everything
from crashes import crash
from endurance import fuzz, network, soak
from faults import faults
from helpers.tiny import make_model, make_project
from hostile import hostile

PARTS = {"crash": crash, "faults": faults, "hostile": hostile, "network": network, "soak": soak, "fuzz": fuzz}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--soak-steps", type=int, default=2000)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--browser", help="command that starts Chromium, with options; for hostile content")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reliability.json")
    options = parser.parse_args()
    import_everything()
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "model").mkdir()
        make_model(place / "model")
        make_project(place, place / "model")
        for part in options.only:
            started = time.perf_counter()
            text = json.dumps(PARTS[part](place, options))
            # Keep folder and host names of this machine out of the record.
            text = text.replace(f"{place}/", "").replace(f" on {os.uname().nodename} ", " on HOST ")
            seconds = round(time.perf_counter() - started)
            record[part] = {"date": date.today().isoformat(), "rows": json.loads(text), "seconds": seconds}
            options.out.write_text(json.dumps(record, indent=2) + "\n")
    if any(row["outcome"].startswith("FAILED") for part in record.values() for row in part["rows"]):
        sys.exit(f"at least one fault was not survived: see {options.out}")


if __name__ == "__main__":
    main()
