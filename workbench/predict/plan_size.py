"""Whether a plan is large enough for a claim, and balanced: known before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.experiment import plans
from workbench.experiment.checks import Check, passed, warned
from workbench.experiment.profile import Profile
from workbench.judge.notes import ENOUGH
from workbench.judge.stats import MIN_STARTS


def check(profile: Profile) -> Iterator[Check]:
    """Starts are the units of every interval; pairs are balanced when each arm follows each arm
    equally often.
    """
    starts = profile.plan.starts
    if starts < MIN_STARTS:
        yield warned(
            "plan.starts",
            f"{starts} give no claim, which needs {MIN_STARTS}",
            f"plan {ENOUGH} or more",
        )
    elif starts < ENOUGH:
        yield warned(
            "plan.starts",
            f"{starts} give wide intervals, since the start is the unit",
            f"plan {ENOUGH} or more, with fewer pairs in each",
        )
    else:
        yield passed("plan.starts", f"{starts} server starts are the units of the intervals")
    pairs, even = plans.balanced_pairs(profile)
    if pairs == even:
        yield passed("plan.pairs", f"{pairs} pairs, after which every arm followed every arm alike")
    else:
        yield warned(
            "plan.pairs",
            f"{pairs} pairs leave some arms following others more often than the rest",
            f"plan {even} for an even carry-over, e.g. {_shared(profile, even)}",
        )


def _shared(profile: Profile, pairs: int) -> str:
    """How to share so many pairs among starts, none fewer than planned."""
    starts = next(n for n in range(min(profile.plan.starts, pairs), pairs + 1) if pairs % n == 0)
    return f"-p starts={starts} -p pairs={pairs}"
