"""Ratios whose denominator may be zero."""

import numpy as np

from opdcl.results.intervals import difference, ratio


def test_there_is_no_ratio_to_a_gain_that_may_be_zero():
    """Its interval would be unbounded, however certain the numerator is."""
    part = np.tile([2.9, 3.1], 10)
    uncertain, certain = np.tile([5, -4], 10), np.tile([0.6, 0.4], 10)
    assert difference(part, np.zeros(20)).low > 0 > difference(uncertain, np.zeros(20)).low
    assert ratio(part, uncertain) is None
    bounded = ratio(part, certain)
    assert bounded is not None
    assert bounded.low < 6 < bounded.high
