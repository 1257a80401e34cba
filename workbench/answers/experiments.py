"""The experiments: the one table of what each notebook that measures runs, and its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.answers import collectives
from workbench.experiment import communication, names, plans, setting_sweep, sweeps
from workbench.experiment.plans import Task
from workbench.experiment.runlog import Line
from workbench.run.lab import Run

Plan = Sequence[Task] | Callable[[Sequence[Line]], Sequence[Task]]


@dataclass(frozen=True)
class Experiment:
    """What one notebook measures.

    name: of the experiment in the log, or of the family of them.
    notebook: that measures it.
    plan: of a run: all its tasks, or a function of the log that gives those decided so far.
    """

    name: str
    notebook: str
    plan: Callable[[Run], Plan]

    def tasks(self, run: Run) -> Sequence[Task]:
        """The tasks that the run's log has decided on."""
        plan = self.plan(run)
        return plan(run.records) if callable(plan) else plan


def _baseline(run: Run) -> Plan:
    return plans.baseline(run.profile, len(run.prompts))


def _draft_tp(run: Run) -> Plan:
    return plans.draft_tp(run.profile, len(run.prompts))


def _steps(run: Run) -> Plan:
    return sweeps.steps(run.profile, len(run.prompts), run.longest_prompt)


def _collectives(run: Run) -> Plan:
    asked = run.profile.sweep.settings
    tried, _ = communication.choose(collectives.facts(run), asked)
    return setting_sweep.collectives(run.profile, len(run.prompts), tried)


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment("baseline", "03_baseline", _baseline),
        Experiment("draft_tp", "04_draft_tp", _draft_tp),
        Experiment(names.STEPS, "05_steps", _steps),
        Experiment(names.COLLECTIVES, "06_collectives", _collectives),
    )
}


def measure(run: Run, name: str) -> None:
    """Measure what is left of an experiment.

    Raises: as ``Run.measure``.
    """
    run.measure(EXPERIMENTS[name].plan(run))
