"""One workflow, several runs: every arm with every seed, each a run directory of its own, then compared.

    opdcl run ablation

What two runs have in common is made once (`opdcl.share`). An arm may go on from what an earlier one made, or be taught by
it: `arm:NAME` in place of a path is the run of that arm with the same seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opdcl import parallel
from opdcl.config.load import flatten, validate
from opdcl.config.workflow import Workflow
from opdcl.console import Output
from opdcl.errors import Interrupted, OpdclError, UsageError
from opdcl.pipeline.reuse import outcomes
from opdcl.rundir.layout import RunDir

REFERENCE = "arm:"


def expand(flow: Workflow, out: Path) -> dict[str, Workflow]:
    """Return run name -> workflow, the arms of one seed together, so that an early stop leaves whole comparisons.

    Args:
        flow: The workflow with its arms and seeds.
        out: The folder in which the runs are to lie.
    """
    common = flow.model_dump(exclude={"arms", "seeds"})
    runs: dict[str, Workflow] = {}
    arms = flow.arms or {flow.name: {}}
    for seed in flow.seeds or [None]:
        names = {arm: arm if seed is None else f"{arm}-{seed}" for arm in arms}
        earlier: dict[str, str] = {}
        for arm, settings in arms.items():
            name = names[arm]
            tree = _resolved(_merged(common, settings), earlier, arm)
            earlier[arm] = str((out / name).resolve())
            for stage in ("finetune", "recover"):
                if seed is not None and tree.get(stage):
                    tree[stage]["seed"] = seed
            try:
                runs[name] = validate(tree | {"name": name}, own=flatten(settings))
            except UsageError as fault:
                raise UsageError(f"arms.{arm}: {fault}", fault.hint) from fault
    return runs


def _resolved(value: Any, earlier: dict[str, str], arm: str) -> Any:
    """Return settings with each `arm:NAME`, where an adapter is named, replaced by that arm's run directory."""
    if isinstance(value, dict):
        return {
            k: _resolved(v, earlier, arm) if isinstance(v, dict) or k in ("start", "adapter") else v
            for k, v in value.items()
        }
    if not (isinstance(value, str) and value.startswith(REFERENCE)):
        return value
    if (name := value.removeprefix(REFERENCE)) not in earlier:
        known = f"an earlier arm: {', '.join(earlier)}" if earlier else "the first arm has none before it"
        raise UsageError(f"arms.{arm}: {value} names no earlier arm", known)
    return earlier[name]


def needs(one: Workflow) -> list[Path]:
    """Return the run directories and folders whose adapters a workflow starts from or is taught by."""
    return [Path(place) for place in dict.fromkeys(one.adapters().values())]


def _merged(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping with another's values laid over it, section by section."""
    found = dict(tree)
    for key, value in other.items():
        inner = found.get(key)
        found[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def describe_all(flow: Workflow, out: Path) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Return what would be done in every run, as table rows and as data. Writes nothing."""
    from opdcl.pipeline.dry_run import describe

    rows, plans = [], []
    runs = expand(flow, out)
    made = {fingerprint: donor.path.name for donor in _others(out, runs) for fingerprint in outcomes(donor)}
    for name, one in runs.items():
        if waiting := [
            p.name
            for p in needs(one)
            if p.parent == out.resolve() and p.name in runs and not RunDir(p).last_stage()
        ]:
            why = f"after {' and '.join(waiting)}"
            rows.append([name, "all stages", "run", why])
            plans.append({"run": name, "tasks": [], "why": why})
            continue
        found, plan = describe(one, RunDir(out / name), made)
        rows += [[name, *row] for row in found if row[0] != "machine"]
        plans.append({"run": name, **plan})
    return rows, plans


def _others(out: Path, runs: dict[str, Workflow]) -> list[RunDir]:
    """Return the runs that another recipe has made in the same folder: what they have need not be made again either."""
    return [RunDir(p) for p in sorted(out.glob("*")) if p.name not in runs and RunDir(p).is_run()]


def execute_all(
    flow: Workflow, origins: dict[str, str], out: Path, output: Output, force: bool = False
) -> dict[str, Any]:
    """Run every arm with every seed, then compare them; return the comparison.

    An arm that fails, because its health watch halted it for example, does not stop the others.

    Raises:
        UsageError: An arm's settings do not hold, or a run directory was made with others.
        Interrupted: The user stopped it; the same command goes on.
        OpdclError: Some arm failed; the others are compared.
    """
    from opdcl.pipeline.execute import execute
    from opdcl.results.compare import compare, refuse_folder, write

    parallel.on_first_worker(lambda: refuse_folder(out))
    runs = expand(flow, out)
    finished: list[RunDir] = []
    others = _others(out, runs)
    failed: dict[str, OpdclError] = {}
    for number, (name, one) in enumerate(runs.items(), 1):
        run = RunDir(out / name)
        output.note(f"{name}: run {number} of {len(runs)}")
        if lost := next((p.name for p in needs(one) if p.parent == out.resolve() and p.name in failed), None):
            failed[name] = OpdclError(f"{name} needs {lost}, which failed")
            output.error(failed[name])
            continue
        try:
            execute(one, origins, run, output, force, [*finished, *others])
            finished.append(run)
        except (UsageError, Interrupted):
            raise
        except OpdclError as fault:
            output.error(fault)
            failed[name] = fault
    found = parallel.on_first_worker(lambda: compare(finished)) if len(finished) > 1 else {}
    for file in parallel.on_first_worker(lambda: list(write(found, out))) if found else ():
        output.note(f"wrote {file}")
    if failed:
        raise OpdclError(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}", f"the others are in {out}"
        )
    return found
