"""``workbench bench arms``: the same comparison by hot arms and by restarts on this machine; which
one buys its precision cheaper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby

import numpy as np
from scipy import special

from workbench.experiment import metrics, runlog, schedule
from workbench.experiment.errors import WorkbenchError
from workbench.experiment.plans import WARMUP_REQUESTS, Task
from workbench.experiment.runlog import Block, Line, Start
from workbench.judge import stats
from workbench.run.lab import Run

HOT, RESTARTS = "bench_hot", "bench_restarts"
WAYS = {HOT: "hot arms", RESTARTS: "restarts"}


@dataclass(frozen=True)
class Point:
    """A comparison after so many seconds.

    units: starts that held both arms, or starts a side.
    ratio: its estimate; error: standard error of the log ratio; df: its degrees of freedom.
    """

    way: str
    seconds: float
    units: int
    ratio: float
    error: float
    df: float

    @property
    def cost(self) -> float:
        """Variance times time, which stays the same however long one measures: seconds that buy a
        standard error of 1 (100 %).
        """
        return self.error**2 * self.seconds


@dataclass(frozen=True)
class Gain:
    """How many times the variance x time of hot arms restarts have, with its interval."""

    ratio: float
    low: float
    high: float
    level: float


def tasks(lab: Run, a: str, b: str, pairs: int, starts: int) -> list[Task]:
    """Starts that hold both arms, with the pairs of blocks shared among them, then as many starts a
    side, each with the blocks of the profile.
    """
    plan, requests, prompts = (
        lab.profile.plan,
        lab.profile.workload.requests_per_block,
        len(lab.prompts),
    )
    ways = (
        (HOT, [(a, b)], math.ceil(pairs / starts)),
        (RESTARTS, [a, b], plan.blocks_per_start),
    )
    planned = [
        p
        for name, sides, each in ways
        for p in schedule.by_starts(
            name, sides, starts, each, prompts, requests, WARMUP_REQUESTS, plan.seed
        )
    ]
    return [
        Task(p, lab.profile.workload.concurrency, lab.profile.workload.max_new_tokens)
        for p in planned
    ]


def curve(records: Sequence[Line], experiment: str, a: str, b: str) -> list[Point]:
    """How the standard error of the ratio of a to b in tokens/s falls with the seconds spent,
    starts of servers and warming up included.

    A point after every start that held both arms (from the second), or after every round of starts
    in which both arms had one more (from the second).
    """
    blocks = [r for r in records if isinstance(r, Block) and r.experiment == experiment]
    starts = [r for r in records if isinstance(r, Start) and r.experiment == experiment]
    begun = min(_time(start.time) - start.seconds for start in starts) if starts else 0.0
    hot = any(len(start.arms) > 1 for start in starts)
    points, seen = [], []
    for _, group in groupby(blocks, key=lambda block: block.start):
        seen += group
        found = (_paired if hot else _by_starts)(
            [block for block in seen if block.role == "measure"], a, b
        )
        if found and (not points or found[0] > points[-1].units):
            units, mean, error, df = found
            points.append(
                Point(
                    WAYS[experiment],
                    _time(seen[-1].time) + seen[-1].seconds - begun,
                    units,
                    math.exp(mean),
                    float(error),
                    float(df),
                )
            )
    return points


def gain(hot: Point, restarts: Point, level: float = stats.LEVEL) -> Gain:
    """Variance x time of restarts over that of hot arms.

    Seconds are taken as they are; the ratio of two estimated variances of normal logs follows F
    with their degrees of freedom.
    Raises: WorkbenchError when either has no spread.
    """
    if not (hot.error > 0 and restarts.error > 0):
        raise WorkbenchError("a spread of nothing cannot be compared: run more pairs and starts.")
    ratio = restarts.cost / hot.cost

    def quantile(p: float) -> float:
        return float(special.fdtri(restarts.df, hot.df, p))

    return Gain(ratio, ratio / quantile((1 + level) / 2), ratio / quantile((1 - level) / 2), level)


def sentence(hot: Point, restarts: Point, found: Gain) -> str:
    def way(point: Point, units: str) -> str:
        return (
            f"{point.way} gave the ratio {point.ratio:.3f} with a standard error of"
            f" {100 * point.error:.2g} % in {point.seconds:.0f} s ({units})"
        )

    return (
        f"{way(hot, f'{hot.units} starts that held both')},"
        f" {way(restarts, f'{restarts.units} starts a side')}: restarts have {found.ratio:.3g}"
        f" times the variance x time ({found.level:.0%} interval {found.low:.3g} to"
        f" {found.high:.3g})."
    ).capitalize()


def arms(lab: Run, a: str = "own-1", b: str = "shared", pairs: int = 12, starts: int = 4) -> str:
    """Measure both ways what is not in the run's log yet; leaves bench.json in its folder and
    returns the sentence.

    Raises: as ``Run.measure``; WorkbenchError when a way has fewer than two units.
    """
    lab.measure(tasks(lab, a, b, pairs, starts))
    curves = [
        curve(runlog.read(lab.folder / "runs.jsonl"), experiment, a, b)
        for experiment in (HOT, RESTARTS)
    ]
    if not all(curves):
        raise WorkbenchError(
            "a standard error needs two starts that held both and two starts a side: ask for more."
        )
    hot, restarts = (points[-1] for points in curves)
    found = gain(hot, restarts)
    said = sentence(hot, restarts, found)
    content = {
        "a": a,
        "b": b,
        "sentence": said,
        "gain": asdict(found),
        "points": [asdict(point) for points in curves for point in points],
    }
    (lab.folder / "bench.json").write_text(json.dumps(content, indent=1))
    return said


Estimate = tuple[int, float, float, float]


def _paired(blocks: Sequence[Block], a: str, b: str) -> Estimate | None:
    sides = [{(x.start, x.pair): _log_speed([x]) for x in blocks if x.arm == arm} for arm in (a, b)]
    ratios: dict[int, list[float]] = {}
    for key in sides[0].keys() & sides[1].keys():
        ratios.setdefault(key[0], []).append(sides[0][key] - sides[1][key])
    means = [float(np.mean(of_start)) for _, of_start in sorted(ratios.items())]
    return (len(means), *stats.mean_error(means)) if len(means) > 1 else None


def _by_starts(blocks: Sequence[Block], a: str, b: str) -> Estimate | None:
    sides = [_starts([x for x in blocks if x.arm == arm]) for arm in (a, b)]
    return (
        (min(map(len, sides)), *stats.welch_error(*sides))
        if min(map(len, sides)) > 1 and len(sides[0]) == len(sides[1])
        else None
    )


def _starts(blocks: Sequence[Block]) -> list[float]:
    """The mean log speed of each start."""
    return [
        float(np.mean([_log_speed([x]) for x in blocks if x.start == start]))
        for start in dict.fromkeys(x.start for x in blocks)
    ]


def _log_speed(blocks: Sequence[Block]) -> float:
    return math.log(metrics.tokens_per_s(blocks))


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
