"""Whether a run may stop before its plan is spent: asked between rounds of server starts, at
checkpoints fixed before the first block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import mean

from workbench.experiment import findings
from workbench.experiment.arms import Arm
from workbench.experiment.metrics import RunView
from workbench.experiment.plans import Task
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Finding, Line, Start
from workbench.judge import comparisons, stats
from workbench.judge.findings import Stopped
from workbench.judge.looks import Checkpoints, should_stop

STOPPED = "stopped"


@dataclass(frozen=True)
class Rule:
    """When one experiment of a profile may end. a, b: the arms of its question; rounds: the start
    groups of each round, in order of time.

    A round is one server start a side. A run that stops after too few of them has nothing to say
    across servers, so it does not.
    """

    profile: Profile
    experiment: str
    a: str
    b: str
    rounds: tuple[frozenset[int], ...]

    @property
    def checkpoints(self) -> Checkpoints | None:
        """With ``plan.stop`` a look after every round from the third on; None where only the budget
        ends the run early, which looks at no data.
        """
        return Checkpoints.after_each(len(self.rounds)) if self.profile.plan.stop else None

    def ends(self, records: Sequence[Line], task: Task) -> str | None:
        """Why nothing more is to be measured when this block is next (decided, resolution or
        seconds); None: go on.
        """
        if task.planned.role == "parity":  # answers are compared whatever the speed
            return None
        stopped = [
            findings.read(r, Stopped)
            for r in records
            if isinstance(r, Finding) and (r.experiment, r.name) == (self.experiment, STOPPED)
        ]
        if stopped:
            return stopped[0].why
        number = next(
            place for place, groups in enumerate(self.rounds) if task.planned.start_group in groups
        )
        begun = any(
            isinstance(r, Block) and r.experiment == self.experiment and r.role != "parity"
            for r in records
        )
        first = task.planned.role == "warmup" and task.planned.start_group == min(
            self.rounds[number]
        )
        if number < stats.MIN_STARTS or not (begun and first):
            return None
        budget, spent = (
            self.profile.plan.budget_s,
            seconds(records, (self.experiment,), self.profile.server.at_once),
        )
        left = None if budget is None else budget - spent - spent / number
        if self.checkpoints is None:
            return "seconds" if left is not None and left <= 0 else None
        run = RunView(self.profile, records)
        by = comparisons.claimed_by(run, self.experiment, self.a, self.b)
        starts = comparisons.starts_so_far(run, self.experiment, self.a, self.b, by)
        logs = [mean(pairs) for pairs in starts]
        if not logs:  # every arm has starts of its own: they are compared at the end
            return "seconds" if left is not None and left <= 0 else None
        references = comparisons.against_references(self.profile.plan.arms)
        share = sum(reference == self.b for _, reference in references)
        return should_stop(
            self.checkpoints,
            logs,
            wished=self.profile.plan.resolution,
            share=max(1, share),
            seconds_left=left,
        ).why


def rule(profile: Profile, tasks: Sequence[Task]) -> Rule | None:
    """The rule of these tasks; None where the plan is to be run to its end, or compares no own-N
    with shared.
    """
    measured = [task.planned for task in tasks if task.planned.role == "measure"]
    arms = list(dict.fromkeys(planned.arm for planned in measured))
    own = [
        name
        for name in arms
        if (arm := Arm.parse(name)).placement == "own" and not arm.audits and not arm.replica
    ]
    if not (profile.plan.stop or profile.plan.budget_s) or not own or "shared" not in arms:
        return None
    sides = len(
        dict.fromkeys(
            tuple(sorted({p.arm for p in measured if p.start_group == group}))
            for group in {p.start_group for p in measured}
        )
    )
    groups = sorted({planned.start_group for planned in measured})
    rounds = tuple(frozenset(groups[i : i + sides]) for i in range(0, len(groups), sides))
    return Rule(profile, measured[0].experiment, own[0], "shared", rounds)


def overspent(profile: Profile, records: Sequence[Line], tasks: Sequence[Task], task: Task) -> bool:
    """Whether a plan without a question of its own (a baseline, a sweep) ends before this task:
    where its seconds are spent, between pairs.

    tasks: all of the plan. What is measured by then may be too little for a result, which the
        verdict says.
    """
    experiments = {t.planned.experiment for t in tasks}
    if any(
        isinstance(r, Finding) and r.name == STOPPED and r.experiment in experiments
        for r in records
    ):
        return True
    begins = task.planned.role == "warmup" or task.planned.position == 0
    return bool(
        profile.plan.budget_s
        and begins
        and seconds(records, experiments, profile.server.at_once) > profile.plan.budget_s
    )


def seconds(records: Sequence[Line], experiments: Collection[str], at_once: int) -> float:
    """What experiments have taken so far by their own log: blocks, and starts, which overlap where
    several are up at once.
    """
    blocks = sum(r.seconds for r in records if isinstance(r, Block) and r.experiment in experiments)
    return (
        blocks
        + sum(r.seconds for r in records if isinstance(r, Start) and r.experiment in experiments)
        / at_once
    )
