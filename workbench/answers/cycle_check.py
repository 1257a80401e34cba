"""Predicted against measured: the cycle of every arm and setting of a run, how far the model is
off, and whether it orders the arms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from workbench.answers import host_time, profiled_cycles, trace_parts
from workbench.answers.budget import basis, context
from workbench.answers.cycle import HOST, measured
from workbench.experiment.arms import Arm
from workbench.judge.verdict_file import VerdictFile
from workbench.predict import cycle_time, stage_work
from workbench.predict.basis import Basis
from workbench.predict.cycle_time import Prediction
from workbench.run import recording
from workbench.run.lab import Run, reopen

ALLOWED = 15.0  # percent that a prediction may be off before the notebook says so
WORTH_NAMING = 0.02  # of the cycle: a stage's difference
COLUMNS = ["arm", "measured cycle (ms)", "model alone (ms)", "off (%)"]


def alone(run: Run, verdict: VerdictFile, found: Basis) -> dict[str, Prediction]:
    """{arm: its predicted cycle} for every measured arm but replicas and other settings of the
    communication layer, for which this machine was not measured; empty without a basis.

    Nothing is taken from the run but how many kernels the profiled cycles of shared and none
    launched, where there are any on a GPU.
    """
    if found.inputs is None:
        return {}
    counted, arms = kernels(run, found), {name: Arm.parse(name) for name in measured(verdict)}
    return {
        name: cycle_time.predict(
            run.profile,
            found.target,
            found.draft,
            arm,
            found.inputs,
            context=context(run),
            kernels=counted,
            host_s=found.host_s(arm),
        )
        for name, arm in arms.items()
        if not (arm.replica or arm.comm)
    }


def kernels(run: Run, found: Basis) -> dict[str, float]:
    """{stage: kernels a cycle that are no collective}, counted in the traces of shared and none;
    without those the model's own estimate.
    """
    counted: dict[str, float] = {}
    profiled = profiled_cycles.decompositions(run)
    for name in ("none", "shared"):
        entry = profiled.get(name)
        if entry is None or entry.cpu:
            continue
        parts = entry.parts
        for stage, work in stage_work.stages(
            run.profile, found.target, found.draft, Arm(name)
        ).items():
            if stage in parts:
                counted[stage] = max(
                    0.0,
                    parts[stage].kernels / trace_parts.cycles(parts)
                    - sum(c.count for c in work.collectives),
                )
    return counted


def compared(run: Run, verdict: VerdictFile, found: Basis) -> pd.DataFrame:
    """One row an arm: the measured cycle beside the model's, with how far that is off."""
    told, rows = measured(verdict), []
    for name, p in alone(run, verdict, found).items():
        cycle, own = told[name]["cycle"], 1e3 * p.cycle_s
        rows.append((name, cycle, own, 100 * (own / cycle - 1)))
    return pd.DataFrame(rows, columns=COLUMNS)


def bars(run: Run, verdict: VerdictFile, found: Basis) -> pd.DataFrame:
    """Measured and predicted stages of each arm but replicas, for ``charts.stage_times``.

    Without speculation the step stands in verify's place. The rest is what of a measured cycle is
    outside of its stages, and in a predicted one what the host takes longer than the device, where
    that is known.
    """
    rows = []
    for name, told in measured(verdict).items():
        if not (Arm.parse(name).replica or Arm.parse(name).comm):
            rows += [
                (f"{name}, measured", stage, time)
                for stage, time in told.items()
                if stage != "cycle" and time > 0
            ]
    for name, p in alone(run, verdict, found).items():
        rows += [(f"{name}, predicted", stage, 1e3 * c.total_s) for stage, c in p.stages.items()]
        rows += (
            [(f"{name}, predicted", HOST, 1e3 * (p.cycle_s - p.device_s))]
            if p.cycle_s > p.device_s
            else []
        )
    names = {"decode": "verify", "draft_extend": "draft-extend", HOST: "host and rest"}
    return pd.DataFrame(
        [(arm, names.get(stage, stage), time) for arm, stage, time in rows],
        columns=["arm", "stage", "time (ms/cycle)"],
    )


def recorded(folder: Path | None = None) -> tuple[pd.DataFrame, dict[str, str]]:
    """``compared`` of every recording under each other, with a column "run"; and {recording: what
    there is to say of it in words}.

    A recording holds the inputs of its machine, or there is no prediction for it.
    """
    found_tables, said = [], {}
    for name in recording.names(folder):
        run = reopen((folder or recording.FOLDER) / name)
        verdict, found = recording.stored_verdict(name, folder), basis(run)
        said[name] = sentence(run, verdict, found)
        found_tables.append(compared(run, verdict, found).assign(run=name))
    table = pd.concat(
        [t for t in found_tables if not t.empty] or [pd.DataFrame(columns=[*COLUMNS, "run"])]
    )
    return table.set_index("run").reset_index(), said


