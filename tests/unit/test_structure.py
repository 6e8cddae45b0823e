"""The structure of the package: imports that point one way, a core that stands alone, and limits to growth.

tests/structure.py counts, and prints the present counts. Each limit is what was counted when it was set: it
may fall, to its target, and may not rise.
"""

import re
import subprocess
import tomllib

import pytest
import structure
from helpers import imports
from helpers.command import ROOT
from helpers.tiny import make_project

FILE_LIMIT = 500

# What a reader of the method must hold in mind: the modules that an entry file imports, directly or by way of
# others, and their code lines. Target of both entries: 30 and 4,200.
CLOSURES = {"opdcl.train.recover": (30, 4_330), "opdcl.train.finetune": (26, 3_453)}

# Public names of several classes or functions. Target: none.
SEVERAL_MEANINGS = {
    **dict.fromkeys(("compare", "evaluate", "export", "finetune"), 2),
    **dict.fromkeys(("join", "read_config", "recover", "verify"), 2),
}

# How often one recovery of a fine-tuned run may do what it needs once, or once before and once after it takes
# over what other runs have finished.
WORK = {"validations of the settings": 1, "plans": 2}


@pytest.fixture
def package(tmp_path):
    """Return a function that writes a package from file name -> source, and returns its folder."""

    def write(files: dict[str, str]):
        for name, text in {"__init__": "", **files}.items():
            file = tmp_path / "opdcl" / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return write


def test_imports_form_no_circle_and_follow_the_order_of_packages():
    arrows = imports.arrows()
    assert imports.circle(imports.between_packages(arrows)) == []
    assert imports.circle({(a.source, a.target) for a in arrows}) == []
    assert imports.against_order(arrows) == []


def test_the_order_names_every_package():
    packages = {imports.package_of(name) for name in imports.sources()} - imports.ENTRIES
    assert packages == {name for line in imports.ORDER for name in line}


def test_no_file_is_too_long():
    texts = {name: file.read_text(encoding="utf-8") for name, file in imports.sources().items()}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LIMIT} == {}


@pytest.mark.parametrize("entry", CLOSURES)
def test_the_method_is_read_without_the_rest(entry):
    modules, lines = structure.closure(entry)
    most_modules, most_lines = CLOSURES[entry]
    assert modules <= most_modules, f"{entry} imports {modules} modules, some of them by way of others"
    assert lines <= most_lines, f"{entry} and what it imports are {lines} code lines"


def test_every_file_belongs_to_one_capability():
    owners = structure.owners(structure.read_ledger())
    files = set(structure.lines_of(ROOT / "opdcl"))
    assert files - set(owners) == set(), "name them in tests/unit/capabilities.toml"
    assert set(owners) - files == set(), "they are gone: take them out of tests/unit/capabilities.toml"
    assert {file: named for file, named in owners.items() if len(named) > 1} == {}


def test_no_capability_grows_unless_another_one_pays():
    ledger = structure.read_ledger()
    ceilings = {name: entry["ceiling"] for name, entry in ledger["capability"].items()}
    sizes = structure.sizes_of(ledger)
    grown = {name: (size, ceilings[name]) for name, size in sizes.items() if size > ceilings[name]}
    assert grown == {}, "lines and ceiling; a feature says which capability gives up as many lines"
    assert sum(ceilings.values()) == ledger["total"]


@pytest.mark.parametrize("commit", ["HEAD", "HEAD^"])
def test_no_limit_is_above_that_of_the_commit_before(commit):
    """At a commit the one before is HEAD^, and while one is prepared it is HEAD."""
    name = structure.LEDGER.relative_to(ROOT)
    shown = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip("no git history")
    before, now = tomllib.loads(shown.stdout), structure.read_ledger()
    if before.keys() != now.keys():
        pytest.skip(f"the ledger of {commit} counts other things")
    assert {limit for limit in now if limit != "capability" and now[limit] > before[limit]} == set()


