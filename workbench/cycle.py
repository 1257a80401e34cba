"""Where a cycle's time went, measured beside predicted: the tables and the answer of 07_cycle, from a run's log."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import cost, trace, width
from workbench.arms import Arm
from workbench.budget import Basis, caveat, collective_s, collectives, context, in_ms
from workbench.cost import Prediction
from workbench.lab import Lab
from workbench.tables import number

STAGES = ("draft", "verify", "draft_extend", "decode")      # of a cycle; decode is the step without speculation
HOST = "host"


def measured(verdict: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """{arm: {stage: ms a cycle, "host": what of the cycle is in none of them, "cycle": ms}} of the arms whose cycle is known.

    Without stage times there are no stages, and host is NaN.
    """
    found = {}
    for arm, facts in (verdict.get("arms") or {}).items():
        stages = {stage: time for stage in STAGES if (time := number((facts.get("stage_ms") or {}).get(stage))) >= 0}
        if (cycle := number(facts.get("cycle_ms"))) > 0:
            found[arm] = stages | {HOST: cycle - sum(stages.values()) if stages else math.nan, "cycle": cycle}
    return found


def measured_table(verdict: Mapping[str, Any]) -> pd.DataFrame:
    """``measured`` as a table, one row an arm, in milliseconds."""
    rows = [{"arm": arm, **{f"{stage.replace('_', '-')} (ms)": told.get(stage, math.nan) for stage in (*STAGES, HOST, "cycle")}}
            for arm, told in measured(verdict).items()]
    return pd.DataFrame(rows, columns=None if rows else ["arm"])


def predicted(run: Lab, verdict: Mapping[str, Any], found: Basis) -> dict[str, Prediction]:
    """{arm: its predicted cycle} for every measured arm but replicas; empty without a basis.

    What the model does not know (the host above all) is taken from shared alone, as the difference of its cycle, and added to each other
    arm that speculates; so shared itself is fitted, and what is predicted is how the others differ from it.
    """
    if found.inputs is None:
        return {}
    arms = {name: Arm.parse(name) for name in measured(verdict)}
    alone = {name: cost.predict(run.profile, found.target, found.draft, arm, found.inputs, context=context(run))
             for name, arm in arms.items() if not arm.replica}
    remainder = measured(verdict)["shared"]["cycle"] / 1e3 - alone["shared"].cycle_s if "shared" in alone else 0.0
    return {name: Prediction(name, p.stages, remainder if arms[name].speculates else 0.0) for name, p in alone.items()}


def compared(run: Lab, verdict: Mapping[str, Any], found: Basis) -> pd.DataFrame:
    """One row an arm: the measured cycle beside the model's own figure and that with the remainder of shared, with how far each is off."""
    told, rows = measured(verdict), []
    for name, p in predicted(run, verdict, found).items():
        cycle, alone = told[name]["cycle"], 1e3 * (p.cycle_s - p.remainder_s)
        fitted = 1e3 * p.cycle_s if p.remainder_s and name != "shared" else math.nan
        rows.append((name, cycle, alone, 100 * (alone / cycle - 1), fitted, 100 * (fitted / cycle - 1)))
    return pd.DataFrame(rows, columns=["arm", "measured cycle (ms)", "model alone (ms)", "off (%)", "with shared's remainder (ms)",
                                       "then off (%)"])


def bars(run: Lab, verdict: Mapping[str, Any], found: Basis) -> pd.DataFrame:
    """Measured and predicted stages of each arm but replicas, for ``charts.stage_times``.

    Without speculation the step stands in verify's place. The rest is what of a measured cycle is outside of its stages, and in a predicted
    one what was taken from shared.
    """
    rows = []
    for name, told in measured(verdict).items():
        if not Arm.parse(name).replica:
            rows += [(f"{name}, measured", stage, time) for stage, time in told.items() if stage != "cycle" and time > 0]
    for name, p in predicted(run, verdict, found).items():
        rows += [(f"{name}, predicted", stage, 1e3 * c.total_s) for stage, c in p.stages.items()]
        rows += [(f"{name}, predicted", HOST, 1e3 * p.remainder_s)] if p.remainder_s > 0 else []
    names = {"decode": "verify", "draft_extend": "draft-extend", HOST: "host and rest"}
    return pd.DataFrame([(arm, names.get(stage, stage), time) for arm, stage, time in rows], columns=["arm", "stage", "time (ms/cycle)"])


