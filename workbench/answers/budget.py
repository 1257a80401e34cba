"""What separating the draft could be worth, before a server is started: the ceilings and
predictions of 02_budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from workbench.answers import host_time
from workbench.engine import stages as stage_table
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput, WorkbenchError
from workbench.experiment.runlog import Block
from workbench.judge.verdict_file import ArmEntry, VerdictFile
from workbench.predict import (
    ceilings,
    cycle_time,
    machine,
    measure_machine,
    model_shape,
    stage_work,
)
from workbench.predict.basis import Basis
from workbench.predict.cycle_time import Prediction
from workbench.predict.machine import Machine
from workbench.report.cells import number
from workbench.run.lab import Run

OWN = "this run's cycle times"  # where 02_budget's numbers come from, once there are any
CPU_CAVEAT = " Measured on the CPU engine: not a statement about GPUs."


def basis(run: Run) -> Basis:
    """The inputs kept in the run's log; else those of this machine, which are measured where they
    never were, and kept in the log.

    A log that holds measurements but no inputs may be another machine's: then there is no basis,
    and no prediction.
    """
    kept = run.finding("machine", Machine)
    if kept is None and any(isinstance(record, Block) for record in run.records):
        return Basis(
            why=(
                "the log holds measurements but not the inputs of their machine: run 02_budget"
                " before the servers"
            )
        )
    try:
        inputs = kept or measure_machine.saved_or_measured(run.profile)
        target, draft = (
            model_shape.read(getattr(run.profile.pair, side), f"pair.{side}")
            for side in ("target", "draft")
        )
        cycle_time.by_placement(run.profile, target, draft, inputs)
        told_by, told = host_time.from_recordings(run, inputs)
    except WorkbenchError as error:
        return Basis(why=str(error).rstrip("."))
    if kept is None:
        run.record_finding("budget", "machine", inputs)
    return Basis(inputs, target, draft, host=told, host_from=told_by)


def context(run: Run) -> float:
    """Tokens of KV that a request of the workload holds half way through its answer, on average
    over the prompts.
    """
    return (
        sum(len(p["input_ids"]) for p in run.prompts) / len(run.prompts)
        + run.profile.workload.max_new_tokens / 2
    )


def numbers(run: Run, verdict: VerdictFile, found: Basis = Basis()) -> ceilings.Numbers:
    """The numbers of the ceilings: this run's where none and shared were measured, else those
    of the field report that started this (Kimi-K2.5, EAGLE-3, TP8 over PCIe); ``source`` says
    which.

    By cycle times, so that prefill and queue are left out and requests at once count as one. The
    draft's collectives are those counted, at the latency that the machine's inputs give for the
    draft's own messages (that report's estimate where there are none).
    """
    unknown, steps = ArmEntry(), run.profile.speculation.steps
    facts = verdict.arms.get("shared", unknown)
    plain, shared = number(verdict.arms.get("none", unknown).cycle_ms), number(facts.cycle_ms)
    length, stages = number(facts.accept_length), facts.stage_ms
    reported = _reported(run)
    if not (plain > 0 and shared > 0 and length >= 1 and steps):
        return reported
    known: dict[str, Any] = {}
    if (count := collectives(run, facts, found)) is not None:
        known["collectives_a_step"] = count / steps
    if "draft" in stages:
        known["draft_s"] = (stages["draft"] + stages.get("draft_extend", 0)) / 1e3
    if found.inputs is not None:
        known["collective_s"] = (collective_s(run, found),) * 2
    try:
        return ceilings.Numbers(
            1e3 / plain,
            1e3 * length / shared,
            length,
            steps,
            **known,
            source=OWN,
        )
    except BadInput as error:
        return replace(
            reported,
            source=f"{reported.source} (this run's cannot be used: {str(error).rstrip('.')})",
        )


def _reported(run: Run) -> ceilings.Numbers:
    told = run.profile.reported
    if told is None:
        return ceilings.Numbers()
    return ceilings.Numbers(
        told.baseline,
        told.speculative,
        told.accept_length,
        told.steps,
        collective_s=told.collective_s,
        source=f"the numbers of {told.source}",
    )


def collectives(run: Run, facts: ArmEntry, found: Basis) -> float | None:
    """Collectives of shared's drafting a cycle: as counted in the server, or where graphs hide them
    from that by its source.
    """
    counted = facts.collectives_per_round
    if "draft" in counted and not stage_work.graphs(run.profile):
        return counted["draft"] + counted.get("draft_extend", 0)
    return (
        None
        if found.inputs is None
        else sum(c.count for work in _drafting(run, found) for c in work.collectives)
    )


def _drafting(run: Run, found: Basis) -> list[stage_work.Work]:
    works = stage_work.stages(run.profile, found.target, found.draft, Arm("shared"))
    return [works[stage] for stage in stage_table.DRAFTING]


def collective_s(run: Run, found: Basis) -> float:
    """Mean seconds of one collective of shared's drafting, by the machine's latencies."""
    works = _drafting(run, found)
    count = sum(c.count for work in works for c in work.collectives)
    return (
        sum(cycle_time.cost(run.profile, work, found.inputs).collective_s for work in works) / count
        if count
        else 0.0
    )


def placements(run: Run, found: Basis) -> dict[str, Prediction]:
    """{arm: its predicted cycle} for shared and every own-N; empty without a basis."""
    return (
        {}
        if found.inputs is None
        else cycle_time.by_placement(
            run.profile, found.target, found.draft, found.inputs, context=context(run)
        )
    )


def inputs(found: Basis) -> pd.DataFrame:
    """The machine's measured rates; one row that says why where there are none."""
    if found.inputs is None:
        return pd.DataFrame([{"input": "none", "why": found.why}])
    rows = machine.rates(found.inputs)
    return rows.assign(
        value=[
            "unknown" if math.isnan(value) else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
            for value in rows["value"]
        ]
    )


