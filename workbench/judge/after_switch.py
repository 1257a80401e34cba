"""Does the first block after a switch of arms differ from later ones? A hot server's pairs are
worth their name only if it does not.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from workbench.experiment.metrics import RunView, cycle_ms
from workbench.experiment.runlog import Block
from workbench.judge import stats
from workbench.judge.stats import Interval


def after_switch(run: RunView, experiment: str) -> Interval | None:
    """The cycle of a block that follows another arm's over that of a block that follows its own
    arm's, in the same start.

    The unit is an arm in one start that ran blocks of both kinds, by the mean log of each kind, so
    that arms and starts cancel. The interval is paired t over units; None where fewer than two can
    be compared.
    """
    kinds: dict[tuple[int, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    before: dict[int, Block] = {}
    for block in (r for r in run.records if isinstance(r, Block) and r.experiment == experiment):
        last, value = before.get(block.start), cycle_ms([block])
        before[block.start] = block
        if last is not None and block.role == "measure" and value:
            kinds[block.start, block.arm][last.arm == block.arm].append(math.log(value))
    ratios = [
        float(np.mean(first) - np.mean(later)) for first, later in kinds.values() if first and later
    ]
    return stats.mean_ratio(ratios, method="paired t") if len(ratios) > 1 else None


def note(run: RunView, experiment: str) -> str | None:
    """One sentence for an experiment whose servers switched between arms; None for one without."""
    if not any(
        len(start.arms) > 1 and start.experiment == experiment for start in run.starts.values()
    ):
        return None
    found = after_switch(run, experiment)
    if found is None:
        return (
            f"{experiment}: too few blocks followed one of their own arm to say whether the first"
            " one after a switch differs."
        )
    size = (
        f"ratio {found.ratio:.3f}, {100 * found.level:.3g} % interval {found.low:.3f} to"
        f" {found.high:.3f}, {found.n} arms and starts"
    )
    return f"{experiment}: the first block after a switch " + (
        f"has a {'longer' if found.ratio > 1 else 'shorter'} cycle than later ones ({size})."
        if found.decided
        else f"is not seen to differ from later ones in its cycle ({size})."
    )
