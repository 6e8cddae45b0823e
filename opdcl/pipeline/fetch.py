"""Bring what a workflow needs from the hub into the local cache, so that it runs without network.

opdcl fetch mine.yaml
opdcl run mine.yaml --offline
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdcl.config.model import ModelConfig
from opdcl.config.shipped import package_folder
from opdcl.config.workflow import Workflow
from opdcl.data.rows import on_hub
from opdcl.errors import UsageError
from opdcl.hub import FETCH_HINT, Repository, files, parse, reachable, snapshot
from opdcl.model.embedded import EMBEDDED
from opdcl.model.load import check_exists, model_source
from opdcl.pipeline.sweep import REFERENCE, expand


@dataclass(frozen=True)
class Fetched:
    """One thing that a workflow needs: what it is, at which commit, its bytes, and how many of them were not cached."""

    what: str
    name: str
    commit: str | None
    bytes: int | None
    missing_bytes: int | None
    done: bool

    def row(self) -> list[str]:
        """Return it as a table shows it."""
        size = "unknown" if self.bytes is None else megabytes(self.bytes)
        if self.missing_bytes is None:
            state = "in the cache" if self.done else "not looked at"
        else:
            state = (
                "was cached"
                if not self.missing_bytes
                else f"{megabytes(self.missing_bytes)} {'fetched' if self.done else 'to fetch'}"
            )
        return [self.what, self.name, (self.commit or "")[:12], size, state]


def fetch(workflow: Workflow, dry_run: bool, note: Callable[[str], None]) -> list[Fetched]:
    """Download models, adapters, datasets and suites of a workflow, all arms included; return what they are.

    Args:
        workflow: What is to be run.
        dry_run: Only ask for the sizes. A suite's is not known before it is loaded.
        note: Where it is told what comes next.

    Raises:
        UsageError: Something is neither here nor on the hub, or the hub is out of reach.
    """
    runs = expand(workflow, Path(workflow.name)).values()
    found = []
    for wanted, code in dict.fromkeys(pair for run in runs for pair in repositories(run)):
        if not reachable():
            raise UsageError(
                "the hub is out of reach, so nothing can be fetched",
                "go online, and leave out HF_HUB_OFFLINE",
            )
        listed = files(wanted, code)
        missing = sum(f.file_size for f in listed if f.will_download)
        if not dry_run:
            note(f"{wanted.kind} {wanted}: {megabytes(missing)} to fetch")
            snapshot(wanted, code)
        commit = listed[0].commit_hash if listed else None
        found.append(
            Fetched(wanted.kind, str(wanted), commit, sum(f.file_size for f in listed), missing, not dry_run)
        )
    if any(model.id == EMBEDDED for run in runs for model in models(run)):
        source, _ = model_source(ModelConfig(), convert=not dry_run)
        size = sum(f.stat().st_size for f in Path(source).iterdir()) if os.path.isdir(source) else None
        found.append(Fetched("model", EMBEDDED, None, size, None, not dry_run))
    found += [suite_data(run, suite, dry_run, note) for run, suite in suites(runs)]
    return found


def models(workflow: Workflow) -> list[ModelConfig]:
    """Return the models that a workflow loads: its base, and teachers."""
    teachers = workflow.recover.all_teachers().values() if workflow.recover else ()
    return [workflow.model, *(teacher.model for teacher in teachers if teacher.model)]


def repositories(workflow: Workflow) -> Iterator[tuple[Repository, bool]]:
    """Yield what a workflow needs of the hub, and whether code of it is to be run."""
    for model in models(workflow):
        if model.id != EMBEDDED and not os.path.exists(os.path.expanduser(model.id)):
            wanted = parse("model", model.id)
            if wanted is None:
                check_exists(model)  # which says what is wrong with it
            else:
                yield Repository("model", wanted.id, model.revision), model.trust_remote_code
    for place in workflow.adapters().values():
        if (
            not place.startswith(REFERENCE)
            and not os.path.exists(place)
            and (adapter := parse("adapter", place))
        ):
            yield adapter, False
    recover = workflow.recover
    sources = [workflow.finetune.data if workflow.finetune else None]
    sources += (
        [recover.source("general"), recover.source("domain"), *(t.prompts for t in recover.teachers.values())]
        if recover
        else []
    )
    for source in sources:
        if source and (dataset := on_hub(source)):
            yield Repository("dataset", dataset.id, dataset.revision), False


def suites(runs: Any) -> list[tuple[Workflow, str]]:
    """Return the suites whose data come from elsewhere, each with a workflow that names it."""
    shipped = {p.stem for p in package_folder("evals").glob("*/*.yaml")}
    found: dict[str, Workflow] = {}
    for run in runs:
        rewarding = [run.recover.reward.suite] if run.recover and run.recover.reward else []
        local = run.eval.data if run.eval else {}
        for suite in [*(run.eval.suites() if run.eval else ()), *rewarding]:
            if suite not in shipped and suite not in local:
                found.setdefault(suite, run)
    return [(run, suite) for suite, run in found.items()]


def suite_data(run: Workflow, suite: str, dry_run: bool, note: Callable[[str], None]) -> Fetched:
    """Let lm-eval load a suite, which leaves its data in the cache of `datasets`; its size is known afterwards only."""
    if dry_run:
        return Fetched("suite", suite, None, None, None, False)
    from opdcl.config.evaluate import EvalConfig
    from opdcl.data.suites import load_task

    note(f"suite {suite}")
    try:
        (task,) = load_task(suite, run.eval or EvalConfig())["tasks"].values()
    except UsageError:
        raise
    except Exception as fault:  # datasets raises a dozen kinds
        raise UsageError(
            f"the data of suite {suite!r} cannot be had: {str(fault)[:200]}", FETCH_HINT
        ) from fault
    sizes = [part.info.download_size or 0 for part in task.dataset.values() if getattr(part, "info", None)]
    return Fetched("suite", suite, None, max(sizes, default=0) or None, None, True)


def megabytes(size: int) -> str:
    """Format bytes as `1.3 MB`."""
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} kB"
