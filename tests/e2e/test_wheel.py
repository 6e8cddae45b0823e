"""The built wheel: installed into an empty folder, it brings everything that the recipes need."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.command import ENV, ROOT

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout, built with the build backend itself: no network, no build environment."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (file,) = folder.glob("opdcl-*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder that pip has installed the wheel into."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder, wheel],
        check=True,
        timeout=120,
    )
    return folder


def test_the_wheel_holds_the_package_the_recipes_and_the_suites_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    here = [
        file.relative_to(ROOT).as_posix()
        for folder in ("opdcl", "workflows", "evals")
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    makers = re.compile(r"evals/(ifeval/|\w+/(make\.py|requests\.txt)$)")
    here = [name for name in here if not makers.match(name)]
    assert packed == {name if name.startswith("opdcl/") else f"opdcl/{name}" for name in here}


def test_the_metadata_names_the_readme_the_licence_and_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.partition(".dist-info/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert (ROOT / "README.md").read_text(encoding="utf-8") in texts["METADATA"]
    assert "opdcl = opdcl.cli:main" in texts["entry_points.txt"]
    assert "Apache License" in texts["licenses/LICENSE"]


def test_the_installed_wheel_lists_its_recipes_and_plans_quickstart_in_an_empty_folder(installed, tmp_path):
    env = ENV | {"PYTHONPATH": str(installed), "HOME": str(tmp_path), "OPDCL_CACHE": str(tmp_path / "cache")}
    said = []
    for words in (["workflows", "ls"], ["run", "quickstart", "--dry-run"]):
        command = [sys.executable, "-P", "-m", "opdcl", *words]  # not from this checkout
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert [p.stem for p in (ROOT / "workflows").glob("*.yaml") if p.stem not in said[0]] == []
    assert "53 steps" in said[1]  # of 210 rows, which the wheel brings
    assert str(ROOT) not in "".join(said)
    assert not (tmp_path / "runs").exists()
