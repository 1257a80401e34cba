"""The report's section on the searches of 05 and 06."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from workbench.experiment import findings
from workbench.experiment.names import COLLECTIVES
from workbench.experiment.runlog import Finding, Line
from workbench.judge.findings import SettingTried
from workbench.judge.verdict_file import VerdictFile
from workbench.report import (
    html,
    sweep_charts,
    tables,
)
from workbench.report.figures import forest, ratios
from workbench.report.html import Figure, Table


@dataclass(frozen=True)
class Sweeps:
    """What 05_steps and 06_collectives found, for a section of its own."""

    arms: Table
    comparisons: Table
    settings: Table
    figures: tuple[Figure, ...]


def sweeps(
    verdict: VerdictFile,
    records: Sequence[Line],
    profile: Mapping[str, Any],
    searched: pd.DataFrame | None = None,
) -> Sweeps | None:
    """The section on the sweeps; None without any. verdict: the part of it that is theirs."""
    comparisons, controls, found = tables.comparisons(verdict), tables.controls(verdict), []
    if searched is not None and searched[tables.SPEED].notna().any():
        found.append(
            html.figure(
                "Search over draft steps",
                "Speed of every candidate as a share of the best one’s, and in brackets how many"
                " pairs of blocks it was given: the search halves the candidates. The best of"
                " many looks better than it is; what it gains is told by fresh blocks, below.",
                lambda width: sweep_charts.sweep_map(searched, width),
            )
        )
    loads = tables.load_table(verdict)
    if len(loads):
        found.append(
            html.figure(
                "The best settings by requests at once",
                "Each point is a ratio of throughput with its interval; where a line "
                "crosses 1 the other arm takes over.",
                lambda width: sweep_charts.by_load(loads, width),
            )
        )
    collectives = comparisons["experiment"] == COLLECTIVES
    for (metric, method), rows in comparisons[collectives].groupby(
        ["metric", "method"], sort=False
    ):
        if rows["ratio"].notna().any():
            control = controls[
                (controls["experiment"] == COLLECTIVES)
                & (controls["metric"] == metric)
                & (controls["method"] == method)
            ]
            found.append(
                forest(
                    str(metric), str(method), rows, control, "Settings of the communication layer: "
                )
            )
    kept = next(
        (
            findings.read(r, list[SettingTried])
            for r in reversed(records)
            if isinstance(r, Finding) and (r.experiment, r.name) == (COLLECTIVES, "settings")
        ),
        [],
    )
    arms = tables.arms(verdict, profile)
    if arms.empty and not found and not kept:
        return None
    return Sweeps(
        html.table(arms),
        html.table(ratios(comparisons, controls)),
        html.table(tables.settings(kept)),
        tuple(found),
    )
