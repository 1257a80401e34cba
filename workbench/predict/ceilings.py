"""What speculation could gain at best, from four numbers: arithmetic that needs no measurement
inside the server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from workbench.experiment.errors import BadInput

# a draft forward of one layer in SGLang 0.5.23: 3 all-reduces and 1 all-gather
# (workbench/predict/cycle_time.py)
COUNTED_A_STEP = 4
REPORTED = "the numbers of the field report that started this (Kimi-K2.5, EAGLE-3, TP8 over PCIe)"


@dataclass(frozen=True)
class Numbers:
    """What somebody measured; the defaults are those of the field report that started this
    (Kimi-K2.5, EAGLE-3, TP8 over PCIe), one request at a time.

    baseline, speculative: tokens/s of one request without and with speculation.
    accept_length: tokens a cycle, bonus token included.
    steps: draft steps a cycle.
    collectives_a_step: collectives of the draft in each step, and collective_s: what one of them is
        thought to take (low, high), in seconds.
    draft_s: seconds a cycle that draft and draft-extend take, None where nobody measured it.
    source: where the numbers come from, in words.

    Raises: BadInput when a number is none, or when they cannot all be true.
    """

    baseline: float = 90.0
    speculative: float = 71.0
    accept_length: float = 2.1
    steps: int = 5
    collectives_a_step: float = 2
    collective_s: tuple[float, float] = (50e-6, 100e-6)
    draft_s: float | None = None
    source: str = REPORTED

    def __post_init__(self) -> None:
        positive = {
            "baseline": self.baseline,
            "speculative": self.speculative,
            "accept_length": self.accept_length,
            "steps": self.steps,
        }
        for field, value in positive.items():
            if not _is_number(value) or value <= 0:
                raise BadInput(field, f"is {value!r}, no number above 0", "give what was measured")
        if not 1 <= self.accept_length <= self.steps + 1:
            raise BadInput(
                "accept_length",
                f"is {self.accept_length:g}, but {self.steps} steps give 1 to {self.steps + 1}"
                " tokens a cycle",
                "count the bonus token once, and the steps of the same run",
            )
        if (
            not all(map(_is_number, (*self.collective_s, self.collectives_a_step)))
            or self.collectives_a_step < 0
            or not 0 <= self.collective_s[0] <= self.collective_s[1]
        ):
            raise BadInput(
                "collective_s",
                f"is {self.collective_s} for each of {self.collectives_a_step} collectives a step",
                "give two times in seconds, the lower one first, and how many there are",
            )
        if self.cycle_s < self.step_s:
            raise BadInput(
                "speculative",
                f"makes a cycle of {1e3 * self.cycle_s:.3g} ms, shorter than the plain step of "
                f"{1e3 * self.step_s:.3g} ms that it holds",
                "measure both with the same requests, one at a time",
            )
        if self.draft_s is not None and not (
            _is_number(self.draft_s) and 0 <= self.draft_s < self.cycle_s
        ):
            raise BadInput(
                "draft_s",
                f"is {self.draft_s} in a cycle of {self.cycle_s:.3g} s",
                "give the seconds of a cycle that drafting takes",
            )

    @property
    def step_s(self) -> float:
        """Seconds of a plain step: one token without speculation."""
        return 1 / self.baseline

    @property
    def cycle_s(self) -> float:
        """Seconds of a cycle, which gives accept_length tokens."""
        return self.accept_length / self.speculative

    @property
    def break_even(self) -> float:
        """The accept length at which this cycle is as fast as no speculation: the cycle in plain
        steps.
        """
        return self.cycle_s / self.step_s

    def collectives_s(self, a_step: float | None = None) -> tuple[float, float]:
        """Seconds a cycle in the draft's collectives (low, high), with so many a step (None: as the
        numbers say).

        No more than the cycle holds beside one plain step, which verify takes in any case.
        """
        count = self.steps * (self.collectives_a_step if a_step is None else a_step)
        low, high = (min(count * s, self.cycle_s - self.step_s) for s in self.collective_s)
        return low, high


@dataclass(frozen=True)
class Ceiling:
    """Throughput in tokens/s (low, high) if one part of the cycle cost nothing more; equal where it
    is known exactly.
    """

    name: str
    low: float
    high: float


def ceilings(numbers: Numbers) -> tuple[Ceiling, ...]:
    """What each part could give at best: accept_length / (cycle - the part), everything else
    unchanged.

    Draft and verify share the cycle in a way that four numbers do not tell. With draft_s both
    follow; without it each lies between today's throughput (the part costs nothing already) and
    that of a cycle of one plain step. A verify of several tokens reads at least what a plain step
    reads, so no cycle is shorter than that.
    """
    n = numbers

    def without(*saved: float) -> tuple[float, float]:
        rates = [n.accept_length / max(n.cycle_s - s, n.step_s) for s in saved]
        return min(rates), max(rates)

    spare = n.cycle_s - n.step_s
    draft = without(0, spare) if n.draft_s is None else without(n.draft_s)
    verify = without(0, spare) if n.draft_s is None else without(spare - min(n.draft_s, spare))
    return (
        Ceiling("the draft's collectives were free, as given", *without(*n.collectives_s())),
        Ceiling(
            "the draft's collectives were free, as counted",
            *without(*n.collectives_s(COUNTED_A_STEP)),
        ),
        Ceiling("the whole draft were free", *draft),
        Ceiling("verify cost one plain step", *verify),
        Ceiling("both: a cycle of one plain step", *without(spare)),
    )


def table(numbers: Numbers) -> pd.DataFrame:
    """One row a ceiling: its throughput, and whether it is above no speculation for certain,
    perhaps or not at all.
    """
    rows = [
        (
            c.name,
            c.low,
            c.high,
            "yes" if c.low > numbers.baseline else "perhaps" if c.high > numbers.baseline else "no",
        )
        for c in ceilings(numbers)
    ]
    return pd.DataFrame(
        rows,
        columns=[
            "if ...",
            "at least (tokens/s)",
            "at most (tokens/s)",
            "faster than no speculation",
        ],
    )


def sentence(numbers: Numbers) -> str:
    """The arithmetic in words, computed."""
    n, (given, counted, *_) = numbers, ceilings(numbers)
    wins, elsewhere = (
        n.accept_length > n.break_even,
        sorted(n.cycle_s - n.step_s - s for s in n.collectives_s()),
    )
    rates = (
        f"{_range(given.low, given.high)} tokens/s if there are {n.collectives_a_step:.3g} a step"
    )
    if n.collectives_a_step != COUNTED_A_STEP:
        rates += (
            f", {_range(counted.low, counted.high)} if there are the {COUNTED_A_STEP} counted in"
            " SGLang 0.5.23"
        )
    else:
        counted = given
    low, high = min(given.low, counted.low), max(given.high, counted.high)
    alone = "would be" if low > n.baseline else "could be" if high > n.baseline else "cannot be"
    return (
        f"By {n.source}, a plain step takes {_figure(1e3 * n.step_s)} ms and a cycle"
        f" {_figure(1e3 * n.cycle_s)} ms: {n.break_even:.2f} plain steps, so speculation breaks"
        f" even at an accept length of {n.break_even:.2f} and {'wins' if wins else 'does not win'}"
        f" at {n.accept_length:.3g}. Without any of the draft's collectives it would be {rates}; "
        + (
            f"it is {_figure(n.speculative)} now. "
            if wins
            else f"that alone {alone} faster than no speculation ({_figure(n.baseline)}). "
        )
        + f"Beside one plain step and these collectives {_range(*(1e3 * s for s in elsewhere))} ms"
        " of the cycle are spent elsewhere."
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _figure(value: float) -> str:
    """Three significant digits, from 50 up halves: more than the inputs bear would be false
    precision.
    """
    return f"{round(2 * value) / 2:g}" if value >= 50 else f"{value:.3g}"


def _range(low: float, high: float) -> str:
    first, second = _figure(low), _figure(high)
    return first if first == second else f"{first} to {second}"
