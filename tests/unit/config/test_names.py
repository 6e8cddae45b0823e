"""Names that become file names have to differ in more than case: some file systems ignore it."""

import pytest

from opdcl.config.load import validate
from opdcl.errors import UsageError


@pytest.mark.parametrize(
    "tree",
    [
        {"eval": {"domain": ["mine", "Mine"], "data": {"mine": "a.jsonl", "Mine": "b.jsonl"}}},
        {"eval": {"retention": ["mine"], "domain": ["MINE"], "data": {"mine": "a.jsonl", "MINE": "b.jsonl"}}},
        {"arms": {"short": {}, "Short": {}}},
    ],
)
def test_names_that_differ_in_case_only_are_refused(tree):
    with pytest.raises(UsageError, match="where file names ignore case"):
        validate({"model": {"id": "smollm2-135m"}, **tree})


def test_the_same_suite_may_be_named_once_per_spelling_that_differs():
    tree = {"eval": {"domain": ["mine", "mine2"], "data": {"mine": "a.jsonl", "mine2": "b.jsonl"}}}
    assert validate({"model": {"id": "smollm2-135m"}, **tree}).eval.domain == ["mine", "mine2"]
