"""The BCa interval of a mean, number for number as scipy.stats.bootstrap has it: importing
scipy.stats takes half a second of a core, in every process that judges.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special


def interval(x: np.ndarray, level: float, resamples: int) -> tuple[float, float]:
    """Bias-corrected and accelerated, over the values of ``x``, with a fixed seed; nan where it
    cannot be calculated.

    Efron, J. Am. Stat. Assoc. 82 (1987) 171. tests/unit/judge/test_stats.py holds it against
    scipy's.
    """
    n, mean = len(x), x.mean()
    drawn = np.sort(x[np.random.default_rng(0).integers(0, n, (resamples, n))].mean(-1))
    below = (np.count_nonzero(drawn < mean) + np.count_nonzero(drawn <= mean)) / (2 * resamples)
    bias, tail = special.ndtri(below), float(special.ndtri((1 - level) / 2))
    without = np.array([np.delete(x, i) for i in range(n)]).mean(-1)
    u = (n - 1.0) * (without.mean() - without)
    skew = 1 / 6 * (np.sum(u**3) / float(n) ** 3) / (np.sum(u**2) / float(n) ** 2) ** (3 / 2)
    low, high = (
        special.ndtr(bias + shifted / (1 - skew * shifted))
        for shifted in (bias + tail, bias - tail)
    )
    return _quantile(drawn, low), _quantile(drawn, high)


def _quantile(ascending: np.ndarray, p: float) -> float:
    """Between the two nearest values, as numpy's and scipy's ``linear``."""
    if not math.isfinite(p):
        return math.nan
    n = len(ascending)
    place = p * n + (1 - p)
    above, part = place // 1, place % 1
    low, high = (int(min(max(at, 0), n - 1)) for at in (above - 1, above))
    part = part if above >= 1 else 0
    return float((1 - part) * ascending[low] + part * ascending[high])
