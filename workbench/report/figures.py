"""The figures of a report, each with the sentence that says how to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from workbench.experiment.names import is_sweep
from workbench.experiment.runlog import Block, Line
from workbench.judge.verdict_file import VerdictFile
from workbench.report import (
    cells,
    charts,
    cycle_charts,
    html,
    log_tables,
    tables,
)
from workbench.report.html import Figure


def cycle_figures(bars: pd.DataFrame | None) -> Iterator[Figure]:
    if bars is not None and bars["time (ms/cycle)"].notna().any():
        yield html.figure(
            "Cycles measured and predicted",
            "The stages of a cycle as measured inside the server, beside what the model of"
            " 02_budget predicts from this machine’s inputs.",
            lambda width: cycle_charts.stage_times(bars, width),
        )


def figures(
    verdict: VerdictFile, records: Sequence[Line], everyone: Sequence[str] = ()
) -> Iterator[Figure]:
    """Every chart that this run has numbers for, in the order of the argument: how much, how sure,
    and why.

    everyone: the arms of the whole page, by which an arm has its colour.
    """
    blocks = tables.with_result(log_tables.blocks(records), verdict)
    blocks = blocks.loc[[not is_sweep(experiment) for experiment in blocks["experiment"]]]
    arms = list(everyone or dict.fromkeys([*verdict.arms, *blocks["arm"]]))
    comparisons, controls = tables.comparisons(verdict), tables.controls(verdict)
    first = comparisons.sort_values("claims", ascending=False, kind="stable")
    for (metric, method), rows in first.groupby(["metric", "method"], sort=False):
        same = controls[controls["metric"] == metric]
        control = same[same["method"] == method] if (same["method"] == method).any() else same
        if rows["ratio"].notna().any() or control["ratio"].notna().any():
            yield forest(str(metric), str(method), rows, control)
    for experiment, part in blocks.groupby("experiment", sort=False):
        yield from _throughput(str(experiment), part, arms)
    positions = tables.accept_by_position(verdict)
    if positions["accepted (% of cycles)"].notna().any():
        yield html.figure(
            "Accepted drafts by position",
            "Share of all cycles in which the draft token at this position was accepted, with its "
            "interval. The shares of an arm and the bonus token add up to its accept length.",
            lambda width: charts.accept_by_position(positions, arms, width),
        )
    collectives, stages = tables.collectives(verdict), tables.stage_times(verdict)
    if len(collectives):
        yield html.figure(
            "Collectives a cycle",
            "Counted inside the server on rank 0, by stage of the cycle.",
            lambda width: charts.collectives(collectives, arms, width),
        )
    if stages["time (ms/cycle)"].notna().any():
        yield html.figure(
            "Where a cycle’s time goes",
            "Measured inside the server, by stage; a stage that is not shown was not measured.",
            lambda width: cycle_charts.stage_times(stages, width),
        )


def forest(
    metric: str, method: str, rows: pd.DataFrame, control: pd.DataFrame, about: str = ""
) -> Figure:
    """One figure a metric and method: within starts and across them differ in scale."""
    how = {"paired": ", within server starts", "starts": ", across server starts"}.get(method, "")
    better = {
        "throughput": "Right of 1 the first arm is faster. ",
        "cycle time": "Left of 1 the first arm is faster. ",
    }.get(metric, "")
    band = (
        "The grey band is the control: how far an arm differs from itself on the same schedule."
        if control["ratio"].notna().any()
        else "There is no control of this kind to measure it by."
    )
    return html.figure(
        f"{about}{'r' if about else 'R'}atio of {metric}{how}",
        better + band,
        lambda width: charts.forest(rows, control, width),
    )


def _throughput(experiment: str, blocks: pd.DataFrame, arms: Sequence[str]) -> Iterator[Figure]:
    """By pair where one server ran several arms, by start where arms met across servers."""
    by_start = blocks.groupby("start")["arm"]
    paired = blocks[(by_start.transform("nunique") > 1) & blocks["pair"].notna()]
    size = int(max(log_tables.thinned(blocks)["blocks"]))
    each = (
        "Each point is a block."
        if size == 1
        else f"Each point is the mean of up to {size} neighbouring blocks."
    )
    if len(paired):
        yield html.figure(
            f"Throughput by pair of blocks: {experiment}",
            f"{each} The blocks of a pair share their prompts and ran one after the other.",
            lambda width: charts.throughput_by_pair(paired, arms, width),
        )
    if paired.empty or by_start.nunique().min() < blocks["arm"].nunique():
        yield html.figure(
            f"Throughput by server start: {experiment}",
            f"{each} The bar is the mean of a start. Servers of one arm differ, so across servers"
            " the start is the unit.",
            lambda width: charts.throughput_by_start(blocks, arms, width),
        )


def ratios(comparisons: pd.DataFrame, controls: pd.DataFrame) -> pd.DataFrame:
    """Comparisons and controls for people: each interval in one cell, "refused" where there is no
    result.
    """
    rows = pd.concat(
        [comparisons, controls.assign(comparison=controls["comparison"] + " (control)")],
        ignore_index=True,
    )
    words = {
        "ratio": [cells.fixed(row.ratio) if row.valid else "refused" for row in rows.itertuples()]
    }
    for name, ratio, low, high in (
        ("interval over starts", None, "low", "high"),
        ("these servers alone", "these", "these low", "these high"),
        ("control (interval)", "control", "control low", "control high"),
    ):
        words[name] = [_span(row, ratio, low, high) for row in rows.to_dict("records")]
    table = rows.assign(**words, claim=["yes" if claims else "" for claims in rows["claims"]])
    return table[
        [
            "comparison",
            "metric",
            "claim",
            *words,
            "level (%)",
            "resolution (%)",
            "starts",
            "pairs",
            "experiment",
        ]
    ]


def _span(row: dict[str, Any], ratio: str | None, low: str, high: str) -> str:
    """An interval in words, after its ratio where one is named."""
    if pd.isna(row[low]):
        return cells.NOT_APPLICABLE
    ends = f"{cells.fixed(row[low])} to {cells.fixed(row[high])}"
    return f"{cells.fixed(row[ratio])} ({ends})" if ratio else ends


def without_tokens(record: Line) -> Line:
    if not isinstance(record, Block):
        return record
    return record.model_copy(
        update={"requests": tuple(r.model_copy(update={"output_ids": ()}) for r in record.requests)}
    )
