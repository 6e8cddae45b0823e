"""One finished run, shared by the tests that read it or continue from it."""

from pathlib import Path

import pytest
from helpers.command import opdcl
from helpers.tiny import make_project


@pytest.fixture(scope="session")
def project(tiny_model, tmp_path_factory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"), tiny_model)


@pytest.fixture(scope="session")
def finished(project) -> Path:
    """A run that was not interrupted."""
    done = opdcl("run", "tiny.yaml", "-o", "whole", "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    (project / "summary.json").write_text(done.stdout)
    return project / "whole"
