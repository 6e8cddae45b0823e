"""What the scripts share: the option `--out`, the head of a record, and how it is written."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from opdcl.rundir.layout import machine


def parser_of(script: str, doc: str) -> argparse.ArgumentParser:
    """Return a script's parser, described by its docstring; `--out` is the record, by default beside it."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(script).with_suffix(".json"), help="the record")
    return parser


def head() -> dict[str, Any]:
    """Return when, how and where a script runs."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return {
        "date": date.today().isoformat(),
        "command": command,
        "machine": machine(),
        "threads": torch.get_num_threads(),
    }


def store(out: Path, record: Any) -> None:
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
