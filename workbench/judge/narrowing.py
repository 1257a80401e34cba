"""What can be seen of a run while it is measured: how far it is, and how the interval of its
question narrows. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

import pandas as pd

from workbench.experiment.arms import Arm
from workbench.experiment.metrics import IN_WORDS, RunView
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Line
from workbench.judge import comparisons, levels, stats


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


def narrowing(profile: Profile, records: Sequence[Line], live: bool = False) -> pd.DataFrame:
    """One row a server start of the watched comparison: its own ratio, and the ratio of all starts
    so far with its interval, of the metric that carries the claim ("of").

    The interval's level is that of a run that ended there: the plan's checkpoints pay for looks
    that may end it. live: the run goes on and somebody watches, so that its last start may not be
    whole and is left out, and each look is paid for.
    """
    columns = ["start", "ratio of the start", "ratio", "low", "high", "of"]
    asked = question(records)
    if asked is None:
        return pd.DataFrame(columns=columns)
    experiment, a, b = asked
    run = RunView(profile, records)
    by = comparisons.claimed_by(run, experiment, a, b)
    starts = comparisons.starts_so_far(run, experiment, a, b, by)
    serving = run.starts.get(run.blocks(experiment)[-1].start)
    whole = starts[:-1] if live and serving and {a, b} <= set(serving.arms) else starts
    logs = [mean(pairs) for pairs in whole]
    asked_in = {
        name: comparisons.against_references(comparisons.measured(run, name))
        for name in run.experiments
    }
    share = max(1, levels.shares(asked_in).get(levels.question(experiment, b), 1))
    level = levels.level_of(run, experiment, share, watching=live)
    rows = []
    for n in range(1, len(logs) + 1):
        known = n >= stats.MIN_STARTS
        so_far = stats.mean_ratio(logs[:n], level(n)) if known else None
        rows.append(
            (
                n,
                math.exp(logs[n - 1]),
                math.exp(mean(logs[:n])),
                so_far.low if so_far else math.nan,
                so_far.high if so_far else math.nan,
                IN_WORDS[by],
            )
        )
    return pd.DataFrame(rows, columns=columns)
