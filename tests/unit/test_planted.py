"""The faults of planted.toml fit the code, and the tool tells a found fault from one that lives."""

import ast

import planted
import pytest
from helpers.command import ROOT


def test_each_planted_fault_fits_the_present_code_and_has_tests():
    for name, fault in planted.FAULTS.items():
        text = (ROOT / "opdcl" / f"{fault['module']}.py").read_text(encoding="utf-8")
        assert ast.dump(ast.parse(planted.faulty(text, fault))) != ast.dump(ast.parse(text)), name
        assert planted.files_of(fault), name


@pytest.mark.nightly
def test_a_fault_that_no_test_finds_fails_the_command(monkeypatch, capsys):
    harmless = {"module": "version", "what": "nothing", "old": "version__ =", "new": "version__  ="}
    faults = {"none": harmless | {"tests": ["rundir/test_verify*"]}, "I1": planted.FAULTS["I1"]}
    monkeypatch.setattr(planted, "FAULTS", faults)
    assert planted.main([]) == 1
    said = capsys.readouterr().out
    assert "LIVES none" in said
    assert "found I1" in said
    assert "1 of 2 faults found" in said