def latencies(found: Basis) -> pd.DataFrame:
    """The machine's collectives, in microseconds by size."""
    return pd.DataFrame() if found.inputs is None else machine.latencies(found.inputs)


def unmeasured(found: Basis) -> str:
    """What the machine's inputs lack, a line each."""
    if found.inputs is None:
        return f"Nothing was measured: {found.why}."
    return (
        "\n".join(f"{what}: {why}" for what, why in machine.unmeasured(found.inputs).items())
        or "Every input was measured."
    )


def placement_table(predictions: Mapping[str, Prediction]) -> pd.DataFrame:
    """One row a placement: milliseconds that drafting takes of a cycle, by what takes them."""
    rows = []
    for arm, prediction in predictions.items():
        costs = [prediction.stages[stage] for stage in stage_table.DRAFTING]
        rows.append(
            (
                arm,
                *(
                    1e3 * sum(of(c) for c in costs)
                    for of in (lambda c: c.work_s, lambda c: c.collective_s, lambda c: c.launch_s)
                ),
                1e3 * prediction.draft_s,
                1e3 * prediction.cycle_s,
            )
        )
    return pd.DataFrame(
        rows,
        columns=[
            "arm",
            "weights and KV (ms)",
            "collectives (ms)",
            "launches (ms)",
            "drafting (ms/cycle)",
            "cycle (ms)",
        ],
    )


def placement_bars(predictions: Mapping[str, Prediction]) -> pd.DataFrame:
    """What drafting takes by what it is spent on, for ``charts.stage_times``."""
    parts = placement_table(predictions).rename(columns=lambda name: name.removesuffix(" (ms)"))
    return parts.melt(
        "arm", ["weights and KV", "collectives", "launches"], "stage", "time (ms/cycle)"
    )


def verify_table(
    run: Run, found: Basis, widths: Sequence[int] = tuple(range(1, 9))
) -> pd.DataFrame:
    """One row a width (1 among them): the predicted time of a verify of so many tokens and, for a
    mixture, how many experts of a layer it reads.
    """
    columns = ["tokens verified", "verify (ms)", "in plain steps"]
    if found.inputs is None:
        return pd.DataFrame(columns=columns)
    times, experts = (
        cycle_time.verify_s(run.profile, found.target, found.inputs, widths, context=context(run)),
        found.target.experts,
    )
    rows = pd.DataFrame([(w, 1e3 * s, s / times[1]) for w, s in times.items()], columns=columns)
    return (
        rows
        if experts is None
        else rows.assign(
            **{
                "experts read (of a layer)": [
                    stage_work.distinct_experts(
                        experts.count,
                        stage_work.experts_a_token(found.target),
                        w * run.profile.workload.concurrency,
                    )
                    for w in times
                ]
            }
        )
    )


def answer(run: Run, verdict: VerdictFile, found: Basis) -> str:
    """02_budget's answer, in words."""
    said = ceilings.sentence(numbers(run, verdict, found))
    predictions = placements(run, found)
    if not predictions:
        return f"{said} No prediction for this machine: {found.why}."
    chosen, shared = cycle_time.best(predictions), predictions["shared"]
    gain = shared.draft_s - chosen.draft_s
    best = (
        f"least on {chosen.arm}, {in_ms(chosen.draft_s)}: separating saves {in_ms(gain)} of"
        f" {in_ms(shared.cycle_s)} at best"
    )
    return (
        f"{said} On this machine ({found.inputs.name}) the model expects drafting to take"
        f" {in_ms(shared.draft_s)} of a cycle on the target's group and"
        f" {best if gain > 0 else 'no less on a group of its own'}.{caveat(run)}"
    )


def caveat(run: Run) -> str:
    """What a figure of the CPU engine must be read with; nothing on GPUs."""
    return CPU_CAVEAT if run.profile.engine == "cpu" else ""


def in_ms(seconds: float) -> str:
    """Seconds in words: three significant digits, in milliseconds."""
    return f"{1e3 * seconds:.3g} ms"
