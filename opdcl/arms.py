"""One workflow, several runs: every arm with every seed, each a run directory of its own, then compared.

    opdcl run ablation

What two runs have in common is made once (`opdcl.share`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opdcl.config import Workflow
from opdcl.errors import Interrupted, OpdclError, UsageError
from opdcl.load import validate
from opdcl.output import Output
from opdcl.rundir import RunDir


def expand(flow: Workflow) -> dict[str, Workflow]:
    """Return run name -> workflow, the arms of one seed together, so that an early stop leaves whole comparisons."""
    common = flow.model_dump(exclude={"arms", "seeds"})
    runs: dict[str, Workflow] = {}
    for seed in flow.seeds or [None]:
        for arm, settings in (flow.arms or {flow.name: {}}).items():
            name = arm if seed is None else f"{arm}-{seed}"
            tree = _merged(common, settings)
            for stage in ("finetune", "recover"):
                if seed is not None and tree.get(stage):
                    tree[stage]["seed"] = seed
            try:
                runs[name] = validate(tree | {"name": name})
            except UsageError as fault:
                raise UsageError(f"arms.{arm}: {fault}", fault.hint) from fault
    return runs


def _merged(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping with another's values laid over it, section by section."""
    found = dict(tree)
    for key, value in other.items():
        inner = found.get(key)
        found[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def describe_all(flow: Workflow, out: Path) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Return what would be done in every run, as table rows and as data. Writes nothing."""
    from opdcl.workflow import describe

    rows, plans = [], []
    for name, one in expand(flow).items():
        found, plan = describe(one, RunDir(out / name))
        rows += [[name, *row] for row in found if row[0] != "machine"]
        plans.append({"run": name, **plan})
    return rows, plans


def execute_all(flow: Workflow, origins: dict[str, str], out: Path, output: Output, force: bool = False) -> dict[str, Any]:
    """Run every arm with every seed, then compare them; return the comparison.

    An arm that fails, because its health watch halted it for example, does not stop the others.

    Raises:
        UsageError: An arm's settings do not hold, or a run directory was made with others.
        Interrupted: The user stopped it; the same command goes on.
        OpdclError: Some arm failed; the others are compared.
    """
    from opdcl.compare import compare, refuse_folder, write
    from opdcl.workflow import execute

    refuse_folder(out)
    runs = expand(flow)
    finished: list[RunDir] = []
    failed: dict[str, OpdclError] = {}
    for number, (name, one) in enumerate(runs.items(), 1):
        run = RunDir(out / name)
        output.note(f"{name}: run {number} of {len(runs)}")
        try:
            execute(one, origins, run, output, force, finished)
            finished.append(run)
        except (UsageError, Interrupted):
            raise
        except OpdclError as fault:
            output.error(fault)
            failed[name] = fault
    found = compare(finished) if len(finished) > 1 else {}
    for file in write(found, out) if found else ():
        output.note(f"wrote {file}")
    if failed:
        raise OpdclError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}", f"the others are in {out}")
    return found
