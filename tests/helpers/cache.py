"""A cache of its own for tests and golden runs."""

import os
from pathlib import Path


def private_cache(folder: Path) -> None:
    """Let opdcl keep its cache in an empty folder.

    It shares all but the times and texts of real runs here: tests neither use nor change these.
    """
    from opdcl.model.load import embedded_folder
    from opdcl.rundir.files import cache_home

    embedded_folder()
    for entry in cache_home().iterdir():
        if entry.is_dir() and entry.name != "texts":
            (folder / entry.name).symlink_to(entry.resolve())
    os.environ["OPDCL_CACHE"] = str(folder)
