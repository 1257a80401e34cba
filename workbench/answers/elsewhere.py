"""Where the rest of a cycle goes, beside one plain step: what the model explains, what it does not,
and what to measure next.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from workbench.answers import budget
from workbench.engine import stages as stage_table
from workbench.experiment import profile as profiles
from workbench.experiment.arms import Arm
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import ROOT
from workbench.judge.verdict_file import VerdictFile
from workbench.predict import by_hand, ceilings, cycle_time, model_shape
from workbench.predict.basis import Basis
from workbench.predict.cycle_time import Cost
from workbench.predict.machine import Machine
from workbench.predict.model_shape import ModelShape
from workbench.run.lab import Run

STORY = "rtx6000-x8-kimi"
SHAPES = ROOT / "fixtures" / "shapes" / "kimi-k25"
LARGE = 0.1  # of a cycle: from there on what is not explained is worth a measurement


@dataclass(frozen=True)
class Explained:
    """One part of a cycle, in milliseconds (low, high). how: what it is known by."""

    part: str
    low: float
    high: float
    how: str


def parts(run: Run, verdict: VerdictFile, found: Basis) -> tuple[Explained, ...]:
    """The parts of the cycle of 02_budget's numbers, the sum of those explained and the rest last.

    Where the numbers are this run's, by its pair and its machine's inputs, and none without; else
    by the inputs that came with the reported numbers, and where those are the field report's by the
    published shapes.
    """
    numbers = budget.numbers(run, verdict, found)
    if numbers.source == budget.OWN:
        if found.inputs is None:
            return ()  # another machine's inputs explain nothing of this one's cycle
        return _parts(numbers, run.profile, found.target, found.draft, (found.inputs, found.inputs))
    profile = run.profile
    if profile.reported is None:
        shapes = {side: str(SHAPES / side) for side in ("target", "draft")}
        profile = profiles.load(STORY, shapes)
    target, draft = (
        model_shape.read(getattr(profile.pair, side), f"pair.{side}")
        for side in ("target", "draft")
    )
    machines = tuple(
        by_hand.machine(None, profile.tp, inputs) for inputs in profile.reported.inputs()
    )
    return _parts(numbers, profile, target, draft, machines)


def _parts(
    numbers: ceilings.Numbers,
    profile: Profile,
    target: ModelShape,
    draft: ModelShape,
    machines: tuple[Machine, ...],
) -> tuple[Explained, ...]:
    def costs(machine: Machine) -> dict[str, Cost]:
        plain, shared = (
            cycle_time.predict(profile, target, draft, arm, machine).stages
            for arm in (Arm("none"), Arm("shared"))
        )
        return plain | shared

    told = [costs(machine) for machine in machines]

    def ends(of) -> tuple[float, float]:
        found = [1e3 * of(cost) for cost in told]
        return min(found), max(found)

    def drafting(what: str):
        return lambda cost: sum(getattr(cost[stage], what) for stage in stage_table.DRAFTING)

    def beyond(what: str):
        return lambda cost: getattr(cost["verify"], what) - getattr(cost["decode"], what)

    step, cycle = 1e3 * numbers.step_s, 1e3 * numbers.cycle_s
    width = profile.speculation.draft_tokens
    reads = "experts that" if target.experts else "weights and KV that"
    rows = [
        Explained("one plain step", step, step, "measured"),
        Explained(
            f"{reads} {width} tokens read and one does not", *ends(beyond("work_s")), "model"
        ),
        Explained("all-reduces of verify beyond those", *ends(beyond("collective_s")), "model"),
        Explained("drafting: weights and KV", *ends(drafting("work_s")), "model"),
        Explained("drafting: collectives", *ends(drafting("collective_s")), "model"),
        Explained("drafting: launches", *ends(drafting("launch_s")), "model"),
    ]
    low, high = sum(row.low for row in rows), sum(row.high for row in rows)
    return (
        *rows,
        Explained("explained", low, high, "sum"),
        Explained("not explained", cycle - high, cycle - low, "the measured cycle less the sum"),
    )


def table(found: tuple[Explained, ...]) -> pd.DataFrame:
    """One row a part, in milliseconds of a cycle."""
    rows = [(one.part, one.low, one.high, one.how) for one in found]
    return pd.DataFrame(rows, columns=["of the cycle", "at least (ms)", "at most (ms)", "known by"])


def sentence(found: tuple[Explained, ...]) -> str:
    """What is explained, what is not, and what to measure next, in words."""
    if not found:
        return "Nothing of the cycle is explained: the inputs of its machine were not measured."
    *_, explained, rest = found
    cycle = explained.low + rest.high
    said = (
        f"Of a cycle of {cycle:.1f} ms {_range(explained)} ms are explained and"
        f" {_range(rest)} ms are not."
    )
    if rest.high < LARGE * cycle:
        return f"{said} Nothing large is left to look for."
    return (
        f"{said} Measure next what the host does between two graphs (07_cycle, traces=true),"
        " whether draft and verify run in graphs, and the latency of a collective on this machine"
        " (workbench bench machine)."
    )


def _range(found: Explained) -> str:
    low, high = f"{found.low:.1f}", f"{found.high:.1f}"
    return low if low == high else f"{low} to {high}"
