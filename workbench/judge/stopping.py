"""Whether a run may stop before its plan is spent: asked between rounds of server starts, at
checkpoints fixed before the first block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from workbench.experiment import findings
from workbench.experiment.arms import Arm
from workbench.experiment.metrics import RunView
from workbench.experiment.plans import Task
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Finding, Line, Start
from workbench.judge import comparisons, stats
from workbench.judge.findings import Stopped

CHECKPOINTS, STOPPED = "checkpoints", "stopped"


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
    pairs: tuple[int, ...]  # pairs of a and b after each round

    @property
    def checkpoints(self) -> stats.Checkpoints:
        """With ``plan.stop`` a look after every round that may end the run; else none but the last,
        and only the budget ends it early.
        """
        looks = [
            n
            for number, n in enumerate(self.pairs, 1)
            if number >= stats.MIN_STARTS and n >= stats.MIN_PAIRS
        ]
        return stats.Checkpoints(
            tuple(looks) if self.profile.plan.stop and looks else (self.pairs[-1],)
        )

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
        ratios = comparisons.log_ratios(
            RunView(self.profile, records), self.experiment, self.a, self.b
        )
        asked = sum(
            (a, self.b) in comparisons.against_references(self.profile.plan.arms)
            for a in self.profile.plan.arms
        )
        decided = stats.should_stop(
            self.checkpoints,
            ratios,
            wished=self.profile.plan.resolution,
            comparisons=max(1, asked),
            seconds_left=None if budget is None else budget - spent - spent / number,
        )
        return (
            decided.why
            if decided.stop and (self.profile.plan.stop or decided.why == "seconds")
            else None
        )


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
    pairs, total = [], 0
    for starts in rounds:
        total += sum(planned.arm == own[0] for planned in measured if planned.start_group in starts)
        pairs.append(total)
    return Rule(profile, measured[0].experiment, own[0], "shared", rounds, tuple(pairs))


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
