"""Which arms are compared and how: by server starts, whose unit is the start, with replicas pooled
into their arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.experiment.arms import Arm
from workbench.experiment.metrics import IN_WORDS, RunView
from workbench.judge import claim, clustering, samples, stats
from workbench.judge.clustering import Clustering
from workbench.judge.refusal import Refusal
from workbench.judge.samples import Sample
from workbench.judge.stats import Interval

CONTROL_LEVEL = 0.99  # at 95 % one sound run in twenty would be refused


@dataclass(frozen=True)
class Comparison:
    """Arm a over arm b by one metric (above 1: a has more tokens a second, or a longer cycle).

    method: "paired" where servers held both arms, else "starts".
    units: server starts that held both, or starts of a and of b.
    pairs: of blocks, in those starts; 0 across starts.
    interval: the headline, with the start as unit (t, or Welch across starts).
    beside: t over all pairs of blocks: what is said of these servers alone, and not of others.
    alike: how pairs of one start resemble each other.
    equal: why both accept lengths are equal (``claim``), so that the cycle carries the claim.
    sd: of the mean log ratio of one start, or of the mean log of one start of a side.
    resolution: the smallest ratio difference found with 80 % probability.
    wanted: starts in all (a side) that the wished-for resolution needs.
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
    pairs: int = 0
    interval: Interval | None = None
    beside: Interval | None = None
    alike: Clustering = Clustering()
    equal: str | None = None
    sd: float | None = None
    resolution: float | None = None
    wanted: int | None = None
    wanted_seconds: float | None = None
    reasons: tuple[Refusal, ...] = ()
    load: int | None = None

    @property
    def valid(self) -> bool:
        return self.interval is not None and not self.reasons

    @property
    def claims(self) -> bool:
        """Whether the claim of its arms rests on this metric (``claim.equal_lengths``)."""
        return self.metric == ("cycle_ms" if self.equal else "tokens_per_s")

    def refused(self, reasons: Sequence[Refusal]) -> Comparison:
        """The same comparison without a result, when there are reasons; else itself. What was seen
        of these servers stays where they are only too few.
        """
        every = self.reasons + tuple(reasons)
        few = all(reason.key == "too_few_starts" for reason in every)
        return (
            replace(
                self,
                interval=None,
                beside=self.beside if few else None,
                alike=Clustering(),
                sd=None,
                resolution=None,
                wanted=None,
                wanted_seconds=None,
                reasons=every,
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


def measured(run: RunView, experiment: str) -> list[str]:
    """The experiment's arms that are compared by speed: without those whose answers alone are."""
    return [
        arm
        for arm in run.arms(experiment)
        if run.blocks(experiment, arm) or not run.blocks(experiment, arm, "parity")
    ]


def compare(
    run: RunView,
    experiment: str,
    a: str,
    b: str,
    metric: str,
    level: Callable[[int], float],
    wished: float | None = None,
    pooled: bool = True,
) -> Comparison | None:
    """One comparison from the measured blocks, or why there is none; None where the metric is
    unknown for every block of an arm.

    Starts that held both arms are compared by the log ratios of their pairs; else those of a with
    those of b. level: by number of starts. pooled: with an arm's replicas, unless they are what is
    compared.
    """
    found = samples.sample(run, experiment, a, b, metric, pooled)
    equal = claim.equal_lengths(run, experiment, a, b) if pooled else None
    load = run.load(experiment)
    if found is None:  # for tokens/s: the arm failed, and its refusal says so
        return (
            Comparison(experiment, a, b, metric, "paired", level(0), (0,), load=load)
            if metric == "tokens_per_s"
            else None
        )
    pairs = [log for start in found.pairs for log in start]
    told = Comparison(
        experiment,
        a,
        b,
        metric,
        found.method,
        level(min(found.units)),
        found.units,
        len(pairs),
        beside=(
            stats.mean_ratio(pairs, stats.LEVEL, "t over pairs")
            if len(pairs) >= stats.MIN_PAIRS
            else None
        ),
        equal=equal,
        load=load,
    )
    if found.fault:
        key, why = found.fault
        return told.refused([Refusal(key, f"{a} against {b}: {why}.", experiment, (a, b))])
    return _with_interval(told, found, wished)


def _with_interval(told: Comparison, found: Sample, wished: float | None) -> Comparison:
    sides = len(found.logs)
    if sides == 1:
        interval = stats.mean_ratio(found.logs[0], told.level)
        _, error, df = stats.mean_error(found.logs[0])
    else:
        interval = stats.welch_ratio(*found.logs, told.level)
        _, error, df = stats.welch_error(*found.logs)
    sd = math.sqrt(np.mean([np.var(logs, ddof=1) for logs in found.logs]))
    wanted = stats.starts_needed(sd, wished, told.level, sides=sides) if wished else None
    return replace(
        told,
        interval=interval,
        alike=clustering.of(found.pairs),
        sd=sd,
        resolution=stats.resolution(error, df, told.level),
        wanted=wanted,
        wanted_seconds=max(0, wanted - min(found.units)) * found.seconds if wanted else None,
    )


def starts_so_far(
    run: RunView, experiment: str, a: str, b: str, metric: str
) -> tuple[tuple[float, ...], ...]:
    """The log ratios of the pairs of each start that held both arms so far, in order."""
    found = samples.sample(run, experiment, a, b, metric)
    return found.pairs if found else ()


def claimed_by(run: RunView, experiment: str, a: str, b: str) -> str:
    """The metric on which the claim of two arms rests so far."""
    return "cycle_ms" if claim.equal_lengths(run, experiment, a, b) else "tokens_per_s"


def outside(run: RunView, control: Comparison, controls: int = 1) -> Refusal | None:
    """The refusal of an experiment whose A/A comparison differs from 1 by more than its noise (at
    99 %, shared by the run's ``controls``, so that of a hundred sound runs one is refused, however
    many experiments and metrics it has).
    """
    level = 1 - (1 - CONTROL_LEVEL) / controls
    strict = compare(
        run, control.experiment, control.a, control.b, control.metric, lambda _: level, pooled=False
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
        f"{control.a} and {control.b} are the same configuration, yet their ratio of"
        f" {IN_WORDS[control.metric]} is {found.ratio:.3f} ({100 * found.level:.4g}% interval"
        f" {found.low:.3f} to {found.high:.3f}): something else than the arm moves the figures.",
        control.experiment,
    )
