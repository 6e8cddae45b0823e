"""One finished run, shared by the tests that read it or continue from it."""

import shutil
from pathlib import Path

import pytest
from helpers.command import opdcl
from helpers.tiny import make_project

from opdcl.rundir.hashes import seal


@pytest.fixture(scope="session")
def project(tiny_model, tmp_path_factory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"), tiny_model)


@pytest.fixture(scope="session")
def tiny_cache(tiny_model, tmp_path_factory) -> Path:
    """A cache in which the embedded model is the tiny one."""
    cache = tmp_path_factory.mktemp("cache")
    shutil.copytree(tiny_model, cache / "models" / "smollm2-135m")
    seal(cache / "models" / "smollm2-135m")
    return cache


@pytest.fixture(scope="session")
def finished(project) -> Path:
    """A run that was not interrupted."""
    done = opdcl("run", "tiny.yaml", "-o", "whole", "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    (project / "summary.json").write_text(done.stdout)
    return project / "whole"