def test_a_written_ledger_has_the_present_lines_and_keeps_the_files(tmp_path):
    ledger, file = structure.read_ledger(), tmp_path / "capabilities.toml"
    text = structure.LEDGER.read_text(encoding="utf-8")
    file.write_text(re.sub(r"(?m)^(\w+) = [0-9_]+$", r"\1 = 1", text), encoding="utf-8")
    structure.write_ledger(file)
    written = structure.read_ledger(file)
    assert structure.owners(written) == structure.owners(ledger)
    ceilings = {name: entry["ceiling"] for name, entry in written["capability"].items()}
    assert ceilings == structure.sizes_of(ledger)
    assert written["total"] == sum(ceilings.values()) == sum(structure.lines_of(ROOT / "opdcl").values())
    assert written["tests"] > written["benchmarks"] > 1


def test_what_the_head_of_the_ledger_limits_does_not_grow():
    ledger = structure.read_ledger()
    assert {name: number for name, number in structure.counts().items() if number > ledger[name]} == {}


def test_a_public_name_has_one_meaning():
    found = structure.meanings()
    more = {name: count for name, count in found.items() if count > SEVERAL_MEANINGS.get(name, 1)}
    assert more == {}, "give the new one another name"
    fewer = {name for name, count in SEVERAL_MEANINGS.items() if found.get(name, 1) < count}
    assert fewer == set(), "they have fewer meanings now: lower them in SEVERAL_MEANINGS"


def test_one_recovery_does_nothing_more_often_than_before(tiny_model, tmp_path):
    work = structure.work_of_a_recovery(make_project(tmp_path, tiny_model))
    assert work.keys() == WORK.keys()
    assert {name: count for name, count in work.items() if not 0 < count <= WORK[name]} == {}


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings():
    text = '''"""Two lines
of docstring."""

import os  # a comment

# A comment.
A = """a string that
is no docstring"""


def rows(table):
    "One line."
    return [[x for x in row] for row in table]
'''
    assert structure.code_lines(text) == 5
    assert structure.template_lines("<p>\n\n{# Two\nlines. #}\n<!-- one -->{{ a }}\n") == 2


def test_a_closure_reaches_what_is_imported_by_way_of_others(package):
    root = package(
        {
            "train/recover": "import torch\n\ndef f():\n    from opdcl.model import load",
            "model/load": "# Why.\nfrom opdcl.errors import A",
            "errors": "A = 1",
            "results/report": "B = 1",
        }
    )
    assert structure.closure("opdcl.train.recover", root) == (3, 5)


def test_a_verb_and_its_command_are_one_meaning(package):
    both = {"api": "def run(): ...", "cli/stages": "def run(): ...\ndef show(): ..."}
    assert structure.meanings(package(both)) == {}
    others = {"pipeline/job": "def run(): ...\nclass _Row: ...", "data/rows": "class _Row: ..."}
    assert structure.meanings(package(others)) == {"run": 2}
    values = {"data/rows": "ROWS = 1\nRow: type = int", "model/load": "ROWS: int = 1\n_ROW = Row = 2"}
    assert structure.meanings(package(values), of_values=True) == {"ROWS": 2, "Row": 2}


def test_an_arrow_may_be_relative_or_in_a_function_and_results_may_import_little(package):
    root = package(
        {
            "data/rows": "from opdcl.model import load",
            "model/load": "def f():\n    from opdcl.data import rows",
            "results/scores": "import opdcl.model.load",
            "rundir/files": "from ..errors import A",
            "errors": "A = 1",
        }
    )
    arrows = imports.arrows(root)
    assert ("opdcl.rundir.files", "opdcl.errors") in {(a.source, a.target) for a in arrows}
    assert {*imports.circle(imports.between_packages(arrows))} == {"data", "model"}
    assert {*imports.against_order(arrows)} == {
        "opdcl.data.rows -> opdcl.model.load",
        "opdcl.results.scores -> opdcl.model.load",
    }


def test_contributing_names_files_and_packages_that_exist():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Commands")[0]
    files = re.findall(r"`([a-z_/]+\.py)`", guide)
    rooms = re.findall(r"`opdcl/([a-z_]+)/?`", guide)
    assert len(files) > 15
    assert len(rooms) > 8
    places = {name: [ROOT / name, ROOT / "opdcl" / name] for name in (*files, *rooms)}
    assert [name for name, where in places.items() if not any(place.exists() for place in where)] == []
