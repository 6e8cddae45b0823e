"""Access the Hugging Face Hub through its local cache, at the commit that a name resolves to.

What `hf download` has downloaded needs no network: the cache is searched by the commit resolved at that time.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opdcl.errors import OpdclError, UsageError

# The Hub ids of embedded models.
HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}

Kind = Literal["model", "adapter", "dataset"]

NAME = re.compile(
    r"(?P<id>(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)(?::(?P<subset>[\w.-]+))?(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?",
    re.ASCII,
)

# The files to download of each kind. A model's folders contain other formats of the weights at the top level.
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "README.md"]
FILES: dict[str, dict[str, list[str]]] = {
    "model": {"allow_patterns": MODEL_FILES, "ignore_patterns": ["*/*", "consolidated*", "adapter_*"]},
    "adapter": {"allow_patterns": ["adapter_config.json", "adapter_model.safetensors", "README.md"]},
    "dataset": {"ignore_patterns": ["*.py", ".gitattributes"]},
}


@dataclass(frozen=True)
class Repository:
    """A repository `owner/name` at a branch, tag or commit; of a dataset optionally one subset."""

    kind: Kind
    id: str
    revision: str | None = None
    subset: str | None = None

    def __str__(self) -> str:
        subset = f":{self.subset}" if self.subset else ""
        return self.id + subset + (f"@{self.revision}" if self.revision else "")


def parse(kind: Kind, name: str) -> Repository | None:
    """Parse `owner/name[:subset][@revision]`; return None if the text has another form.

    Some models, such as `gpt2`, have no owner.
    """
    match = NAME.fullmatch(name)
    if match is None or (match["subset"] and kind != "dataset"):
        return None
    if "/" not in match["id"] and (kind != "model" or name.endswith((".gguf", ".safetensors", ".bin"))):
        return None
    return Repository(kind, match["id"], match["revision"], match["subset"])


def download_command(repository: Repository) -> str:
    """Return the command that brings a repository into the local cache."""
    kind = ["--repo-type", "dataset"] if repository.kind == "dataset" else []
    revision = ["--revision", repository.revision] if repository.revision else []
    return " ".join(["hf", "download", *kind, repository.id, *revision])


def snapshot(repository: Repository) -> Path:
    """Download what the local cache lacks of a repository and return its folder, whose name is the commit.

    Within one process a branch stays at the commit of the first call. A `UsageError` says that it does not
    exist, is private, or is not cached while the Hub is unreachable.
    """
    return _snapshot(repository.kind, repository.id, repository.revision)


@functools.cache
def _snapshot(kind: Kind, id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    repo_type = "dataset" if kind == "dataset" else "model"
    options: Any = {"repo_type": repo_type, "revision": revision, "local_files_only": not reachable()}
    try:
        return Path(snapshot_download(id, **options, **FILES[kind]))
    except Exception as fault:
        raise to_user_error(fault, Repository(kind, id, revision)) from fault


@functools.cache
def holds(repository: Repository, file: str) -> bool:
    """Return whether a repository has a file; without a connection, whether the cache has it."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    place = {"repo_id": repository.id, "filename": file, "revision": repository.revision}
    if not reachable():
        return isinstance(try_to_load_from_cache(**place), str)
    try:
        return HfApi().file_exists(**place)
    except Exception as fault:
        raise to_user_error(fault, repository) from fault


def to_user_error(fault: Exception, repository: Repository) -> OpdclError:
    """Translate an exception of the Hub client into an error with a hint."""
    from huggingface_hub import constants, errors

    reason = "" if constants.HF_HUB_OFFLINE else _silence(constants.ENDPOINT)
    silent = f"the Hub is unreachable{reason and f' ({reason})'}"
    name = f"{repository.kind} {str(repository)!r}"
    match fault:
        case errors.GatedRepoError():
            problem = f"{name} is gated"
            hint = f"accept its terms at https://huggingface.co/{repository.id}, then set HF_TOKEN"
        case errors.RevisionNotFoundError():
            problem = f"{name}: the Hub has {repository.id}, but no such revision"
            hint = "use a branch, tag or commit of it"
        case errors.RepositoryNotFoundError():
            problem = f"{name} was found neither locally nor on the Hub (it may be private)"
            hint = "check the path or id; for a private repository set HF_TOKEN"
        case errors.IncompleteSnapshotError():
            problem = f"{name} is only partly in the local cache and {silent}"
            hint = f"while online: {download_command(repository)}"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            problem = f"{name} is not a local path and not in the local cache, and {silent}"
            hint = f"check the name; while online: {download_command(repository)}"
        case _:
            line = next((line.strip() for line in str(fault).splitlines() if line.strip()), "no reason given")
            if isinstance(fault, errors.HfHubHTTPError):
                source, hint = "the Hub answered", "check HF_TOKEN and its permissions, or try again later"
            else:
                source, hint = type(fault).__name__, "check the connection, or try again later"
            return OpdclError(f"{name}: {source}: {line[:300]}", hint)
    return UsageError(problem, hint)


def go_offline_if_unreachable() -> None:
    """Let libraries use the cache only if the Hub is unreachable: they would retry for a minute."""
    if not reachable():
        import datasets
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def reachable() -> bool:
    """Return within seconds whether the Hub may be asked and answers; its client would retry for a minute."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and not _silence(constants.ENDPOINT)


@functools.cache
def _silence(endpoint: str) -> str:
    """Return why the Hub does not answer as its client asks, also through a proxy; "" if it does."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=5)
    except Exception as fault:  # the client has one for each fault of network, proxy and certificate
        return f"{type(fault).__name__}: {str(fault)[:200]}"
    return ""
