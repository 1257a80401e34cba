"""Verify width: which number of draft steps is best for a given acceptance at each position and
what a verify of each width takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.experiment.errors import BadInput


@dataclass(frozen=True)
class Choice:
    """One number of draft steps (a chain; 0 is no speculation): tokens and seconds of a cycle, and
    what they make.
    """

    steps: int
    accept_length: float
    cycle_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.accept_length / self.cycle_s


def choices(
    acceptance: Sequence[float],
    verify_s: Mapping[int, float],
    draft_step_s: float,
    *,
    fixed_s: float = 0.0,
    plain_s: float | None = None,
) -> tuple[Choice, ...]:
    """What every number of steps from 0 on gives, as far as acceptance and widths are known.

    acceptance: at position k the share of cycles with at least k correct drafts
        (workbench.judge.accept, positions), so that n steps have an accept length of 1 + the first
        n of them.
    verify_s: {tokens verified: seconds}; n steps verify n + 1, and widths between two measured ones
        are taken linearly.
    draft_step_s: of one draft forward; n steps are n of them, the last one in draft-extend.
    fixed_s: of a cycle whatever the steps (the host).
    plain_s: a step without speculation (default: a verify of 1 and fixed_s).
    Raises: BadInput for acceptance outside 0 to 1, times that are none, or widths that do not begin
        at 1.
    """
    if any(not 0 <= share <= 1 for share in acceptance):
        raise BadInput(
            "acceptance",
            f"is {list(acceptance)}",
            "give the share of cycles that accept each position, 0 to 1",
        )
    widths = sorted(verify_s)
    if not widths or widths[0] != 1:
        raise BadInput("verify_s", f"holds the widths {widths}", "begin with a verify of 1 token")
    times = [*verify_s.values(), draft_step_s, fixed_s, *([] if plain_s is None else [plain_s])]
    if (
        any(not math.isfinite(seconds) or seconds < 0 for seconds in times)
        or min(verify_s.values()) == 0
        or plain_s == 0
    ):
        raise BadInput(
            "verify_s", "or another time is no number of seconds", "give what was measured"
        )
    found = [Choice(0, 1.0, verify_s[1] + fixed_s if plain_s is None else plain_s)]
    for steps in range(1, min(len(acceptance), widths[-1] - 1) + 1):
        verify = float(np.interp(steps + 1, widths, [verify_s[w] for w in widths]))
        found.append(
            Choice(steps, 1 + sum(acceptance[:steps]), verify + steps * draft_step_s + fixed_s)
        )
    return tuple(found)


def best(found: Sequence[Choice]) -> Choice:
    """The choice with the most tokens a second; of equals the one with fewer steps."""
    return max(found, key=lambda choice: (choice.tokens_per_s, -choice.steps))


def table(found: Sequence[Choice]) -> pd.DataFrame:
    """One row a number of steps."""
    rows = [(c.steps, c.accept_length, 1e3 * c.cycle_s, c.tokens_per_s) for c in found]
    return pd.DataFrame(
        rows,
        columns=["steps", "accept length (tokens/cycle)", "cycle (ms)", "throughput (tokens/s)"],
    )


def sentence(found: Sequence[Choice]) -> str:
    """The best number of steps in words, and what it gains over no speculation; of nothing, that it
    cannot be judged.
    """
    if len(found) < 2:
        return "No number of steps can be judged: acceptance or the time of a verify is not known."
    chosen, plain = best(found), found[0]
    if not chosen.steps:
        return (
            f"No speculation is best: {plain.tokens_per_s:.3g} tokens/s, and no number of steps up"
            f" to {found[-1].steps} makes more."
        )
    more = " (the most that is known, so more may be better)" if chosen is found[-1] else ""
    return (
        f"{chosen.steps} step{'s' if chosen.steps > 1 else ''} would be best{more}:"
        f" {chosen.tokens_per_s:.3g} tokens/s at an accept length of {chosen.accept_length:.3g},"
        f" {chosen.tokens_per_s / plain.tokens_per_s:.3g} times no speculation."
    )
