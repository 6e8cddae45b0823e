"""Read and hash the data of a workflow."""

from __future__ import annotations

import os

from opdcl.config.shipped import package_folder
from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError
from opdcl.rundir.hashes import hash_files


def data_hashes(workflow: Workflow) -> dict[str, str]:
    """Check that every data source exists and is well-formed; return field -> hash of its content."""
    from opdcl.data.rows import load_rows, pinned, source_files
    from opdcl.distill.prompts import read_recovery_source
    from opdcl.distill.schedule import STREAMS
    from opdcl.model.adapters import find_adapter
    from opdcl.pipeline.plan import source_hash

    sources: dict[str, str] = {}
    if workflow.finetune:
        sources["finetune.data"] = workflow.finetune.data
        for row in load_rows(workflow.finetune.data):
            if row.text is None and row.answer is None:
                raise UsageError(
                    f"{row.where} has no answer to learn", "fine-tune rows need completion, answer or text"
                )
    if workflow.recover:
        prompts = {stream: workflow.recover.source(stream) for stream in STREAMS}
        prompts |= {
            f"teachers.{name}.prompts": teacher.prompts for name, teacher in workflow.recover.teachers.items()
        }
        sources |= {f"recover.{name}": source for name, source in prompts.items() if source}
        read_recovery_source(workflow.recover)
    if workflow.eval:
        for suite, path in workflow.eval.data.items():
            if not os.path.isfile(path):
                raise UsageError(f"eval.data.{suite}: {path} does not exist", f"--data {suite}=PATH")
            sources[f"eval.data.{suite}"] = path
    hashes = {field: source_hash(pinned(source), source_files(source)) for field, source in sources.items()}
    for field, place in workflow.adapters().items():
        folder = find_adapter(place)
        hashes[field] = hash_files([folder / "adapter_model.safetensors", folder / "adapter_config.json"])
    suites = {f"eval.suite.{suite}": suite for suite in workflow.eval.suites()} if workflow.eval else {}
    if workflow.recover and workflow.recover.reward:
        suites["recover.reward.suite"] = workflow.recover.reward.suite
    for field, suite in suites.items():
        if files := sorted(package_folder("evals").glob(f"*/{suite}.yaml")):
            hashes[field] = hash_files(sorted(p for p in files[0].parent.iterdir() if p.is_file()))
    return hashes


def inherit(workflow: Workflow) -> Workflow:
    """Fill in what one stage takes from another: recovery guards the data that the fine-tune learned."""
    if workflow.finetune and workflow.recover and workflow.recover.domain is None:
        from opdcl.data.rows import load_rows

        # Plain text has no question to sample on, so there is no domain stream to be had from it.
        if all(row.prompt for row in load_rows(workflow.finetune.data)):
            domain = workflow.recover.model_copy(update={"domain": workflow.finetune.data})
            return workflow.model_copy(update={"recover": domain})
    return workflow
