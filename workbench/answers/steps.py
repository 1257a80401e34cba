"""05_steps: which number of draft steps is best, and at which loads, from a run's log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.experiment import halving, metrics, sweeps
from workbench.experiment.arms import Arm
from workbench.experiment.names import STEPS
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Line
from workbench.judge import accept, told
from workbench.judge.comparisons import Comparison
from workbench.judge.stats import Interval
from workbench.report import tables
from workbench.report.tables import SPEED
from workbench.run.lab import Run


def sweep_map(profile: Profile, records: Sequence[Line]) -> pd.DataFrame:
    """One row a candidate of 05's search: what it drafts, its speed beside the best one's, and how
    many pairs of blocks it was given.

    Speed is by all pairs, whose own ups and downs cancel (halving.effects); the best of many looks
    better than it is, so how much it gains is told by fresh blocks alone.
    """
    rows = []
    for served in sweeps.candidates(profile):
        blocks = [b for b in searched(records, STEPS) if b.arm in served.names]
        speeds = halving.effects(
            {name: _logs(blocks, name) for name in served.names if _logs(blocks, name)}
        )
        for place, names in served.arms.items():
            for name in names:
                spec, own = (
                    profile.speculation.of(Arm.parse(name)),
                    [b for b in blocks if b.arm == name],
                )
                shape = (
                    place
                    if spec.topk == 1
                    else f"{place}, tree of topk {spec.topk}, {spec.draft_tokens} tokens"
                )
                rows.append(
                    (
                        shape,
                        name,
                        spec.steps,
                        100 * math.exp(speeds[name]) if name in speeds else math.nan,
                        metrics.tokens_per_s(own) or math.nan,
                        len(own),
                    )
                )
    return pd.DataFrame(
        rows, columns=["shape", "arm", "steps", SPEED, "throughput (tokens/s)", "pairs of blocks"]
    )


@dataclass(frozen=True)
class Choice:
    """One number of draft steps of a chain: tokens and seconds of a cycle, and what they make."""

    steps: int
    accept_length: float
    cycle_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.accept_length / self.cycle_s


def best_choice(found: Sequence[Choice]) -> Choice:
    """The choice with the most tokens a second; of equals the one with fewer steps."""
    return max(found, key=lambda choice: (choice.tokens_per_s, -choice.steps))


def choice_table(found: Sequence[Choice]) -> pd.DataFrame:
    """One row a number of steps."""
    rows = [(c.steps, c.accept_length, 1e3 * c.cycle_s, c.tokens_per_s) for c in found]
    return pd.DataFrame(
        rows,
        columns=["steps", "accept length (tokens/cycle)", "cycle (ms)", "throughput (tokens/s)"],
    )


def by_load(comparisons: Sequence[Comparison]) -> dict[tuple[str, str], dict[int, Interval]]:
    """{(a, b): {requests at once: ratio of tokens/s}} of 05's comparisons that have a result."""
    found: dict[tuple[str, str], dict[int, Interval]] = {}
    for c in comparisons:
        if c.valid and c.metric == "tokens_per_s" and c.load is not None:
            found.setdefault((c.a, c.b), {})[c.load] = c.interval
    return found


def candidates(profile: Profile) -> pd.DataFrame:
    """One row a placement and tree or chain of 05's search: the step counts that are tried. Each
    server's candidates are searched by itself.
    """
    rows = [
        (
            served.topk,
            place,
            ", ".join(str(profile.speculation.of(Arm.parse(name)).steps) for name in names),
            len(names),
        )
        for served in sweeps.candidates(profile)
        for place, names in served.arms.items()
    ]
    return pd.DataFrame(rows, columns=["topk", "placement", "steps tried", "candidates"])


def loads_sentence(profile: Profile, longest: int = 0) -> str:
    """At which loads the best settings are compared, and why not at others."""
    loads, skipped = sweeps.loads(profile, longest)
    return (
        f"Compared at {', '.join(map(str, loads)) or 'no number of'} requests at once."
        + "".join(f" Not at {load}: {why}." for load, why in skipped.items())
    )


def implied(profile: Profile, records: Sequence[Line]) -> tuple[Choice, ...]:
    """What every number of steps would give by the acceptance at each position of the longest
    chain, and the cycles measured in the search.

    A chain of n steps accepts what the longest one accepts at its first n positions, so accept
    lengths are taken from one arm with the most rounds behind each position; cycles of step counts
    that were not measured lie straight between two that were. Empty without a chain.
    """
    chains = next(
        (served for served in reversed(sweeps.candidates(profile)) if served.topk == 1), None
    )
    if chains is None:
        return ()
    names = next(iter(chains.arms.values()))
    blocks = searched(records, STEPS)
    cycles = {
        profile.speculation.of(Arm.parse(name)).steps: ms / 1e3
        for name in names
        if (ms := metrics.cycle_ms([b for b in blocks if b.arm == name]))
    }
    longest = max(
        (name for name in names), key=lambda name: profile.speculation.of(Arm.parse(name)).steps
    )
    counted = accept.measure(r for b in blocks if b.arm == longest for r in b.requests)
    if len(cycles) < 2 or counted is None or counted.positions is None:
        return ()
    shares, known = [position.value for position in counted.positions], sorted(cycles)
    return tuple(
        Choice(n, 1 + sum(shares[:n]), float(np.interp(n, known, [cycles[k] for k in known])))
        for n in range(known[0], min(known[-1], len(shares)) + 1)
    )


