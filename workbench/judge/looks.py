"""Looks at a result while its run goes on: what each costs, and when a run may stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

from workbench.judge import stats
from workbench.judge.stats import ALPHA, MIN_STARTS, Interval

WATCHED = 0.005  # of alpha, for all the looks of somebody who watches and may stop by hand


@dataclass(frozen=True)
class Checkpoints:
    """The numbers of server starts at which somebody may look at a run's result and end it for what
    he sees; fixed before the first block, the last ends it.

    Looking often and stopping when it pleases finds differences that are not there. So each look
    has its share of alpha, and the interval of a look has the level 1 - that share. These repeated
    intervals hold together whatever made the run stop (Jennison & Turnbull, J. R. Stat. Soc. B 51
    (1989) 305): here by the union bound, and so exactly for t with few starts, where the bounds of
    normal theory are only nearly right.

    early: what all looks before the last share equally: a run that is watched is rarely stopped, so
        that its end costs next to nothing and a stop by hand much (as Haybittle, Br. J. Radiol. 44
        (1971) 793). Without, shares are by the spending function of O'Brien-Fleming type of Lan &
        DeMets, Biometrika 70 (1983) 659: each side of alpha/2 has spent ``2 - 2 Phi(z / sqrt(t))``,
        z the quantile of alpha/4, at the fraction t of the starts. The price is a last interval
        some 10 % wider than without looks.
    Raises: ValueError for looks that do not ascend from MIN_STARTS.
    """

    looks: tuple[int, ...]
    alpha: float = ALPHA
    early: float | None = None

    def __post_init__(self) -> None:
        if (
            not self.looks
            or self.looks[0] < MIN_STARTS
            or any(a >= b for a, b in zip(self.looks, self.looks[1:]))
        ):
            raise ValueError(f"looks must ascend from {MIN_STARTS} starts or more: {self.looks}")

    @classmethod
    def after_each(cls, starts: int, early: float | None = None) -> Checkpoints:
        """A look after each start from MIN_STARTS on; one alone where fewer are planned."""
        return cls(tuple(range(MIN_STARTS, starts + 1)) or (MIN_STARTS,), early=early)

    def level(self, starts: int, share: int = 1) -> float:
        """The level of an interval after so many starts; ``share`` comparisons that answer one
        question share the alpha (Bonferroni).

        Where the run ended at a number that is no look (a budget, a crash: not for what the data
        said), all that earlier looks left over is spent.
        """
        starts = min(starts, self.looks[-1])
        before = max((self._spent(look) for look in self.looks if look < starts), default=0.0)
        here = self._spent(starts) if starts in self.looks else self.alpha
        return 1 - (here - before) / share

    def _spent(self, starts: int) -> float:
        if self.early is not None:
            place = self.looks.index(starts) + 1
            last = len(self.looks)
            return self.alpha if place == last else self.early * place / (last - 1)
        return float(
            4 * special.ndtr(special.ndtri(self.alpha / 4) / math.sqrt(starts / self.looks[-1]))
        )


@dataclass(frozen=True)
class Decision:
    """Whether a run may stop: why is resolution, decided, starts or seconds (None: go on); interval
    is that of the look, if any.
    """

    stop: bool
    why: str | None
    interval: Interval | None


def should_stop(
    checkpoints: Checkpoints,
    logs: Sequence[float],
    *,
    wished: float | None = None,
    seconds_left: float | None = None,
    share: int = 1,
) -> Decision:
    """Whether to stop after these starts; to be asked after every one, since it looks at the data
    at checkpoints alone.

    logs: the mean log ratio of each start.
    wished: stop when a ratio difference of this size can be resolved (0.02 is 2 %); without it,
        when the interval of a checkpoint excludes 1. In any case stop when the starts are spent, or
        when ``seconds_left`` is not enough for another one (the caller subtracts what one takes).
    """
    starts = len(logs)
    spent = (
        "starts"
        if starts >= checkpoints.looks[-1]
        else "seconds"
        if seconds_left is not None and seconds_left <= 0
        else None
    )
    if starts < MIN_STARTS or not (spent or starts in checkpoints.looks):
        return Decision(spent is not None, spent, None)
    level = checkpoints.level(starts, share)
    interval = stats.mean_ratio(logs, level)
    _, error, df = stats.mean_error(logs)
    reached = starts in checkpoints.looks and (
        interval.decided if wished is None else stats.resolution(error, df, level) <= wished
    )
    why = ("decided" if wished is None else "resolution") if reached else spent
    return Decision(why is not None, why, interval)
