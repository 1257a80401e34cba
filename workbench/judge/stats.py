"""Ratios with intervals: pairs of blocks, server starts, what a run can resolve, what more would
cost, and when it may stop.
"""

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
MIN_PAIRS = 4  # two A B B A; Student's interval covers from here on (tests/unit/test_stats.py)
MIN_STARTS = 3  # a side; below that Welch's interval is wider than any effect looked for


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


@dataclass(frozen=True)
class PairedRatio:
    """Both intervals of one set of pairs. t is the headline; bca is stated beside it, since it
    covers too rarely below some 20 pairs.
    """

    t: Interval
    bca: Interval


def paired_error(log_ratios: ArrayLike) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean, its standard error and degrees of freedom, of log ratios (..., pairs); the unit is the
    pair of blocks.
    """
    x = np.asarray(log_ratios, dtype=float)
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


def paired_ratio(
    log_ratios: Sequence[float], level: float = LEVEL, resamples: int = 9999
) -> PairedRatio:
    """The geometric mean ratio of pairs of blocks, by Student's t and by the BCa bootstrap over
    pairs.

    BCa: Efron, J. Am. Stat. Assoc. 82 (1987) 171, by scipy.stats.bootstrap with a fixed seed.
    Which is the headline was decided by simulation (tests/unit/test_stats.py): nominal 95 % cover
    95 % by t at every number of pairs, 85 % by BCa at 6.

    Raises: ValueError for fewer than two pairs or a value that is not finite.
    """
    x = _finite(log_ratios)
    mean, error, df = paired_error(x)
    t = _interval(mean, half_width(error, df, level), level, "paired t", len(x))
    if np.ptp(x) == 0:  # nothing to resample
        return PairedRatio(
            t, Interval(t.ratio, t.ratio, t.ratio, level, "BCa bootstrap over pairs", len(x))
        )
    from scipy import stats  # half a second of a core, which only a judgement needs

    found = stats.bootstrap(
        (x,),
        np.mean,
        confidence_level=level,
        n_resamples=resamples,
        method="BCa",
        rng=np.random.default_rng(0),
    )
    low, high = map(math.exp, found.confidence_interval)
    return PairedRatio(t, Interval(t.ratio, low, high, level, "BCa bootstrap over pairs", len(x)))


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


def pairs_needed(sd: float, resolution: float, level: float = LEVEL, power: float = POWER) -> int:
    """Pairs of blocks in all that resolve a ratio difference of ``resolution``; sd: of one pair's
    log ratio.
    """
    return _fewest(lambda n: (sd / math.sqrt(n), n - 1), resolution, level, power, MIN_PAIRS)


def starts_needed(sd: float, resolution: float, level: float = LEVEL, power: float = POWER) -> int:
    """Server starts a side that resolve a ratio difference of ``resolution``; sd: of one start's
    mean log, equal on both sides.
    """
    return _fewest(
        lambda n: (sd * math.sqrt(2 / n), 2 * (n - 1)), resolution, level, power, MIN_STARTS
    )


@dataclass(frozen=True)
class Checkpoints:
    """The numbers of pairs at which a live run may look at its own result; fixed before the first
    block, the last ends it.

    Looking often and stopping when it pleases finds differences that are not there. So each look
    has its share of alpha, by the spending function of O'Brien-Fleming type of Lan & DeMets,
    Biometrika 70 (1983) 659: each side of alpha/2 has spent ``2 - 2 Phi(z / sqrt(t))``, z the
    quantile of alpha/4, at the fraction t of the pairs. The interval of a look has the level 1 -
    (what is spent there and was not before). These repeated intervals hold together whatever made
    the run stop (Jennison & Turnbull, J. R. Stat. Soc. B 51 (1989) 305): here by the union bound,
    and so exactly for t with few pairs, where the bounds of normal theory are only nearly right.
    The price is a last interval some 10 % wider than without looks.
    """

    looks: tuple[int, ...]
    alpha: float = ALPHA

    def __post_init__(self) -> None:
        if (
            not self.looks
            or self.looks[0] < MIN_PAIRS
            or any(a >= b for a, b in zip(self.looks, self.looks[1:]))
        ):
            raise ValueError(f"looks must ascend from {MIN_PAIRS} pairs or more, not {self.looks}")

    @classmethod
    def every(cls, pairs: int, step: int, alpha: float = ALPHA) -> Checkpoints:
        """Looks after every ``step`` pairs up to ``pairs``."""
        return cls(tuple(n for n in range(step, pairs, step) if n >= MIN_PAIRS) + (pairs,), alpha)

    def level(self, pairs: int, comparisons: int = 1) -> float:
        """The level of an interval after so many pairs; ``comparisons`` with one reference share
        the alpha (Bonferroni).

        Where the run ended at a number that is no look (a budget, a crash: not for what the data
        said), all that earlier looks left over is spent.
        """
        pairs = min(pairs, self.looks[-1])
        before = max((self._spent(look) for look in self.looks if look < pairs), default=0.0)
        here = self._spent(pairs) if pairs in self.looks else self.alpha
        return 1 - (here - before) / comparisons

    def _spent(self, pairs: int) -> float:
        return float(
            4 * special.ndtr(special.ndtri(self.alpha / 4) / math.sqrt(pairs / self.looks[-1]))
        )


@dataclass(frozen=True)
class Decision:
    """Whether a run may stop: why is resolution, decided, pairs or seconds (None: go on); interval
    is that of the look, if any.
    """

    stop: bool
    why: str | None
    interval: Interval | None


def should_stop(
    checkpoints: Checkpoints,
    log_ratios: Sequence[float],
    *,
    wished: float | None = None,
    seconds_left: float | None = None,
    comparisons: int = 1,
) -> Decision:
    """Whether to stop after these pairs; to be asked after every pair, since it looks at the data
    at checkpoints alone.

    wished: stop when a ratio difference of this size can be resolved (0.02 is 2 %); without it,
        when the interval of a checkpoint excludes 1. In any case stop when the pairs are spent, or
        when ``seconds_left`` is not enough for another pair (the caller subtracts what one takes).
    """
    pairs = len(log_ratios)
    spent = (
        "pairs"
        if pairs >= checkpoints.looks[-1]
        else "seconds"
        if seconds_left is not None and seconds_left <= 0
        else None
    )
    if pairs < MIN_PAIRS or not (spent or pairs in checkpoints.looks):
        return Decision(spent is not None, spent, None)
    level = checkpoints.level(pairs, comparisons)
    mean, error, df = paired_error(_finite(log_ratios))
    interval = _interval(mean, half_width(error, df, level), level, "paired t", pairs)
    reached = pairs in checkpoints.looks and (
        interval.decided if wished is None else resolution(error, df, level) <= wished
    )
    why = ("decided" if wished is None else "resolution") if reached else spent
    return Decision(why is not None, why, interval)


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
