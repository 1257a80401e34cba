"""What a comparison is computed from: mean log ratios of starts, and of the pairs in them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.experiment.arms import Arm
from workbench.experiment.metrics import METRICS, RunView
from workbench.experiment.runlog import Block
from workbench.judge import stats

Measured = Sequence[tuple[Block, float]]


@dataclass(frozen=True)
class Sample:
    """Logs of one comparison.

    method: "paired" where starts held both arms, else "starts".
    units: starts that held both, or starts of a and of b.
    logs: mean log ratio of each start that held both; or mean logs of a's starts, and of b's.
    pairs: log ratios of the pairs of each start that held both, in order; empty across starts.
    seconds: what one more start costs (a side, across starts).
    fault: key and reason why there is no result.
    """

    method: str
    units: tuple[int, ...]
    logs: tuple[list[float], ...]
    pairs: tuple[tuple[float, ...], ...]
    seconds: float
    fault: tuple[str, str] | None


def replicas_of(run: RunView, experiment: str, arm: str) -> tuple[str, ...]:
    """The arm's labels in an experiment: itself and its replicas, which are the same configuration
    run once more.
    """
    wanted = Arm.parse(arm).configuration
    return tuple(a for a in run.arms(experiment) if Arm.parse(a).configuration == wanted)


def blocks_of(run: RunView, experiment: str, arm: str, pooled: bool = True) -> list[Block]:
    """An arm's measured blocks; pooled: with those of its replicas, so that no claim hangs on which
    of them is named.
    """
    labels = replicas_of(run, experiment, arm) if pooled else (arm,)
    return [block for block in run.blocks(experiment) if block.arm in labels]


def sample(
    run: RunView, experiment: str, a: str, b: str, metric: str, pooled: bool = True
) -> Sample | None:
    """What an experiment has measured of two arms; None where one has no block with the metric."""
    blocks_a, blocks_b = (
        [
            (block, value)
            for block in blocks_of(run, experiment, arm, pooled)
            if (value := METRICS[metric]([block]))
        ]
        for arm in (a, b)
    )
    if not (blocks_a and blocks_b):
        return None
    both = {block.start for block, _ in blocks_a} & {block.start for block, _ in blocks_b}
    return within(run, blocks_a, blocks_b) if both else across(run, blocks_a, blocks_b)


def within(run: RunView, blocks_a: Measured, blocks_b: Measured) -> Sample:
    """The sample of starts that held both arms: a pair's log ratio is that of the means over an
    arm's replicas in it, a start's the mean over its pairs.
    """
    side_a, side_b = (_by_pair(blocks) for blocks in (blocks_a, blocks_b))
    both = [key for key in side_a if key in side_b]
    starts: dict[int, list[float]] = defaultdict(list)
    for key in sorted(both):
        starts[key[0]].append(_mean_log(side_a[key]) - _mean_log(side_b[key]))
    n, pairs, fault = len(starts), len(both), None
    asked = [
        {tuple(sorted(r.prompt for r in block.requests)) for block, _ in side_a[key] + side_b[key]}
        for key in both
    ]
    unequal = sum(len(prompts) > 1 for prompts in asked)
    a_first = sum(_place(side_a[key]) < _place(side_b[key]) for key in both)
    if n < stats.MIN_STARTS:
        fault = (
            "too_few_starts",
            f"{n} server start{'s' * (n != 1)} held both, and a claim needs {stats.MIN_STARTS}",
        )
    elif unequal:
        fault = (
            "unequal_prompts",
            f"in {unequal} of {pairs} pairs the blocks had different prompts",
        )
    elif a_first in (0, pairs):
        first = both and (side_a if a_first else side_b)[both[0]][0][0].arm
        fault = (
            "not_interleaved",
            f"{first} came first in every pair, so that drift and order are in the difference",
        )
    seconds = sum(
        block.seconds for key in both for block, _ in side_a[key] + side_b[key]
    ) + _start_seconds(run, starts)
    return Sample(
        "paired",
        (n,),
        ([float(np.mean(logs)) for logs in starts.values()],),
        tuple(map(tuple, starts.values())),
        seconds / max(n, 1),
        fault,
    )


def across(run: RunView, blocks_a: Measured, blocks_b: Measured) -> Sample:
    """The sample of arms that no start held together: the mean log of each start of either."""
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
        (
            sum(block.seconds for blocks in side.values() for block, _ in blocks)
            + _start_seconds(run, side)
        )
        / len(side)
        for side in (starts_a, starts_b)
    )
    logs = tuple([_mean_log(blocks) for blocks in side.values()] for side in (starts_a, starts_b))
    return Sample("starts", units, logs, (), seconds, fault)


def _by_pair(blocks: Measured) -> dict[tuple[int, int], list[tuple[Block, float]]]:
    found: dict[tuple[int, int], list[tuple[Block, float]]] = defaultdict(list)
    for block, value in blocks:
        if block.pair is not None:
            found[block.start, block.pair].append((block, value))
    return found


def _by_start(blocks: Measured) -> dict[int, list[tuple[Block, float]]]:
    found: dict[int, list[tuple[Block, float]]] = defaultdict(list)
    for block, value in blocks:
        found[block.start].append((block, value))
    return found


def _mean_log(blocks: Measured) -> float:
    return float(np.mean([math.log(value) for _, value in blocks]))


def _place(blocks: Measured) -> float:
    return float(np.mean([block.position for block, _ in blocks]))


def _start_seconds(run: RunView, starts: Mapping[int, object]) -> float:
    return sum(run.starts[start].seconds for start in starts if start in run.starts)
