"""What can be seen of a run while it is measured: how far it is, and how the interval of its
question narrows. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from workbench.experiment.arms import Arm
from workbench.experiment.metrics import RunView
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Line
from workbench.judge import comparisons, stats


def question(records: Sequence[Line]) -> tuple[str, str, str] | None:
    """(experiment, a, b) of the comparison to watch: own-N against shared (else an arm against its
    control) in the experiment at work.
    """
    measured = [r for r in records if isinstance(r, Block) and r.role == "measure"]
    if not measured:
        return None
    experiment = measured[-1].experiment
    arms = list(dict.fromkeys(b.arm for b in measured if b.experiment == experiment))
    pairs = [
        (a, b)
        for a, b in comparisons.against_references(arms)
        if (Arm.parse(a).placement, Arm.parse(b).placement) == ("own", "shared")
    ]
    pairs = pairs or comparisons.replicas(arms)
    return (experiment, *pairs[0]) if pairs else None


def narrowing(profile: Profile, records: Sequence[Line]) -> pd.DataFrame:
    """One row a pair of blocks of the watched comparison: its own ratio, and the ratio of all pairs
    so far with its interval.

    The interval's level is that of a run that ended there: the plan's checkpoints pay for looks
    that may end it. Watching ends nothing.
    """
    columns = ["pair", "ratio of the pair", "ratio", "low", "high"]
    asked = question(records)
    if asked is None:
        return pd.DataFrame(columns=columns)
    experiment, a, b = asked
    run = RunView(profile, records)
    logs = comparisons.log_ratios(run, experiment, a, b)
    references = comparisons.against_references(run.arms(experiment))
    level = comparisons.level_of(
        run, experiment, max(1, sum(reference == b for _, reference in references))
    )
    rows = []
    for n in range(1, len(logs) + 1):
        mean, error, df = stats.paired_error(logs[:n]) if n > 1 else (logs[0], math.nan, 0)
        half = (
            float(stats.half_width(error, df, level("paired", n)))
            if n >= stats.MIN_PAIRS
            else math.nan
        )
        rows.append(
            (n, math.exp(logs[n - 1]), math.exp(mean), math.exp(mean - half), math.exp(mean + half))
        )
    return pd.DataFrame(rows, columns=columns)
