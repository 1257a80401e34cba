"""Ratios with intervals over server starts, what a run can resolve, and what more would cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

ALPHA, POWER = 0.05, 0.80
LEVEL = 1 - ALPHA
MIN_PAIRS = 4  # two A B B A; fewer say nothing even about the servers that they ran in
MIN_STARTS = 3  # that held both arms, or a side; with fewer the interval is wider than any effect


@dataclass(frozen=True)
class Interval:
    """A ratio (1 is no difference) with its confidence interval. level: e.g. 0.95; n: pairs, or
    server starts of both sides.
    """

    ratio: float
    low: float
    high: float
    level: float
    method: str
    n: int

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1 <= self.high


def mean_error(logs: ArrayLike) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean, its standard error and degrees of freedom, of log ratios (..., units).

    The unit of a claim is the server start, by the mean of its pairs' log ratios: pairs of one
    start share what that start got (placement, clocks, memory), so that the interval over pairs
    covers too rarely where starts differ (tests/unit/judge/test_coverage.py).
    """
    x = np.asarray(logs, dtype=float)
    n = x.shape[-1]
    return x.mean(-1), x.std(-1, ddof=1) / math.sqrt(n), n - 1


def welch_error(logs_a: ArrayLike, logs_b: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Difference of means a - b, its standard error and degrees of freedom, of logs (..., starts);
    the unit is the server start.

    Welch, Biometrika 34 (1947) 28: unequal variances, with Satterthwaite's degrees of freedom.
    """
    a, b = np.asarray(logs_a, dtype=float), np.asarray(logs_b, dtype=float)
    va, vb = a.var(-1, ddof=1) / a.shape[-1], b.var(-1, ddof=1) / b.shape[-1]
    pooled = va**2 / (a.shape[-1] - 1) + vb**2 / (b.shape[-1] - 1)
    df = np.divide(
        (va + vb) ** 2,
        pooled,
        out=np.full_like(pooled, a.shape[-1] + b.shape[-1] - 2.0),
        where=pooled > 0,
    )
    return a.mean(-1) - b.mean(-1), np.sqrt(va + vb), df


def half_width(error: ArrayLike, df: ArrayLike, level: float = LEVEL) -> np.ndarray:
    """Half of Student's interval on the log scale."""
    return np.asarray(special.stdtrit(df, (1 + level) / 2) * np.asarray(error))


def mean_ratio(
    logs: Sequence[float], level: float = LEVEL, method: str = "t over starts"
) -> Interval:
    """The geometric mean ratio of log ratios, one a unit, with Student's interval.

    method: what the units are, in words.
    Raises: ValueError for fewer than two units or a value that is not finite.
    """
    x = _finite(logs)
    mean, error, df = mean_error(x)
    return _interval(mean, half_width(error, df, level), level, method, len(x))


def welch_ratio(logs_a: Sequence[float], logs_b: Sequence[float], level: float = LEVEL) -> Interval:
    """The ratio a / b across server starts, from the mean log of each start; Welch's interval.

    Blocks of one start share what that start got (placement, clocks, memory), so they are averaged
    first and count once (Kalibera & Jones, ISMM 2013: repeat at the highest level that varies).
    With so few units a bootstrap covers too rarely.

    Raises: ValueError for fewer than two starts a side or a value that is not finite.
    """
    a, b = _finite(logs_a), _finite(logs_b)
    difference, error, df = welch_error(a, b)
    return _interval(
        difference, half_width(error, df, level), level, "Welch over starts", len(a) + len(b)
    )


def ratio_of_ratios(a: Interval, b: Interval) -> Interval:
    """The ratio of two independent ratios with its interval, at the lower of their levels, from
    theirs alone.

    Limits are recovered from the variances that each interval's own halves stand for (MOVER: Zou &
    Donner, Statist. Med. 27 (2008) 1693), on the log scale.
    """
    (x, x_low, x_high), (y, y_low, y_high) = (
        [math.log(value) for value in (i.ratio, i.low, i.high)] for i in (a, b)
    )
    return Interval(
        math.exp(x - y),
        math.exp(x - y - math.hypot(x - x_low, y_high - y)),
        math.exp(x - y + math.hypot(x_high - x, y - y_low)),
        min(a.level, b.level),
        "MOVER",
        a.n + b.n,
    )


def resolution(error: float, df: float, level: float = LEVEL, power: float = POWER) -> float:
    """The smallest ratio difference (0.02 is 2 %) that a run with this standard error of the log
    ratio finds with probability ``power``.

    The effect whose noncentral t exceeds the interval's bound that often (Cohen, Statistical Power
    Analysis, 2nd ed. 1988, ch. 2).
    """
    return math.expm1(_noncentrality(round(float(df), 6), level, power) * float(error))


def starts_needed(
    sd: float, resolution: float, level: float = LEVEL, power: float = POWER, *, sides: int = 2
) -> int:
    """Server starts that resolve a ratio difference of ``resolution``.

    sd: of one start's mean log ratio where it holds both arms (sides=1), of one start's mean log,
        equal on both sides, where each arm has starts of its own (sides=2: so many a side).
    """
    return _fewest(
        lambda n: (sd * math.sqrt(sides / n), sides * (n - 1)), resolution, level, power, MIN_STARTS
    )


@lru_cache(maxsize=4096)
def _noncentrality(df: float, level: float, power: float) -> float:
    from scipy import optimize, stats

    bound = special.stdtrit(df, (1 + level) / 2)
    guess = bound + special.stdtrit(
        df, power
    )  # the textbook sum of two quantiles, 25 % too small at worst
    return optimize.brentq(
        lambda shift: stats.nct.sf(bound, df, shift) - power, guess / 2, 2 * guess
    )


def _fewest(
    error_of: Callable[[int], tuple[float, float]],
    wished: float,
    level: float,
    power: float,
    least: int,
) -> int:
    if wished <= 0:
        raise ValueError("a resolution must be above 0")
    few, many = least - 1, least
    while resolution(*error_of(many), level, power) > wished:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (
            (few, middle)
            if resolution(*error_of(middle), level, power) <= wished
            else (middle, many)
        )
    return many


def _finite(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError("an interval needs two or more finite values")
    return x


def _interval(mean: float, half: float, level: float, method: str, n: int) -> Interval:
    return Interval(
        *(math.exp(float(value)) for value in (mean, mean - half, mean + half)), level, method, n
    )
