"""Do pairs of one start resemble each other more than pairs of two? Where they do, fewer units
stand behind a figure than there are pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

SURE = 0.05  # p below which clustering is told
DRIFTS = 0.01  # p below which a trend within starts is told: it would widen nothing


@dataclass(frozen=True)
class Clustering:
    """How the log ratios of pairs cluster.

    icc: intraclass correlation of the pairs of one start, by the mean squares of a one-way analysis
        of variance (Donner, Int. Stat. Rev. 54 (1986) 67, with his mean size for unequal starts);
        p: of its F test. None with fewer than two starts of two pairs.
    lag1: correlation of a pair with the next one of its start, about the start's mean; neighbours:
        how many such there are. None without.
    trend: p of a common slope over the place in the start, starts' means taken out; change: of a
        slope of the starts' means over their order. None where it has fewer than two degrees of
        freedom.
    """

    icc: float | None = None
    p: float | None = None
    lag1: float | None = None
    neighbours: int = 0
    trend: float | None = None
    change: float | None = None

    @property
    def high(self) -> bool:
        """Whether starts differ by more than their pairs explain, or neighbours are alike beyond
        two standard errors (1 / sqrt(neighbours)).
        """
        apart = self.p is not None and self.p < SURE and self.icc > 0
        alike = self.lag1 is not None and self.lag1 > 2 / math.sqrt(self.neighbours)
        return apart or alike

    @property
    def drifts(self) -> bool:
        """Whether the ratio moves while a start, or the run, goes on: one arm changed and the other
        did not.
        """
        return any(p is not None and p < DRIFTS for p in (self.trend, self.change))


def of(starts: Sequence[Sequence[float]]) -> Clustering:
    """The clustering of log ratios of pairs, one sequence a start in order of time."""
    groups = [np.asarray(start, dtype=float) for start in starts if len(start)]
    long = [x - x.mean() for x in groups if len(x) > 1]
    pairs, within = sum(map(len, groups)), sum(float((x**2).sum()) for x in long)
    if not within > 0:
        return Clustering()
    icc, p = _between(groups, pairs, within)
    products = sum(float((x[1:] * x[:-1]).sum()) for x in long)
    neighbours = sum(len(x) - 1 for x in long)
    # A sample's own mean makes neighbours look unlike by 1 / size (Marriott & Pope, Biometrika 41
    # (1954) 390): that is given back.
    size = sum(map(len, long)) / len(long)
    lag1 = min(1.0, products / within * size / (size - 1) + 1 / size)
    means = np.array([x.mean() for x in groups])
    change = _trend([means - means.mean()])
    return Clustering(icc, p, lag1, neighbours, _trend(long), change)


def _between(
    groups: Sequence[np.ndarray], pairs: int, within: float
) -> tuple[float | None, float | None]:
    k = len(groups)
    if k < 2 or pairs == k:
        return None, None
    mean = np.concatenate(groups).mean()
    between = sum(len(x) * (x.mean() - mean) ** 2 for x in groups)
    above, below = between / (k - 1), within / (pairs - k)
    size = (pairs - sum(len(x) ** 2 for x in groups) / pairs) / (k - 1)
    icc = (above - below) / (above + (size - 1) * below)
    return float(icc), float(special.fdtrc(k - 1, pairs - k, above / below))


def _trend(centred: Sequence[np.ndarray]) -> float | None:
    """p of a common slope over the place in each sequence, whose mean is 0."""
    places = [np.arange(len(x)) - (len(x) - 1) / 2 for x in centred]
    df = sum(map(len, centred)) - len(centred) - 1
    if df < 2:
        return None
    xx = sum(float((t**2).sum()) for t in places)
    slope = sum(float((t * x).sum()) for t, x in zip(places, centred)) / xx
    left = sum(float((x**2).sum()) for x in centred) - slope**2 * xx
    if left <= 0:
        return 0.0
    return float(2 * special.stdtr(df, -abs(slope) / math.sqrt(left / df / xx)))
