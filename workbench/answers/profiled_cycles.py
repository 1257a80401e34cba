"""Profiled cycles of a run: traces in its folder decomposed once and kept in its log, so that a
recording needs no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.answers import torch_trace, trace_parts
from workbench.experiment.errors import WorkbenchError
from workbench.experiment.runlog import Finding
from workbench.judge.verdict_file import ArmEntry, VerdictFile
from workbench.report.cells import number
from workbench.run.lab import Run
from workbench.serving.pool import TRACES

_NAME = "trace "  # of the findings: "trace ARM"


def decompositions(run: Run) -> dict[str, dict[str, Any]]:
    """{arm: {"parts": {stage: its part of the cycles}} or {"why": why there is none}}, from the
    log, else from traces/ARM.

    A folder holds one file a rank, .json or .json.gz; what is read of it is kept in the log.
    """
    found = {
        r.name.removeprefix(_NAME): r.value
        for r in run.records
        if isinstance(r, Finding) and r.experiment == "cycle" and r.name.startswith(_NAME)
    }
    for folder in sorted((run.folder / TRACES).glob("*/")):
        if folder.name not in found and (files := sorted(folder.glob("*.json*"))):
            found[folder.name] = _decompose(files)
            run.record_finding("cycle", _NAME + folder.name, found[folder.name])
    return found


def _decompose(files: list[Path]) -> dict[str, Any]:
    try:
        first, *peers = (torch_trace.read(path) for path in files)
        parts = trace_parts.decompose(first, peers)
        trace_parts.cycles(parts)
    except WorkbenchError as error:
        return {"why": str(error).rstrip(".")}
    return {"parts": {stage: asdict(part) for stage, part in parts.items()}, "cpu": first.cpu}


def parts(found: Mapping[str, Any]) -> dict[str, trace_parts.Part]:
    """The parts of one arm's entry; empty where there are none."""
    return {stage: trace_parts.Part(**part) for stage, part in (found.get("parts") or {}).items()}


def table(found: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """``trace.table`` of every arm that was profiled, under each other."""
    tables = [
        trace_parts.table(own).assign(arm=arm).set_index("arm").reset_index()
        for arm, entry in found.items()
        if (own := parts(entry))
    ]
    return pd.concat(tables) if tables else pd.DataFrame(columns=["arm", "stage"])


def bars(found: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Milliseconds of a cycle by arm, stage and what the device did in them, for
    ``charts.decomposition``.
    """
    rows = []
    for arm, entry in found.items():
        own = parts(entry)
        for stage in (stage for stage in torch_trace.CYCLE if stage in own):
            spent = {
                **own[stage].seconds,
                "waits for host": own[stage].host_gap,
                "launched, not running": own[stage].device_gap,
            }
            rows += [
                (
                    arm,
                    stage.replace("_", "-"),
                    "waits for rank" if what == "wait" else what,
                    1e3 * seconds / trace_parts.cycles(own),
                )
                for what, seconds in spent.items()
            ]
    return pd.DataFrame(rows, columns=["arm", "stage", "what", "time (ms/cycle)"])


def answer(found: Mapping[str, Mapping[str, Any]], verdict: VerdictFile) -> str:
    """Which rival explanation each arm's trace supports, beside the cycle without the profiler, or
    why it has no trace.
    """
    said = []
    for arm, entry in found.items():
        own, cycle = parts(entry), number(verdict.arms.get(arm, ArmEntry()).cycle_ms)
        where = " On a CPU, whose operators stand for kernels:" if entry.get("cpu") else ""
        beside = f" Without the profiler a cycle takes {cycle:.3g} ms." if cycle > 0 else ""
        said.append(
            f"{arm}:{where} {trace_parts.sentence(own)}{beside}"
            if own
            else f"{arm}: no trace ({entry.get('why', 'unknown')})."
        )
    return "\n".join(said) or "No cycle was profiled: add -p traces=true."
