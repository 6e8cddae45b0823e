"""One workflow, several runs: every arm with every seed, each a run directory of its own, then compared.

    opdcl run ablation

What two runs have in common is made once (`pipeline.tasks`) and read once (`pipeline.inputs`). An arm may
continue an earlier arm's adapter, or learn from it: `arm:NAME` in place of a path is the run of that arm with
the same seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl import parallel
from opdcl.config.load import Note, flatten, validate
from opdcl.config.workflow import Workflow
from opdcl.console import Output
from opdcl.errors import GateError, InconclusiveError, Interrupted, OpdclError, UsageError
from opdcl.pipeline.job import Inputs, Job, Order
from opdcl.pipeline.tasks import offered
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    from opdcl.results.compare import Compared

REFERENCE = "arm:"


def expand(flow: Workflow, out: Path, note: Note = lambda text: None) -> dict[str, Workflow]:
    """Return run name -> workflow, for runs that lie in `out`; `note` reports what an arm leaves out.

    The arms of one seed follow each other, so that an early stop leaves whole comparisons.
    """
    left_out: list[str] = []
    common = flow.model_dump(exclude={"arms", "seeds"})
    runs: dict[str, Workflow] = {}
    for seed in flow.seeds or [None]:
        earlier: dict[str, str] = {}
        for arm, settings in (flow.arms or {flow.name: {}}).items():
            name = arm if seed is None else f"{arm}-{seed}"
            tree = _resolve(_merge(common, settings), earlier, arm)
            earlier[arm] = str((out / name).resolve())
            for stage in ("finetune", "recover"):
                if seed is not None and tree.get(stage):
                    tree[stage]["seed"] = seed
            try:
                said: list[str] = []
                runs[name] = validate(tree | {"name": name}, own=flatten(settings), note=said.append)
                left_out += [f"arms.{arm}: {text}" for text in said]
            except UsageError as fault:
                raise UsageError(f"arms.{arm}: {fault}", fault.hint) from fault
    for text in dict.fromkeys(left_out):  # once for all seeds
        note(text)
    return runs


def _resolve(tree: dict[str, Any], earlier: dict[str, str], arm: str) -> dict[str, Any]:
    """Replace each adapter `arm:NAME` by the run directory of that arm, at every depth."""
    resolved = dict(tree)
    for key, value in tree.items():
        if isinstance(value, dict):
            resolved[key] = _resolve(value, earlier, arm)
        elif key in ("start", "adapter") and isinstance(value, str) and value.startswith(REFERENCE):
            name = value.removeprefix(REFERENCE)
            if name not in earlier:
                known = f"an earlier arm: {', '.join(earlier)}"
                hint = known if earlier else "the first arm has none before it"
                raise UsageError(f"arms.{arm}: {value} names no earlier arm", hint)
            resolved[key] = earlier[name]
    return resolved


def _merge(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping overlaid with another one, section by section."""
    merged = dict(tree)
    for key, value in other.items():
        section = merged.get(key)
        both = isinstance(section, dict) and isinstance(value, dict)
        merged[key] = _merge(section, value) if both else value
    return merged


def _needs(workflow: Workflow, out: Path) -> list[Path]:
    """Return the run directories in `out` whose adapters a workflow starts from or learns from."""
    places = [Path(place) for place in dict.fromkeys(workflow.adapters().values())]
    return [path for path in places if path.parent == out.resolve()]


def _other_runs(out: Path, runs: dict[str, Workflow]) -> list[RunDir]:
    """Return the runs that other recipes have made in the same folder: their results can be reused too."""
    found = [RunDir(path) for path in sorted(out.glob("*")) if path.name not in runs]
    return [run for run in found if run.is_run()]


def describe_all(
    flow: Workflow,
    origins: dict[str, str],
    out: Path,
    inputs: Inputs,
    order: Order | None = None,
    note: Note = lambda text: None,
) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Return what each run would do, as table rows and as data. Writes nothing."""
    from opdcl.pipeline.dry_run import describe

    rows, plans = [], []
    runs = expand(flow, out, note)
    made_by = offered(_other_runs(out, runs))
    for name, workflow in runs.items():
        needs = [path for path in _needs(workflow, out) if path.name in runs]
        waiting = [path.name for path in needs if not RunDir(path).last_stage()]
        if waiting:
            why = f"after {' and '.join(waiting)}"
            rows.append([name, "all stages", "run", why])
            plans.append({"run": name, "tasks": [], "why": why})
            continue
        lines, plan = describe(Job(workflow, RunDir(out / name), inputs, origins, order), made_by)
        rows += [[name, *line] for line in lines if line[0] not in ("machine", "memory")]
        plans.append({"run": name, **plan})
    return rows, plans


def execute_all(
    flow: Workflow, origins: dict[str, str], out: Path, inputs: Inputs, output: Output, order: Order
) -> Compared | None:
    """Run every arm with every seed, then compare them; return the comparison, or None of a single run.

    An arm that fails does not stop the others. One that misses a gate is finished: it is compared, and other
    arms may continue it.

    Raises:
        UsageError: An arm's settings are invalid, or its run directory was made with others.
        Interrupted: The user stopped it; the same command resumes.
        OpdclError: Some arm failed; the others are compared.
        GateError, InconclusiveError: All are compared, and some arm missed a gate or left one undecided.
    """
    from opdcl.pipeline.execute import execute
    from opdcl.results.compare import refuse_folder

    parallel.on_first_worker(lambda: refuse_folder(out))
    runs = expand(flow, out, output.note)
    donors = _other_runs(out, runs)
    finished: list[RunDir] = []
    faulty: dict[type[OpdclError], list[str]] = {OpdclError: [], GateError: [], InconclusiveError: []}
    for number, (name, workflow) in enumerate(runs.items(), 1):
        run = RunDir(out / name)
        output.note(f"{name}: run {number} of {len(runs)}")
        try:
            for needed in _needs(workflow, out):
                if needed.name in faulty[OpdclError]:
                    raise OpdclError(f"{name} needs {needed.name}, which failed")
            execute(Job(workflow, run, inputs, origins, order), output, [*finished, *donors])
        except (UsageError, Interrupted):
            raise
        except OpdclError as fault:
            output.error(fault)
            kind = type(fault) if isinstance(fault, GateError | InconclusiveError) else OpdclError
            faulty[kind].append(name)
            if kind is OpdclError:
                continue
        finished.append(run)

    comparison: Compared | None = None
    if len(finished) > 1:
        comparison, files = parallel.on_first_worker(lambda: _compared(finished, out))
        for file in files:
            output.note(f"wrote {file}")
    words = ("failed", "missed a gate", "left a gate undecided")
    for (kind, names), what in zip(faulty.items(), words, strict=True):
        if names:
            hint = f"the others are in {out}" if kind is OpdclError else f"see {out}"
            raise kind(f"{len(names)} of {len(runs)} runs {what}: {', '.join(names)}", hint)
    return comparison


def _compared(runs: list[RunDir], out: Path) -> tuple[Compared, list[Path]]:
    """Compare runs; return the comparison and the files that it was written to."""
    from opdcl.results.compare import compare_runs, write_comparison

    comparison = compare_runs(runs)
    return comparison, list(write_comparison(comparison, out))
