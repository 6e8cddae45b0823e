"""The scores of a suite."""

import pytest

from opdcl.results.scores import Suite


def test_a_prompt_with_more_parts_weighs_more():
    rows = [{"scores": {"parts": [True, True, True]}}, {"scores": {"parts": [False]}}]
    suite = Suite("instructions", "retention", "parts", {}, {"base": rows}, 0)
    # Three of four parts are passed, but only one of two prompts.
    assert suite.values("base") == pytest.approx([1.5, 0])
    assert suite.values("base").mean() == pytest.approx(3 / 4)