def steps_answer(lab: Run) -> str:
    """05's answer: the best setting with its interval, what acceptance implies, and where
    speculation or a placement stops paying.
    """
    profile, records, found = lab.profile, lab.records, lab.verdict.comparisons
    loads = sweeps.loads(profile, lab.longest_prompt)[0]
    load = min(
        loads,
        key=lambda n: abs(n - profile.workload.concurrency),
        default=profile.workload.concurrency,
    )
    reference = next(
        (
            arm.name
            for arm in profile.arms
            if arm.speculates and arm == Arm(arm.placement, arm.group)
        ),
        "shared",
    )
    said = [
        best_of(
            [c for c in found if c.load == load and c.b == reference],
            profile,
            f"The best at {load} at once is",
            f"At {load} at once no setting",
            f"the profile's own, {reference}",
        )
    ]
    if choices := implied(profile, records):
        best = best_choice(choices)
        said.append(
            "The acceptance at each position and the measured cycles put the best chain at"
            f" {best.steps} step{'s' * (best.steps != 1)} (accept length {best.accept_length:.3g})."
        )
    loaded = by_load(found)
    said += [
        crossover_sentence(a, b, ratios)
        for (a, b), ratios in loaded.items()
        if len(ratios) > 1 and b in ("none", reference)
    ]
    return " ".join([*said, *caveat(profile)])


@dataclass(frozen=True)
class Crossover:
    """Of the ratio a / b over loads. faster, slower, undecided: the loads where the interval is
    above 1, below 1, or holds it.

    at: where the ratio's line crosses 1, straight between two loads on the scale of their
        logarithms; every crossing, of which a line through noise may have several. The intervals
        say which are sure: a crossing is where ``faster`` and ``slower`` are on both sides.
    """

    faster: tuple[int, ...]
    slower: tuple[int, ...]
    undecided: tuple[int, ...]
    at: tuple[float, ...]

    @property
    def sure(self) -> bool:
        """Whether it is faster at some load and slower at another."""
        return bool(self.faster and self.slower)


def crossover(ratios: Mapping[int, Interval]) -> Crossover:
    """ratios: {requests at once: ratio with its interval}."""
    loads = sorted(ratios)
    crossings = []
    for low, high in zip(loads, loads[1:]):
        a, b = math.log(ratios[low].ratio), math.log(ratios[high].ratio)
        if a * b < 0 or b == 0 != a:
            crossings.append(low * (high / low) ** (a / (a - b)))
    decided = {load: ratios[load].decided for load in loads}
    return Crossover(
        tuple(n for n in loads if decided[n] and ratios[n].ratio > 1),
        tuple(n for n in loads if decided[n] and ratios[n].ratio < 1),
        tuple(n for n in loads if not decided[n]),
        tuple(crossings),
    )


def crossover_sentence(a: str, b: str, ratios: Mapping[int, Interval]) -> str:
    """The crossover in words; "" where nothing was compared."""
    if not ratios:
        return ""
    found = crossover(ratios)
    parts = [
        f"{word} at {_loads(loads)}"
        for word, loads in (
            ("faster", found.faster),
            ("slower", found.slower),
            ("not told apart", found.undecided),
        )
        if loads
    ]
    where = (
        f"; its ratio crosses 1 near {', '.join(f'{n:.2g}' for n in found.at)} at once"
        if found.sure and found.at
        else ""
    )
    return f"{a} against {b}: {', '.join(parts)}{where}."


def _loads(loads: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, loads))} request{'s' if loads != (1,) else ''} at once"


def best_of(rows: Sequence[Comparison], profile: Profile, won: str, lost: str, beside: str) -> str:
    """The fastest of several comparisons with one reference, in words; their intervals hold
    together, so that the choice costs nothing.
    """
    rows = [c for c in rows if c.metric == "tokens_per_s"]
    valid = [c for c in rows if c.valid]
    if not valid:
        why = next(
            (r.sentence.rstrip(".") for c in rows for r in c.reasons), "nothing was compared"
        )
        return f"No answer: {why}."
    c = max(valid, key=lambda c: c.interval.ratio)
    i, drafts = c.interval, tables.drafting(Arm.parse(c.a), profile.model_dump(mode="json"))
    what = f"{c.a} ({drafts})" if Arm.parse(c.a).comm is None else c.a
    size = (
        f"ratio {i.ratio:.3f} of tokens/s, {100 * i.level:.3g} % interval {i.low:.3f} to"
        f" {i.high:.3f}, {told.units(c)}"
    )
    if not i.decided:
        return f"{lost} could be told apart from {beside}; the best is {what} ({size})."
    return (
        f"{won} {what}, {100 * (i.ratio - 1):.2g} % faster than {beside} ({size})."
        if i.ratio > 1
        else f"{lost} beats {beside}; the best other is {what} ({size})."
    )


def caveat(profile: Profile) -> list[str]:
    return ["On the CPU engine this says nothing about GPUs."] if profile.engine == "cpu" else []


def searched(records: Sequence[Line], experiment: str) -> list[Block]:
    return [
        r
        for r in records
        if isinstance(r, Block) and (r.experiment, r.role) == (experiment, "search")
    ]


def _logs(blocks: Sequence[Block], arm: str) -> Mapping[tuple, float]:
    return {
        (b.start, b.pair): math.log(speed)
        for b in blocks
        if b.arm == arm and (speed := metrics.tokens_per_s([b]))
    }
