"""Profiled cycles of a run: traces in its folder decomposed once and kept in its log, so that a
recording needs no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from workbench.answers import torch_trace, trace_parts
from workbench.experiment import findings
from workbench.experiment.errors import WorkbenchError
from workbench.experiment.findings import Found
from workbench.experiment.runlog import Finding
from workbench.judge.verdict_file import ArmEntry, VerdictFile
from workbench.report.cells import number
from workbench.run.lab import Run
from workbench.serving.pool import TRACES

_NAME = "trace "  # of the findings: "trace ARM"


class Profiled(Found):
    """The profiled cycles of one arm.

    parts: {stage: its part of the cycles}; empty where there are none, and then why.
    cpu: operators stand for kernels.
    """

    parts: dict[str, trace_parts.Part] = {}
    cpu: bool = True
    why: str = "unknown"


def decompositions(run: Run) -> dict[str, Profiled]:
    """{arm: its profiled cycles}, from the log, else from traces/ARM.

    A folder holds one file a rank, .json or .json.gz; what is read of it is kept in the log.
    """
    found = {
        r.name.removeprefix(_NAME): findings.read(r, Profiled)
        for r in run.records
        if isinstance(r, Finding) and r.experiment == "cycle" and r.name.startswith(_NAME)
    }
    for folder in sorted((run.folder / TRACES).glob("*/")):
        if folder.name not in found and (files := sorted(folder.glob("*.json*"))):
            found[folder.name] = _decompose(files)
            run.record_finding("cycle", _NAME + folder.name, found[folder.name])
    return found


def _decompose(files: list[Path]) -> Profiled:
    try:
        first, *peers = (torch_trace.read(path) for path in files)
        parts = trace_parts.decompose(first, peers)
        trace_parts.cycles(parts)
    except WorkbenchError as error:
        return Profiled(why=str(error).rstrip("."))
    return Profiled(parts=parts, cpu=first.cpu)


def table(found: Mapping[str, Profiled]) -> pd.DataFrame:
    """``trace.table`` of every arm that was profiled, under each other."""
    tables = [
        trace_parts.table(entry.parts).assign(arm=arm).set_index("arm").reset_index()
        for arm, entry in found.items()
        if entry.parts
    ]
    return pd.concat(tables) if tables else pd.DataFrame(columns=["arm", "stage"])


def bars(found: Mapping[str, Profiled]) -> pd.DataFrame:
    """Milliseconds of a cycle by arm, stage and what the device did in them, for
    ``charts.decomposition``.
    """
    rows = []
    for arm, entry in found.items():
        own = entry.parts
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


def answer(found: Mapping[str, Profiled], verdict: VerdictFile) -> str:
    """Which rival explanation each arm's trace supports, beside the cycle without the profiler, or
    why it has no trace.
    """
    said = []
    for arm, entry in found.items():
        own, cycle = entry.parts, number(verdict.arms.get(arm, ArmEntry()).cycle_ms)
        where = " On a CPU, whose operators stand for kernels:" if entry.cpu else ""
        beside = f" Without the profiler a cycle takes {cycle:.3g} ms." if cycle > 0 else ""
        said.append(
            f"{arm}:{where} {trace_parts.sentence(own)}{beside}"
            if own
            else f"{arm}: no trace ({entry.why})."
        )
    return "\n".join(said) or "No cycle was profiled: add -p traces=true."
