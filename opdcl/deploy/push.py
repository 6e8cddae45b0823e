"""Put a run's adapter on the Hugging Face hub, with a model card that holds its results.

opdcl push runs/mine me/my-adapter
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from opdcl.config.workflow import Workflow
from opdcl.data.rows import on_hub
from opdcl.deploy.export import copy_adapter, pick_state, portable
from opdcl.errors import UsageError
from opdcl.hub import HUB_IDS, parse, reachable, to_user_error
from opdcl.results.report import card
from opdcl.rundir.files import read_json, write_atomic
from opdcl.rundir.layout import RunDir

# What the embedded models are licensed under; a hub model's card says it itself.
LICENSES = {"smollm2-135m": "apache-2.0"}


def push(run: RunDir, state: str | None, repository: str, private: bool, base: str | None) -> dict[str, Any]:
    """Upload one adapter with its card in a single commit; return where it is.

    Args:
        run: The run.
        state: Whose adapter. Default: the last one.
        repository: `owner/name`, made where there is none.
        private: Whether one that is made is private.
        base: The base's hub id, where the run names a folder.

    Raises:
        UsageError: There is no such adapter, no token, the base has no name on the hub, or the hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    wanted = parse("adapter", repository)
    if wanted is None or wanted.revision:
        raise UsageError(f"{repository!r} is no name of a repository", f"opdcl push {run.path} owner/name")
    workflow = Workflow.model_validate(read_json(run.config)["workflow"])
    state, folder = pick_state(str(run.path), run.adapters(), state)
    base = base or portable(workflow.model.id)
    if workflow.model.id not in HUB_IDS and (parse("model", base) is None or os.path.exists(base)):
        raise UsageError(
            f"the base {workflow.model.id} is on this machine only, and nobody could load the adapter",
            "--base owner/name says what it is on the hub",
        )
    if get_token() is None:
        raise UsageError("no token for the hub", "set HF_TOKEN to one that may write, or type: hf auth login")
    if not reachable():
        raise UsageError("the hub is out of reach", "go online, and leave out HF_HUB_OFFLINE")
    sources = [workflow.finetune.data] if workflow.finetune else []
    datasets = [found.id for source in sources if (found := on_hub(source))]
    api = HfApi()
    try:
        text = check_card(card(run, state, base, repository, license_of(workflow.model.id, base), datasets))
        with tempfile.TemporaryDirectory() as made:
            to = Path(made)
            copy_adapter(folder, to, base)
            write_atomic(to / "README.md", text)
            api.create_repo(repository, private=private or None, exist_ok=True)
            # One commit, not a folder's stream of them: whoever loads it meanwhile gets the old one or all of the new one.
            operations = [CommitOperationAdd(file.name, file) for file in sorted(to.iterdir())]
            done = api.create_commit(
                repository,
                operations,
                commit_message=f"The {state} adapter of {workflow.name}, made with opdcl",
            )
    except Exception as fault:
        raise to_user_error(fault, wanted) from fault
    return {
        "state": state,
        "repository": repository,
        "base": base,
        "url": f"{api.endpoint}/{repository}",
        "commit": done.oid,
        "private": private,
    }


def check_card(text: str) -> str:
    """Return a model card as it is, if the hub's own reader finds its metadata and results in order."""
    from huggingface_hub import ModelCard

    try:
        ModelCard(text)
    except ValueError as fault:
        raise UsageError(
            f"the model card is not one: {fault}", "this is a defect of opdcl: please report it"
        ) from fault
    return text


def license_of(named: str, base: str) -> str | None:
    """Return the base's licence as its card on the hub says it, or None."""
    if named in LICENSES:
        return LICENSES[named]
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        data = HfApi().model_info(base).card_data
    except HfHubHTTPError:
        return None  # a private base, for instance: the card then says nothing
    return data.license if data and isinstance(data.license, str) else None
