"""Profiled cycles of a run: traces in its folder decomposed once and kept in its log, so that a
recording needs no trace.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from workbench.answers import torch_trace, trace_parts
from workbench.experiment import findings
from workbench.experiment.arms import Arm
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
    partial: why a wait cannot be told from communication in them; empty where it can. The kernels
        of one rank are counted all the same.
    """

    parts: dict[str, trace_parts.Part] = {}
    cpu: bool = True
    why: str = "unknown"
    partial: str = ""

    @property
    def whole(self) -> bool:
        """Whether something can be concluded from them."""
        return bool(self.parts) and not self.partial


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
            found[folder.name] = _decompose(files, run.profile.tp, folder.name)
            run.record_finding("cycle", _NAME + folder.name, found[folder.name])
    return found


def _decompose(files: list[Path], ranks: int, arm: str) -> Profiled:
    try:
        first, *peers = (torch_trace.read(path) for path in files)
        partial = _partial(files, ranks, arm)
        parts = trace_parts.decompose(first, [] if partial else peers)
        trace_parts.cycles(parts)
    except WorkbenchError as error:
        return Profiled(why=str(error).rstrip("."))
    return Profiled(parts=parts, cpu=first.cpu, partial=partial)


def _partial(files: list[Path], ranks: int, arm: str) -> str:
    """Why these files do not tell a wait from communication; empty when they do.

    SGLang names a file after its rank (utils/profile_utils.py:357 tp_rank).
    """
    found = Counter(int(m[1]) for path in files if (m := _RANK.search(path.name)))
    twice = sorted(rank for rank, count in found.items() if count > 1)
    missing = sorted(set(range(ranks)) - set(found))
    if missing:
        return (
            f"the trace of rank {_listed(missing)} is missing, and a wait for that rank would be"
            " told as communication"
        )
    if twice or len(files) != ranks:
        return (
            f"there are {len(files)} files for {ranks} ranks"
            + (f", rank {_listed(twice)} more than once" if twice else "")
            + ": they are of different runs"
        )
    size = Arm.parse(arm).group
    if size and 1 < size < ranks:
        return (
            f"the draft's collectives are among {size} of {ranks} ranks each, and a trace does not"
            " say which"
        )
    return ""


_RANK = re.compile(r"(?:^|-)TP-(\d+)(?=[-.])")


def _listed(numbers: list[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))


def table(found: Mapping[str, Profiled]) -> pd.DataFrame:
    """``trace.table`` of every arm that was profiled, under each other."""
    tables = [
        trace_parts.table(entry.parts).assign(arm=arm).set_index("arm").reset_index()
        for arm, entry in found.items()
        if entry.whole
    ]
    return pd.concat(tables) if tables else pd.DataFrame(columns=["arm", "stage"])


def bars(found: Mapping[str, Profiled]) -> pd.DataFrame:
    """Milliseconds of a cycle by arm, stage and what the device did in them, for
    ``charts.decomposition``.
    """
    rows = []
    for arm, entry in found.items():
        own = entry.parts if entry.whole else {}
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
        if entry.partial:
            said.append(f"{arm}: no conclusion from its trace: {entry.partial}.")
            continue
        where = " On a CPU, whose operators stand for kernels:" if entry.cpu else ""
        beside = f" Without the profiler a cycle takes {cycle:.3g} ms." if cycle > 0 else ""
        said.append(
            f"{arm}:{where} {trace_parts.sentence(own)}{beside}"
            if own
            else f"{arm}: no trace ({entry.why})."
        )
    return "\n".join(said) or "No cycle was profiled: add -p traces=true."
