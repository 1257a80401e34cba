"""Where a cycle's time went: the tables and the answer of 07_cycle, from a run's log."""

from __future__ import annotations

import math

import pandas as pd

from workbench.answers.budget import caveat, collective_s, collectives, in_ms, verify_table
from workbench.engine import stages
from workbench.experiment.arms import Arm
from workbench.judge.verdict_file import ComparisonEntry, VerdictFile
from workbench.predict.basis import Basis
from workbench.report.cells import NOT_APPLICABLE, number
from workbench.run.lab import Run

STAGES = stages.CYCLE
HOST = "host"
TIMING_MAY_COST = 1.0  # percent of throughput


def measured(verdict: VerdictFile) -> dict[str, dict[str, float]]:
    """{arm: {stage: ms a cycle, "host": what of the cycle is in none of them, "cycle": ms}} of the
    arms whose cycle is known.

    Without stage times there are no stages, and host is NaN. Arms that were measured at another
    load alone are left out.
    """
    found = {}
    for arm, facts in verdict.arms.items():
        if facts.load is not None:
            continue
        stages = {
            stage: time for stage in STAGES if (time := number(facts.stage_ms.get(stage))) >= 0
        }
        if (cycle := number(facts.cycle_ms)) > 0:
            found[arm] = stages | {
                HOST: cycle - sum(stages.values()) if stages else math.nan,
                "cycle": cycle,
            }
    return found


def measured_table(verdict: VerdictFile) -> pd.DataFrame:
    """``measured`` as a table, one row an arm, in milliseconds; what an arm does not do is "–"."""
    rows = [
        {
            "arm": arm,
            **{
                f"{stage.replace('_', '-')} (ms)": told.get(stage, _absent(arm, stage))
                for stage in (*STAGES, HOST, "cycle")
            },
        }
        for arm, told in measured(verdict).items()
    ]
    return pd.DataFrame(rows, columns=None if rows else ["arm"])


def collectives_table(verdict: VerdictFile) -> pd.DataFrame:
    """Collectives of each stage of a cycle, one row an arm of ``measured``."""
    rows = []
    for arm in measured(verdict):
        counted = verdict.arms[arm].collectives_per_round
        rows.append(
            {"arm": arm}
            | {
                stage.replace("_", "-"): (
                    number(counted[stage]) if stage in counted else _absent(arm, stage)
                )
                for stage in STAGES
            }
        )
    return pd.DataFrame(rows, columns=None if rows else ["arm"])


def _absent(arm: str, stage: str) -> float | str:
    """What stands where an arm has no figure of a stage."""
    return (
        NOT_APPLICABLE
        if Arm.parse(arm).speculates == (stage == "decode") and stage in STAGES
        else math.nan
    )


def timing(verdict: VerdictFile) -> str:
    """What timing the stages costs, in words: from shared without it (the arm shared+timing=off)
    against shared, in one server.
    """
    asked = _untimed(verdict)
    if not asked:
        return (
            "What timing the stages costs was not measured in this run: name the arm"
            " shared+timing=off in plan.arms."
        )
    c = asked[0]
    if not c.valid or c.ratio is None:
        return f"What timing the stages costs is not known: {_why(c)}."
    cost, low, high = (100 * (1 - 1 / end) for end in (c.ratio, c.low, c.high))
    found = (
        "no more than"
        if high <= TIMING_MAY_COST
        else (
            "more than"
            if low > TIMING_MAY_COST
            else "which this run cannot tell from more or less than"
        )
    )
    return (
        f"Timing the stages costs {cost:.2g} % of throughput ({100 * c.level:g} % interval"
        f" {low:.2g} to {high:.2g} %), {found} the {TIMING_MAY_COST:g} % that it may."
    )


def _untimed(verdict: VerdictFile) -> list[ComparisonEntry]:
    return [
        c
        for c in verdict.comparisons
        if c.metric == "tokens_per_s"
        and c.b == "shared"
        and Arm.parse(c.a) == Arm("shared", timing="off")
    ]


def _chains(run: Run, verdict: VerdictFile) -> dict[str, Arm]:
    """The arms on the target's group that draft chains: they differ in steps alone."""
    arms = {name: Arm.parse(name) for name in verdict.arms}
    return {
        name: arm
        for name, arm in arms.items()
        if arm.placement == "shared"
        and not (arm.replica or arm.comm)
        and run.profile.speculation.of(arm).topk == 1
    }


