"""The structure of the package: an order without circles, short files, and little, loose code.

How it is counted is in helpers/imports.py and helpers/weight.py.
"""

import re

import pytest
from helpers import imports
from helpers.command import ROOT
from helpers.weight import Weight, weigh

FILE_LIMIT, FUNCTION_LIMIT = 500, 60

# What the package, tests and benchmarks weigh at most. Code that goes lowers these numbers.
NODES, DENSITY, NESTED, IMPORTS = 195_670, 10.5, 0.2, 0.12
TEST_LINES, BENCHMARK_LINES = 22_700, 3_850


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


def longer_than(limit: int, sizes: dict[str, int]) -> dict[str, int]:
    return {place: lines for place, lines in sizes.items() if lines > limit}


def test_packages_form_no_circle():
    assert imports.circles(imports.between_packages(imports.arrows())) == []


def test_modules_form_no_circle():
    assert imports.circles({(a.source, a.target) for a in imports.arrows()}) == []


def test_imports_follow_the_order_of_packages():
    assert imports.against_order(imports.arrows()) == []


def test_the_order_names_every_package():
    packages = {imports.package_of(name) for name in imports.sources()} - imports.ENTRIES
    assert packages == {name for line in imports.ORDER for name in line}


def test_no_file_is_too_long():
    assert longer_than(FILE_LIMIT, imports.lengths()[0]) == {}


def test_no_function_is_too_long():
    assert longer_than(FUNCTION_LIMIT, imports.lengths()[1]) == {}


def test_the_package_is_light_and_its_lines_are_loose():
    package = weigh(ROOT / "opdcl")
    assert package.nodes <= NODES
    assert package.density <= DENSITY
    assert package.nested_share <= NESTED
    assert package.import_share <= IMPORTS


def test_tests_and_benchmarks_are_light():
    assert weigh(ROOT / "tests").lines <= TEST_LINES
    assert weigh(ROOT / "benchmarks").lines <= BENCHMARK_LINES


def test_a_weight_counts_code_and_nothing_else():
    weight = Weight()
    weight.add('''"""Two lines
of docstring."""

import os  # a comment

# A comment.
A = """a string that
is no docstring"""


def rows(table):
    "One line."
    return [[x for x in row] for row in table]
''')
    assert (weight.lines, weight.imports, weight.nested, weight.statements) == (5, 1, 1, 6)
    assert weight.density == weight.nodes / 5
    assert weight.nested_share == 1000 / 6


def test_a_function_local_import_closes_a_circle(package):
    root = package(
        {
            "data/rows": "from opdcl.model import load",
            "model/load": "def f():\n    from opdcl.data import rows",
        }
    )
    arrows = imports.arrows(root)
    assert imports.circles(imports.between_packages(arrows)) == [["data", "model"]]
    assert imports.against_order(arrows) == ["opdcl.data.rows -> opdcl.model.load"]


def test_a_relative_import_counts(package):
    arrows = imports.arrows(package({"rundir/files": "from ..errors import A", "errors": "A = 1"}))
    assert [(a.source, a.target) for a in arrows] == [("opdcl.rundir.files", "opdcl.errors")]


def test_results_may_import_its_short_list_only(package):
    root = package({"results/scores": "import opdcl.model.load", "model/load": ""})
    assert imports.against_order(imports.arrows(root)) == ["opdcl.results.scores -> opdcl.model.load"]


def test_lengths_are_counted_with_comments_and_blank_lines(package):
    files, functions = imports.lengths(package({"cli": "# A comment.\n\ndef f():\n\n    return 1\n"}))
    assert files["opdcl/cli.py"] == 5
    assert functions == {"opdcl/cli.py:3 f": 3}


def test_contributing_names_files_and_packages_that_exist():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Commands")[0]
    files = re.findall(r"`([a-z_/]+\.py)`", guide)
    rooms = re.findall(r"`opdcl/([a-z_]+)/?`", guide)
    assert len(files) > 15
    assert len(rooms) > 8
    places = {name: [ROOT / name, ROOT / "opdcl" / name] for name in (*files, *rooms)}
    assert [name for name, where in places.items() if not any(place.exists() for place in where)] == []
