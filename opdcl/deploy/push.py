"""Upload a run's adapter to the Hugging Face Hub, with a model card that contains its results."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.workflow import Workflow
from opdcl.data.rows import on_hub
from opdcl.deploy.export import LICENSES, copy_adapter, pick_state, portable
from opdcl.errors import UsageError
from opdcl.hub import HUB_IDS, parse, reachable, to_user_error
from opdcl.model.adapters import stands_on
from opdcl.model.consent import base_of_run
from opdcl.rundir.files import write_atomic
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def push(
    run: RunDir,
    state: str | None,
    repository: str,
    private: bool,
    base: str | None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Upload an adapter and its card in a single commit; return where they are. See `opdcl.api.push`.

    Raises:
        UsageError: The adapter or the token is missing, the base is not on the Hub, the repository is public
            although `private` was asked for, or the Hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    from opdcl.results.report import card

    target = parse("adapter", repository)
    if target is None or target.revision:
        problem = f"{repository!r} is not the name of a repository"
        raise UsageError(problem, f"opdcl push {run.path} owner/name")
    workflow = Workflow.model_validate(run.settings())
    own_base = base_of_run(run, trust_remote_code)
    state, adapter = pick_state(str(run.path), run.intact_adapters(), state)
    model = stands_on(run) or own_base
    base = base or portable(model.id)
    check_base(model.id, base)
    check_access()
    dataset = on_hub(workflow.finetune.data) if workflow.finetune else None
    api = HfApi()
    try:
        if private:
            refuse_public(api, repository)
        license = license_of(model.id, base)
        text = card(run, state, base, repository, license, [dataset.id] if dataset else [])
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            copy_adapter(adapter, folder, base, own_base)
            write_atomic(folder / "README.md", text)
            api.create_repo(repository, private=private or None, exist_ok=True)
            if private:  # somebody may have created it meanwhile
                refuse_public(api, repository)
            # `upload_folder` may make several commits; somebody downloading meanwhile would get a mixture.
            files = [CommitOperationAdd(file.name, file) for file in sorted(folder.iterdir())]
            message = f"The {state} adapter of {workflow.name}, made with opdcl"
            commit = api.create_commit(repository, files, commit_message=message).oid
            is_private = bool(api.model_info(repository).private)
    except UsageError:
        raise
    except Exception as fault:
        raise to_user_error(fault, target) from fault
    upload = {"state": state, "base": base, "private": is_private, "repository": repository}
    return upload | {"url": f"{api.endpoint}/{repository}", "commit": commit}


def refuse_public(api: HfApi, repository: str) -> None:
    """Refuse a repository that exists and is public: creating it again would not make it private."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(repository)
    except RepositoryNotFoundError:
        return
    if not info.private:
        settings = f"{api.endpoint}/{repository}/settings"
        hint = f"make it private at {settings}, name another repository, or leave --private out"
        raise UsageError(f"{repository} exists and is public, so --private would not hold", hint)


def check_base(id: str, base: str) -> None:
    """Refuse an adapter whose base others cannot download."""
    is_local = os.path.exists(base) or (os.path.exists(id) and "/" not in base)
    if id not in HUB_IDS and (parse("model", base) is None or is_local):
        problem = f"the base {id} is on this machine only, and nobody could load the adapter"
        raise UsageError(problem, "--base owner/name is its name on the Hub")


def check_access() -> None:
    """Refuse to start without a token or a connection."""
    from huggingface_hub import get_token

    if get_token() is None:
        hint = "set HF_TOKEN to a token that may write, or run: hf auth login"
        raise UsageError("no token for the Hub", hint)
    if not reachable():
        raise UsageError("the Hub is unreachable", "go online, and leave out HF_HUB_OFFLINE")


def license_of(id: str, base: str) -> str | None:
    """Return the base's licence from its card on the Hub, or None."""
    if id in LICENSES:
        return LICENSES[id]
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        data = HfApi().model_info(base).card_data
    except HfHubHTTPError:
        return None  # for example, the base is private; the card then states no licence
    return data.license if data and isinstance(data.license, str) else None
