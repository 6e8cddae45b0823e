"""Measure a recovery that samples all its texts, and the same one with the texts that the first has kept.

    python benchmarks/texts.py ADAPTER --domain handbook/quick --steps 8

What follows ADAPTER goes to `opdcl recover`. The cache is a new folder, so nothing is kept at first.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import head, parser_of, store

from opdcl.rundir.files import read_json
from opdcl.rundir.layout import RunDir
from opdcl.rundir.stage import read_metrics


def main() -> None:
    parser = parser_of(__file__, __doc__)
    parser.add_argument("adapter")
    options, arguments = parser.parse_known_args()
    record = head() | {"about": "Seconds of two equal recoveries; the second has the texts of the first."}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("first", "second"):
            command = ["recover", options.adapter, *arguments, "-o", str(folder / name)]
            record[name] = measure(command, RunDir(folder / name), folder / "cache")
            store(options.out, record)
        files = (folder / "cache" / "texts").iterdir()
        record["kept_bytes"] = sum(file.stat().st_size for file in files)
    store(options.out, record | compare(record["first"], record["second"]))


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return whether both recoveries made the same adapter, and the share of time that the second saved."""
    return {
        "same_bits": first["adapter_sha256"] == second["adapter_sha256"],
        "cpu_seconds_less": round(1 - second["cpu_seconds"] / first["cpu_seconds"], 3),
    }


def measure(command: list[str], run: RunDir, cache: Path) -> dict[str, Any]:
    """Run a recovery; return what it took, of a core and by the clock."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OPDCL_CACHE": str(cache)}
    subprocess.run([sys.executable, "-m", "opdcl", *command], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    stage = run.find_stage("recover")
    written = read_json(stage.record)
    steps = [row for row in read_metrics(stage.metrics) if "tokens" in row]
    return {
        "cpu_seconds": round(after.ru_utime - before.ru_utime, 1),
        "stage_seconds": written["cost"]["seconds"],
        "step_seconds": [[row["stream"], row["author"], row["seconds"]] for row in steps],
        "tokens": written["cost"]["tokens"],
        "adapter_sha256": written["adapter_sha256"],
    }


if __name__ == "__main__":
    main()
