"""The level of a comparison's interval: shared by what answers one question, and less what looks at
a run that went on have spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from workbench.experiment.arms import Arm
from workbench.experiment.metrics import RunView
from workbench.experiment.names import COLLECTIVES
from workbench.judge import stats
from workbench.judge.findings import PlannedLooks, Watched
from workbench.judge.looks import WATCHED, Checkpoints

CHECKPOINTS, WATCHED_BY = "checkpoints", "watched"  # names of findings


def by_hand(run: RunView, experiment: str) -> bool:
    """Whether whoever ran it stopped it while this experiment was measured."""
    return any(f.what == "stopped" and f.experiment == experiment for f in run.failures)


def watched(run: RunView, experiment: str) -> bool:
    """Whether somebody saw the experiment's interval while it was measured."""
    return run.finding(experiment, WATCHED_BY, Watched) is not None


def level_of(
    run: RunView, experiment: str, share: int = 1, watching: bool = False
) -> Callable[[int], float]:
    """The level of an interval by its number of starts: 95 %, shared by ``share`` comparisons
    (Bonferroni), and less what looks have spent.

    A live run puts its checkpoints into the log before its first block, as the finding
    "checkpoints" (``findings.PlannedLooks``): then nothing else ends it, and whoever watches sees
    the same intervals. A run that was watched without, or stopped by hand, is judged as if somebody
    had looked after each start (``looks.WATCHED``). watching: somebody looks right now.
    """
    planned = run.finding(experiment, CHECKPOINTS, PlannedLooks)
    if planned and len(planned.looks) > 1:
        checkpoints = Checkpoints(tuple(planned.looks))
    elif watching or by_hand(run, experiment) or watched(run, experiment):
        checkpoints = Checkpoints.after_each(run.profile.plan.starts, early=WATCHED)
    else:
        return lambda starts: 1 - stats.ALPHA / share
    return lambda starts: checkpoints.level(starts, share)


def question(experiment: str, b: str) -> tuple[bool, str]:
    """What a comparison answers, so that its experiments share one alpha: own-N and the number of
    steps against what SGLang runs (04 and 05 at every load), or speculation against none, or what
    agreement and timing cost; each of the settings of 06 apart.
    """
    arm = Arm.parse(b)
    about = "none" if not arm.speculates else "audit" if arm.audits else "shared"
    return experiment == COLLECTIVES, about


def shares(pairs: Mapping[str, Iterable[tuple[str, str]]]) -> dict[tuple[bool, str], int]:
    """{question: how many comparisons answer it} of {experiment: its (a, b)}."""
    found: dict[tuple[bool, str], int] = {}
    for experiment, compared in pairs.items():
        for _, b in compared:
            about = question(experiment, b)
            found[about] = found.get(about, 0) + 1
    return found
