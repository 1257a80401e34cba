"""Which arms are compared and how: paired within one server where it held both, else with the
server start as the unit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.experiment.arms import Arm
from workbench.experiment.metrics import METRICS, RunView
from workbench.experiment.runlog import Block
from workbench.judge import stats
from workbench.judge.findings import PlannedLooks
from workbench.judge.refusal import Refusal
from workbench.judge.stats import Interval

CONTROL_LEVEL = 0.99  # at 95 % one sound run in twenty would be refused


@dataclass(frozen=True)
class Comparison:
    """Arm a over arm b by one metric (above 1: a has more tokens a second, or a longer cycle).

    method: "paired" or "starts".
    units: pairs of blocks, or server starts of a and of b.
    interval: the headline (paired t, or Welch).
    beside: the BCa bootstrap of pairs.
    sd: of the log ratio of one pair, or of the mean log of one start.
    resolution: the smallest ratio difference found with 80 % probability.
    wanted: units in all (a side) that the wished-for resolution needs.
    wanted_seconds: what the further ones cost, at the pace of this run. Where there are reasons
        there is no interval.
    load: the requests at once at which 05_steps compares; None for other comparisons.
    """

    experiment: str
    a: str
    b: str
    metric: str
    method: str
    level: float
    units: tuple[int, ...]
    interval: Interval | None = None
    beside: Interval | None = None
    sd: float | None = None
    resolution: float | None = None
    wanted: int | None = None
    wanted_seconds: float | None = None
    reasons: tuple[Refusal, ...] = ()
    load: int | None = None

    @property
    def valid(self) -> bool:
        return self.interval is not None and not self.reasons

    def refused(self, reasons: Sequence[Refusal]) -> Comparison:
        """The same comparison without a result, when there are reasons; else itself."""
        return (
            Comparison(
                self.experiment,
                self.a,
                self.b,
                self.metric,
                self.method,
                self.level,
                self.units,
                reasons=self.reasons + tuple(reasons),
                load=self.load,
            )
            if reasons
            else self
        )


def against_references(arms: Sequence[str]) -> list[tuple[str, str]]:
    """(a, b) for every arm a against each reference b: none, then shared (else the first arm).
    Replicas are for controls.

    An arm without agreement or timing is the reference of the same arm with it: that is what these
    cost. Under a setting of the communication layer, none and shared are references of the arms
    under the same one.
    """
    first: dict[Arm, str] = {}
    for name in arms:
        if (arm := Arm.parse(name)) == arm.configuration:
            first.setdefault(arm, name)
    names = list(first.values())
    references = [name for name in ("none", "shared") if name in names]
    if not set(references) - {"none"} and (others := [n for n in names if n != "none"]):
        references.append(others[0])
    pairs = [
        (a, b) for i, b in enumerate(references) for a in names if a not in references[: i + 1]
    ]
    spared = [
        (first.get(replace(arm, agreement=None, timing=None)), name)
        for arm, name in first.items()
        if arm.audits
    ]
    alike = [
        (a, b)
        for place in ("none", "shared")
        for arm, a in first.items()
        if arm.comm
        and (b := first.get(Arm(place, comm=arm.comm)))
        and (place, arm.placement) not in (("none", "none"), ("shared", "none"))
        and a != b
    ]
    return pairs + [(a, b) for a, b in [*spared, *alike] if a and (a, b) not in pairs]


def replicas(arms: Sequence[str]) -> list[tuple[str, str]]:
    """(a, b) for every replica a and the arm b that it repeats."""
    return [
        (name, base)
        for name in arms
        if (arm := Arm.parse(name)).replica and (base := arm.configuration.name) in arms
    ]


def level_of(run: RunView, experiment: str, comparisons: int) -> Callable[[str, int], float]:
    """The level of an interval by method and units: 95 %, shared by the comparisons with one
    reference (Bonferroni), and less what earlier looks of a live run have spent.

    A live run puts its checkpoints into the log before its first block, as the finding
    "checkpoints" (``findings.PlannedLooks``).
    """
    planned = run.finding(experiment, "checkpoints", PlannedLooks)
    checkpoints = stats.Checkpoints(tuple(planned.looks)) if planned else None
    return lambda method, n: (
        checkpoints.level(n, comparisons)
        if checkpoints and method == "paired"
        else 1 - stats.ALPHA / comparisons
    )


def compare(
    run: RunView,
    experiment: str,
    a: str,
    b: str,
    metric: str,
    level: Callable[[str, int], float],
    wished: float | None = None,
) -> Comparison | None:
    """One comparison from the measured blocks, or why there is none; None where the metric is
    unknown for every block of an arm.

    Blocks of server starts that held both arms are paired; else the start is the unit.
    """
    blocks_a, blocks_b = (
        [
            (block, value)
            for block in run.blocks(experiment, arm)
            if (value := METRICS[metric]([block]))
        ]
        for arm in (a, b)
    )
    if not (blocks_a and blocks_b):  # for tokens/s: the arm failed, and its refusal says so
        return (
            Comparison(experiment, a, b, metric, "paired", level("paired", 0), (0,))
            if metric == "tokens_per_s"
            else None
        )
    paired = bool({block.start for block, _ in blocks_a} & {block.start for block, _ in blocks_b})
    sample = _pairs(blocks_a, blocks_b) if paired else _starts(run, blocks_a, blocks_b)
    method = "paired" if paired else "starts"
    found = Comparison(
        experiment,
        a,
        b,
        metric,
        method,
        level(method, min(sample.units)),
        sample.units,
        load=run.load(experiment),
    )
    if sample.fault:
        key, why = sample.fault
        return found.refused([Refusal(key, f"{a} against {b}: {why}.", experiment, (a, b))])
    beside = None
    if paired:
        both = stats.paired_ratio(sample.logs[0], found.level)
        interval, beside, (_, error, df), needed = (
            both.t,
            both.bca,
            stats.paired_error(sample.logs[0]),
            stats.pairs_needed,
        )
    else:
        interval = stats.welch_ratio(*sample.logs, found.level)
        (_, error, df), needed = stats.welch_error(*sample.logs), stats.starts_needed
    sd = math.sqrt(np.mean([np.var(logs, ddof=1) for logs in sample.logs]))
    wanted = needed(sd, wished, found.level) if wished else None
    return replace(
        found,
        interval=interval,
        beside=beside,
        sd=sd,
        resolution=stats.resolution(error, df, found.level),
        wanted=wanted,
        wanted_seconds=max(0, wanted - min(sample.units)) * sample.seconds if wanted else None,
    )


def log_ratios(
    run: RunView, experiment: str, a: str, b: str, metric: str = "tokens_per_s"
) -> list[float]:
    """The log ratio of each pair of blocks that servers holding both arms have measured so far, in
    order.
    """
    measured = (
        [
            (block, value)
            for block in run.blocks(experiment, arm)
            if (value := METRICS[metric]([block]))
        ]
        for arm in (a, b)
    )
    return _pairs(*measured).logs[0]


def outside(run: RunView, control: Comparison, controls: int = 1) -> Refusal | None:
    """The refusal of an experiment whose A/A comparison differs from 1 by more than its noise (at
    99 %, shared by the run's ``controls``, so
    that of a hundred sound runs one is refused, however many experiments it has)."""
    level = 1 - (1 - CONTROL_LEVEL) / controls
    strict = compare(
        run, control.experiment, control.a, control.b, control.metric, lambda *_: level
    )
    if (
        not control.valid
        or strict is None
        or strict.interval is None
        or not strict.interval.decided
    ):
        return None
    found = strict.interval
    return Refusal(
        "control",
        f"{control.a} and {control.b} are the same configuration, yet their ratio is"
        f" {found.ratio:.3f} ({100 * found.level:.4g}% interval {found.low:.3f} to"
        f" {found.high:.3f}): something else than the arm moves the figures.",
        control.experiment,
    )


@dataclass(frozen=True)
class _Sample:
    """Logs of one comparison: log ratios of pairs, or mean logs of the starts of a and of b.
    seconds: what one more unit costs.
    """

    units: tuple[int, ...]
    logs: tuple[list[float], ...]
    seconds: float
    fault: tuple[str, str] | None


Measured = Sequence[tuple[Block, float]]


def _pairs(blocks_a: Measured, blocks_b: Measured) -> _Sample:
    side_a, side_b = (
        {
            (block.start, block.pair): (block, value)
            for block, value in blocks
            if block.pair is not None
        }
        for blocks in (blocks_a, blocks_b)
    )
    both = [(*side_a[key], *side_b[key]) for key in side_a if key in side_b]
    n, fault = len(both), None
    unequal = sum(
        sorted(r.prompt for r in x.requests) != sorted(r.prompt for r in y.requests)
        for x, _, y, _ in both
    )
    a_first = sum(x.position < y.position for x, _, y, _ in both)
    if n < stats.MIN_PAIRS:
        fault = (
            "too_few_pairs",
            f"{n} pairs of blocks, and the paired interval needs {stats.MIN_PAIRS}",
        )
    elif unequal:
        fault = "unequal_prompts", f"in {unequal} of {n} pairs the blocks had different prompts"
    elif a_first in (0, n):
        first = both[0][0 if a_first else 2].arm
        fault = (
            "not_interleaved",
            f"{first} came first in every pair, so that drift and order are in the difference",
        )
    seconds = sum(x.seconds + y.seconds for x, _, y, _ in both) / max(n, 1)
    return _Sample(
        (n,), ([math.log(value_a / value_b) for _, value_a, _, value_b in both],), seconds, fault
    )


def _starts(run: RunView, blocks_a: Measured, blocks_b: Measured) -> _Sample:
    starts_a, starts_b = _by_start(blocks_a), _by_start(blocks_b)
    units, fault = (len(starts_a), len(starts_b)), None
    if min(units) < stats.MIN_STARTS:
        why = f"a comparison across servers needs {stats.MIN_STARTS} a side"
        fault = "too_few_starts", f"{units[0]} and {units[1]} server starts, and {why}"
    elif max(starts_a) < min(starts_b) or max(starts_b) < min(starts_a):
        fault = (
            "not_interleaved",
            "all starts of one came before all of the other, so that drift is in the difference",
        )
    seconds = sum(
        sum(block.seconds for blocks in side.values() for block, _ in blocks) / len(side)
        + sum(run.starts[start].seconds for start in side if start in run.starts) / len(side)
        for side in (starts_a, starts_b)
    )
    logs = tuple(
        [float(np.mean([math.log(value) for _, value in blocks])) for blocks in side.values()]
        for side in (starts_a, starts_b)
    )
    return _Sample(units, logs, seconds, fault)


def _by_start(blocks: Measured) -> dict[int, list[tuple[Block, float]]]:
    found: dict[int, list[tuple[Block, float]]] = defaultdict(list)
    for block, value in blocks:
        found[block.start].append((block, value))
    return found
