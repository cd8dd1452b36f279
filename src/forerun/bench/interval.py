"""Confidence intervals of speed-ups.

Knows: ratios measured in pairs. Does not know: what was measured.

Speed-ups multiply, so their logarithms are averaged: the mean is the geometric one, and the interval is Student's t
over the logarithms (a paired t test: each ratio is of two runs of one prompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import NormalDist, fmean, stdev
from typing import Final

CONFIDENCE: Final = 0.95
FEW: Final = {1: 12.7062, 2: 4.3027}  # Student's t by degrees of freedom; the expansion is too inaccurate for few

Interval = tuple[float, float]


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean of ratios above 0."""
    return exp(fmean(map(log, ratios)))


def interval_of(ratios: Sequence[float]) -> Interval | None:
    """The 95 % confidence interval of the geometric mean; None for a single ratio."""
    if len(ratios) < 2:
        return None
    logs = [log(ratio) for ratio in ratios]
    half = student_t(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return exp(fmean(logs) - half), exp(fmean(logs) + half)


def student_t(freedom: int) -> float:
    """The t such that CONFIDENCE of the distribution is between -t and t (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return FEW.get(freedom) or sum(term / freedom**power for power, term in enumerate(terms))