def curve(run: Run, verdict: VerdictFile) -> dict[int, float]:
    """{tokens verified: seconds} as measured in the run: the decode step of none (width 1), and
    verify of each step count on the target's group.
    """
    told, found = measured(verdict), {}
    if "decode" in told.get("none", {}):
        found[1] = told["none"]["decode"] / 1e3
    for name, arm in _chains(run, verdict).items():
        if "verify" in told.get(name, {}):
            found[run.profile.speculation.of(arm).draft_tokens] = told[name]["verify"] / 1e3
    return dict(sorted(found.items()))


def widths(run: Run, verdict: VerdictFile, found: Basis) -> pd.DataFrame:
    """One row a width of verify: measured in the run where an arm verifies so many tokens,
    predicted from the machine's inputs, and for a
    mixture how many experts of a layer are read."""
    seen = curve(run, verdict)
    wanted = sorted({*range(1, 9), *seen})
    table = verify_table(run, found, wanted)
    if table.empty:
        table = pd.DataFrame(
            {"tokens verified": wanted, "verify (ms)": math.nan, "in plain steps": math.nan}
        )
    table = table.rename(
        columns={"verify (ms)": "predicted (ms)", "in plain steps": "predicted, in plain steps"}
    )
    measured_ms = [1e3 * seen[w] if w in seen else math.nan for w in table["tokens verified"]]
    table.insert(1, "measured (ms)", measured_ms)
    return table


def answer(run: Run, verdict: VerdictFile, found: Basis) -> str:
    """07_cycle's answer: what a cycle of shared spends, what own-N can save at most, and what it
    did save.
    """
    told = measured(verdict).get("shared")
    if told is None or "draft" not in told:
        return f"No answer: the stages of shared's cycle were not measured.{caveat(run)}"
    cycle, drafting = told["cycle"], sum(told.get(stage, 0.0) for stage in stages.DRAFTING)
    parts = ", ".join(
        f"{stage.replace('_', '-')} {told[stage]:.3g}"
        for stage in stages.SPECULATION
        if stage in told
    )
    said = [
        (
            f"A cycle of shared takes {cycle:.3g} ms: {parts}, and {max(0.0, told[HOST]):.2g}"
            " outside of them (the host)."
        ),
        (
            f"Drafting is {drafting:.3g} ms of it, {100 * drafting / cycle:.2g} %: no placement can"
            " save more."
        ),
    ]
    count = collectives(run, verdict.arms["shared"], found)
    if found.inputs is not None and count:
        said.append(
            f"Its {count:.3g} collectives a cycle would take"
            f" {in_ms(count * collective_s(run, found))} by the latencies measured on this machine:"
            " what the saved communication is worth."
        )
    # 05_steps compares them again, at other settings of its own.
    here = verdict.arms["shared"].experiment
    said += [
        _saved(c)
        for c in verdict.comparisons
        if (c.metric, c.b, c.experiment) == ("cycle_ms", "shared", here)
        and Arm.parse(c.a).placement == "own"
    ]
    said += [timing(verdict)] if _untimed(verdict) else []
    return " ".join(said) + caveat(run)


def _saved(c: ComparisonEntry) -> str:
    if not c.valid or c.ratio is None:
        return f"Whether {c.a} saved anything is not known: {_why(c)}."
    sign = 1 if c.ratio < 1 else -1
    ends = sorted(100 * sign * (1 - end) for end in (c.low, c.high))
    amount = (
        f"{100 * sign * (1 - c.ratio):.2g} % of the cycle ({100 * c.level:g} % interval"
        f" {ends[0]:.2g} to {ends[1]:.2g} %)"
    )
    if c.low <= 1 <= c.high:
        return (
            f"{c.a} {'saved' if sign > 0 else 'cost'} {amount}, which cannot be told from nothing."
        )
    return f"{c.a} {'saved' if sign > 0 else 'cost'} {amount}."


def _why(c: ComparisonEntry) -> str:
    return c.reasons[0].sentence.rstrip(".") if c.reasons else "no result"
