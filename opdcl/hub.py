"""The Hugging Face hub: ids with a pinned revision, and the local cache through which all that is taken from it comes.

What `opdcl fetch` has brought needs no network any more: every copy is looked up by the commit that was resolved then.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from opdcl.errors import OpdclError, UsageError

# Names under which the hub knows the embedded models.
HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}

Kind = Literal["model", "adapter", "dataset"]

PLACE = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<subset>[\w.-]+))?(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?",
    re.ASCII,
)

FETCH_HINT = "while online, opdcl fetch WORKFLOW brings all that a workflow needs"

# What is taken of each kind. Weights lie at the top: folders hold other formats of the same ones.
FILES: dict[str, dict[str, list[str]]] = {
    "model": {
        "allow_patterns": [
            "*.json",
            "*.safetensors",
            "*.jinja",
            "*.txt",
            "*.model",
            "*.tiktoken",
            "README.md",
        ],
        "ignore_patterns": ["*/*", "consolidated*", "adapter_*"],
    },
    "adapter": {"allow_patterns": ["adapter_config.json", "adapter_model.safetensors", "README.md"]},
    "dataset": {"ignore_patterns": ["*.py", ".gitattributes"]},
}


@dataclass(frozen=True)
class Repository:
    """Something on the hub: `owner/name`, of a dataset perhaps one subset, at a branch, tag or commit."""

    kind: Kind
    id: str
    revision: str | None = None
    subset: str | None = None

    def __str__(self) -> str:
        return (
            self.id
            + (f":{self.subset}" if self.subset else "")
            + (f"@{self.revision}" if self.revision else "")
        )


def parse(kind: Kind, place: str) -> Repository | None:
    """Return what `owner/name[:subset][@revision]` names, or None where it is no such name."""
    found = PLACE.fullmatch(place)
    if found is None or (found["subset"] and kind != "dataset"):
        return None
    return Repository(kind, found["id"], found["revision"], found["subset"])


def snapshot(wanted: Repository, code: bool = False) -> Path:
    """Return the folder of a repository's files in the local cache, downloading what is missing; its name is the commit.

    Within one process a branch stays at the commit that it had when it was first asked for.

    Raises:
        UsageError: There is no such repository, it is not for everybody, or it is not cached and the hub is out of reach.
    """
    return _snapshot(wanted.kind, wanted.id, wanted.revision, code)


@functools.cache
def _snapshot(kind: Kind, id: str, revision: str | None, code: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                id,
                repo_type=_repo_type(kind),
                revision=revision,
                local_files_only=not reachable(),
                **_patterns(kind, code),
            )
        )
    except Exception as fault:
        raise to_user_error(fault, Repository(kind, id, revision)) from fault


def files(wanted: Repository, code: bool = False) -> list[Any]:
    """Ask the hub which files of a repository are needed, their sizes, and whether they are cached: its `DryRunFileInfo`s."""
    from huggingface_hub import snapshot_download

    try:
        return list(
            snapshot_download(
                wanted.id,
                repo_type=_repo_type(wanted.kind),
                revision=wanted.revision,
                dry_run=True,
                **_patterns(wanted.kind, code),
            )
        )
    except Exception as fault:
        raise to_user_error(fault, wanted) from fault


def to_user_error(fault: Exception, wanted: Repository) -> OpdclError:
    """Word what the hub's client raises for people."""
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        HfHubHTTPError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = f"{wanted.kind} {str(wanted)!r}"
    match fault:
        case GatedRepoError():
            return UsageError(
                f"{name} is gated",
                f"accept its terms at https://huggingface.co/{wanted.id}, then set HF_TOKEN",
            )
        case RevisionNotFoundError():
            return UsageError(
                f"{name}: the hub knows {wanted.id}, but no such revision",
                "name a branch, a tag or a commit of it",
            )
        case RepositoryNotFoundError():
            return UsageError(
                f"{name} is no path here, and is not on the hub, or is private",
                "check path or id; for a private one set HF_TOKEN",
            )
        case IncompleteSnapshotError():
            return UsageError(
                f"{name} is only in part in the local cache and the hub is out of reach", FETCH_HINT
            )
        case LocalEntryNotFoundError() | DryRunError() | OfflineModeIsEnabled():
            return UsageError(
                f"{name} is no path here, is not in the local cache, and the hub is out of reach",
                f"check the name; {FETCH_HINT}",
            )
        case HfHubHTTPError():
            return OpdclError(
                f"{name}: the hub answered: {_first_line(fault)}",
                "check HF_TOKEN and its rights, or try again later",
            )
    return OpdclError(
        f"{name}: {type(fault).__name__}: {_first_line(fault)}", "check the connection, or try again later"
    )


def reachable() -> bool:
    """Say whether the hub may be asked and answers: in seconds, where its client would try again for a minute."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)


@functools.cache
def _answers(endpoint: str) -> bool:
    if any(os.environ.get(k) for k in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True  # who lies behind a proxy cannot be tried directly
    try:
        hub = urlparse(endpoint)
        socket.create_connection(
            (hub.hostname, hub.port or (80 if hub.scheme == "http" else 443)), timeout=5
        ).close()
    except OSError:
        return False
    return True


def _patterns(kind: Kind, code: bool) -> dict[str, list[str]]:
    return FILES[kind] | ({"allow_patterns": [*FILES[kind]["allow_patterns"], "*.py"]} if code else {})


def _repo_type(kind: Kind) -> str:
    return "dataset" if kind == "dataset" else "model"


def _first_line(fault: Exception) -> str:
    return next((line.strip() for line in str(fault).splitlines() if line.strip()), "no reason given")[:300]