def misses(table: pd.DataFrame) -> pd.DataFrame:
    """``compared`` for ``cycle_charts.misses``: one row an arm. A column "run" tells several runs
    apart.
    """
    label = table["run"] + ": " + table["arm"] if "run" in table else table["arm"]
    return table.assign(label=label)[["label", "off (%)"]].dropna().reset_index(drop=True)


def order(
    verdict: VerdictFile, predictions: Mapping[str, Prediction]
) -> tuple[list[str], list[str]]:
    """Pairs of arms ("a, b") whose cycles differ by more than the run can resolve: those that the
    model orders as measured, and the others.
    """
    right: list[str] = []
    wrong: list[str] = []
    arms = verdict.arms
    for c in verdict.comparisons:
        predicted_here = (
            c.a in predictions
            and c.b in predictions
            and c.experiment in (arms[c.a].experiment, arms[c.b].experiment)
        )
        if (
            predicted_here
            and c.metric == "cycle_ms"
            and c.valid
            and c.ratio is not None
            and f"{c.a} and {c.b}" not in right + wrong
            and abs(c.ratio - 1) > (c.resolution or 0.0)
        ):
            same = (predictions[c.a].cycle_s > predictions[c.b].cycle_s) == (c.ratio > 1)
            (right if same else wrong).append(f"{c.a} and {c.b}")
    return right, wrong


def sentence(run: Run, verdict: VerdictFile, found: Basis) -> str:
    """How good the model is, in words: where it misses by more than ``ALLOWED``, and whether it
    orders the arms.
    """
    if found.inputs is None:
        return f"There is no prediction: {found.why}."
    table = compared(run, verdict, found)
    if table.empty:
        return "There is no arm that the model could be held against."
    said = [_missed("With nothing taken from the run", table["arm"], table["off (%)"])]
    if found.host_from:
        said.append(
            f"What the host needs for a cycle is known from {recording.PREFIX}{found.host_from},"
            " where the device is idle."
        )
    elif (
        shared := alone(run, verdict, found).get("shared")
    ) and shared.device_s < host_time.IDLE * measured(verdict)["shared"]["cycle"] / 1e3:
        said.append(
            "The device is idle for more than three quarters of a cycle: what was measured is the"
            " host."
        )
    said.append(_where(run, verdict, found, table.loc[table["off (%)"].abs().idxmax(), "arm"]))
    right, wrong = order(verdict, alone(run, verdict, found))
    if wrong:
        said.append(f"It orders {'; '.join(wrong)} the other way round than measured.")
    elif right:
        said.append(
            f"It orders {'each of the ' if len(right) > 1 else 'the '}{len(right)}"
            f" pair{'s' if len(right) > 1 else ''} of arms whose cycles differ by more than the run"
            " can resolve as measured."
        )
    return " ".join(said)


def _where(run: Run, verdict: VerdictFile, found: Basis, arm: str) -> str:
    """In which stages the arm that the model misses most takes longer or shorter than predicted,
    the larger differences first.
    """
    told, model = measured(verdict)[arm], alone(run, verdict, found)[arm]
    expected = {stage: c.total_s for stage, c in model.stages.items()} | {
        HOST: model.cycle_s - model.device_s
    }
    apart = {
        stage: time - 1e3 * expected.get(stage, 0.0)
        for stage, time in told.items()
        if stage != "cycle"
    }
    large = sorted(
        (stage for stage, ms in apart.items() if abs(ms) > WORTH_NAMING * told["cycle"]),
        key=lambda stage: -abs(apart[stage]),
    )
    if not large:
        return f"Stage by stage {arm} is as predicted, or was not timed."
    parts = ", ".join(
        f"{apart[stage]:+.2g} ms in {'the host' if stage == HOST else stage.replace('_', '-')}"
        for stage in large
    )
    return f"Of {arm}, which it misses most, the measured cycle has {parts} against the model."


def _missed(how: str, arms: Sequence[str], off: Sequence[float]) -> str:
    pairs = sorted(zip(arms, off), key=lambda pair: -abs(pair[1]))
    over = [f"{arm} ({miss:+.2g} %)" for arm, miss in pairs if abs(miss) > ALLOWED]
    if over:
        return f"{how}, the model misses {ALLOWED:g} % for {', '.join(over)}."
    return (
        f"{how}, the model is within {ALLOWED:g} % of every measured cycle, at most"
        f" {abs(pairs[0][1]):.2g} % off ({pairs[0][0]})."
    )