def steps(run: Lab, verdict: Mapping[str, Any]) -> tuple[width.Choice, ...]:
    """What other numbers of steps would give, by this run's acceptance at each position and verify at the widths that were measured.

    A plain step is the width 1. Empty where acceptance or stage times were not measured, or the drafts are trees.
    """
    told, facts = measured(verdict), (verdict.get("arms") or {}).get("shared") or {}
    plain, shared = told.get("none", {}), told.get("shared", {})
    acceptance = [share["value"] for share in (facts.get("accept") or {}).get("positions") or []]
    spec = run.profile.speculation
    if "decode" not in plain or "verify" not in shared or not acceptance or spec.topk != 1 or not spec.steps:
        return ()
    curve = {1: plain["decode"] / 1e3}
    for name, stages in told.items():
        arm = Arm.parse(name)
        if arm.placement == "shared" and not arm.replica and "verify" in stages and spec.of(arm).topk == 1:
            curve[spec.of(arm).draft_tokens] = stages["verify"] / 1e3
    drafting = (shared.get("draft", 0.0) + shared.get("draft_extend", 0.0)) / 1e3
    return width.choices(acceptance, curve, drafting / spec.steps, fixed_s=max(0.0, shared[HOST]) / 1e3, plain_s=plain["cycle"] / 1e3)


def answer(run: Lab, verdict: Mapping[str, Any], found: Basis) -> str:
    """07_cycle's answer: what a cycle of shared spends, what own-N can save at most, what it did save, and how good the model was."""
    told = measured(verdict).get("shared")
    if told is None or "draft" not in told:
        return f"No answer: the stages of shared's cycle were not measured.{caveat(run)}"
    cycle, drafting = told["cycle"], told["draft"] + told.get("draft_extend", 0.0)
    parts = ", ".join(f"{stage.replace('_', '-')} {told[stage]:.3g}" for stage in ("draft", "verify", "draft_extend") if stage in told)
    said = [f"A cycle of shared takes {cycle:.3g} ms: {parts}, and {told[HOST]:.2g} outside of them (the host).",
            f"Drafting is {drafting:.3g} ms of it, {100 * drafting / cycle:.2g} %: no placement can save more."]
    count = collectives(run, verdict["arms"]["shared"], found)
    if found.inputs is not None and count:
        said.append(f"Its {count:.3g} collectives a cycle would take {in_ms(count * collective_s(run, found))} by the latencies measured "
                    "on this machine: what the saved communication is worth.")
    said += [_saved(c) for c in verdict.get("comparisons") or []
             if c["metric"] == "cycle_ms" and c["b"] == "shared" and Arm.parse(c["a"]).placement == "own"]
    return " ".join([*said, _model(run, verdict, found)]) + caveat(run)


def decompositions(run: Lab) -> dict[str, dict[str, trace.Part]]:
    """{arm: its profiled cycles by stage} of the traces in the run's folder: traces/ARM/ with one file a rank, all of them in .json or
    .json.gz; empty where nothing was profiled."""
    files: dict[str, list[Path]] = {}
    for path in sorted((run.folder / "traces").glob("*/*.json*")):
        files.setdefault(path.parent.name, []).append(path)
    ranks = {arm: [trace.read(path) for path in paths] for arm, paths in files.items()}
    return {arm: trace.decompose(first, peers) for arm, (first, *peers) in ranks.items()}


def trace_table(parts: Mapping[str, Mapping[str, trace.Part]]) -> pd.DataFrame:
    """``trace.table`` of every arm that was profiled, under each other."""
    return pd.concat([trace.table(p).assign(arm=arm).set_index("arm").reset_index() for arm, p in parts.items()] or [pd.DataFrame()])


def trace_answer(parts: Mapping[str, Mapping[str, trace.Part]]) -> str:
    """Which rival explanation each arm's trace supports."""
    return " ".join(f"{arm}: {trace.sentence(p)}" for arm, p in parts.items()) or "No cycle was profiled."


def _saved(c: Mapping[str, Any]) -> str:
    if not c["valid"] or c["ratio"] is None:
        return f"Whether {c['a']} saved anything is not known: {c['reasons'][0]['sentence'].rstrip('.') if c['reasons'] else 'no result'}."
    sign = 1 if c["ratio"] < 1 else -1
    ends = sorted(100 * sign * (1 - c[end]) for end in ("low", "high"))
    amount = f"{100 * sign * (1 - c['ratio']):.2g} % of the cycle ({100 * c['level']:g} % interval {ends[0]:.2g} to {ends[1]:.2g} %)"
    if c["low"] <= 1 <= c["high"]:
        return f"{c['a']} {'saved' if sign > 0 else 'cost'} {amount}, which cannot be told from nothing."
    return f"{c['a']} {'saved' if sign > 0 else 'cost'} {amount}."


def _model(run: Lab, verdict: Mapping[str, Any], found: Basis) -> str:
    if found.inputs is None:
        return f"There is no prediction: {found.why}."
    off = compared(run, verdict, found).dropna(subset="then off (%)")
    if off.empty:
        return "There is no other arm that the model could be held against."
    worst = off.loc[off["then off (%)"].abs().idxmax()]
    return (f"With what it does not know taken from shared, the model is off by at most {abs(worst['then off (%)']):.2g} % for the other "
            f"arms that speculate ({worst['arm']}); with nothing taken by {_range(off['off (%)'])} %.")


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in (min(values), max(values))))
