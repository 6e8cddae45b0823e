"""The tool behind `make mutants`: its faults, its choice of them, and what it reports."""

import ast
import tomllib

from helpers.command import ROOT
from mutants.faults import generic, planted, sample
from mutants.outcomes import Outcome, summarise
from mutants.targets import TARGETS

TOOL = ROOT / "tests" / "mutants"
SOURCE = '''
"""A module."""
LIMIT = 3

def clip(x: int, low: int = 0) -> int:
    """Return x within its bounds."""
    if x > LIMIT and not low:
        return LIMIT
    show(x, end="")
    return max(x, low + 1)
'''


def test_the_rules_make_every_kind_of_fault_and_each_changes_the_code():
    made = generic("clip", ast.parse(SOURCE))
    assert {f.change for f in made} >= {
        "3 -> 4",
        "0 -> 1",
        "x > LIMIT -> x <= LIMIT",
        "x > LIMIT and (not low) -> x > LIMIT or not low",
        "not low -> low",
        "show(x, end='') -> pass",
        "show(...) without end=''",
        "low + 1 -> low - 1",
        "return before show(x, end='')",
    }
    sound = ast.unparse(ast.parse(SOURCE))
    for index in range(len(made)):
        fault = generic("clip", tree := ast.parse(SOURCE))[index]
        fault.code("clip.py")
        assert ast.unparse(tree) != sound, fault.name


def test_the_choice_is_seeded_and_a_new_line_elsewhere_leaves_it_alone():
    def chosen(source, seed):
        return {f.name for f in sample(generic("clip", ast.parse(source)), 4, seed)}

    assert chosen(SOURCE, 1) == chosen(SOURCE, 1) != chosen(SOURCE, 2)
    assert len(chosen(SOURCE.replace('"""A module."""', "import os"), 1) & chosen(SOURCE, 1)) == 4


def test_every_planted_fault_fits_the_present_code_and_has_tests():
    for fault, patterns in planted(TOOL / "planted.toml", ROOT / "opdcl"):
        fault.code("module.py")
        assert all(list((ROOT / "tests" / "unit").glob(f"{p}.py")) for p in patterns), fault.name


def test_every_target_has_tests_and_every_excused_fault_exists():
    for module, patterns in TARGETS.items():
        assert all(list((ROOT / "tests" / "unit").glob(f"{p}.py")) for p in patterns), module
    for name in tomllib.loads((TOOL / "survivors.toml").read_text(encoding="utf-8")):
        module = name.partition(":")[0]
        tree = ast.parse((ROOT / "opdcl" / f"{module}.py").read_text(encoding="utf-8"))
        assert name in {fault.name for fault in generic(module, tree)}


def test_a_fault_that_no_test_finds_fails_the_command_unless_it_is_excused():
    first, *others = generic("clip", ast.parse(SOURCE))
    outcomes = [Outcome(first, False, False, ""), *(Outcome(f, False, True, "a test") for f in others)]
    table, problems = summarise(outcomes, {})
    assert first.name in table
    assert problems == [f"{first.name} lives, and survivors.toml does not say why"]
    assert summarise(outcomes, {first.name: "speed only"})[1] == []


def test_too_small_a_share_fails_the_command_even_if_each_survivor_is_excused():
    made = generic("clip", ast.parse(SOURCE))
    outcomes = [Outcome(f, False, i > len(made) // 5, "") for i, f in enumerate(made)]
    assert summarise(outcomes, {f.name: "speed only" for f in made})[1] == [
        "fewer than 85% of all generic faults are found"
    ]
