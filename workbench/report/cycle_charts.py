"""Charts of a cycle: stages, what the model misses, verify by width, traces."""

from __future__ import annotations

import altair as alt
import pandas as pd

from workbench.report.chart_parts import (
    ARM_COLOURS,
    BAND,
    MUTED,
    STAGE_COLOURS,
    WIDE,
    WORK_COLOURS,
    finished,
    legend,
    nothing,
    order,
    stage_names,
)


def stage_times(table: pd.DataFrame, width: int = WIDE) -> alt.Chart:
    """How a cycle's milliseconds divide into its stages, one bar an arm.

    table: ``tables.stage_times``.
    """
    stages = stage_names(table)
    chart = (
        alt.Chart(table.assign(order=table["stage"].map(stages.index)))
        .mark_bar()
        .encode(
            alt.X("time (ms/cycle):Q", stack="zero"),
            alt.Order("order:Q"),
            alt.Y(
                "arm:N",
                title=None,
                sort=order(table["arm"]),
                axis=alt.Axis(ticks=False, labelPadding=8),
                scale=alt.Scale(padding=0.3),
            ),
            alt.Color(
                "stage:N",
                title=None,
                scale=alt.Scale(domain=stages, range=STAGE_COLOURS),
                legend=legend(stages, width),
            ),
        )
    )
    return finished(chart, width, 42 * table["arm"].nunique())


def misses(table: pd.DataFrame, allowed: float, width: int = WIDE) -> alt.LayerChart:
    """How far predictions of the cycle are off, one line an arm; the band is what they may be.

    table: ``cycle_check.misses``.
    allowed: percent either way.
    """
    if table.empty:
        return nothing("no prediction that anything could be held against", width)
    reach = 1.15 * max([allowed, *table["off (%)"].abs()])
    x = dict(
        type="quantitative",
        title="prediction off by (%)",
        scale=alt.Scale(domain=[-reach, reach], nice=False),
        axis=alt.Axis(tickCount=width // 90),
    )
    labels = list(dict.fromkeys(table["label"]))
    y = alt.Y(
        "label:N",
        title=None,
        sort=labels,
        axis=alt.Axis(ticks=False, labelPadding=8, labelLimit=width * 0.45),
    )
    band = (
        alt.Chart(pd.DataFrame({"low": [-allowed], "high": [allowed]}))
        .mark_rect(color=BAND)
        .encode(alt.X(field="low", **x), alt.X2("high"))
    )
    zero = (
        alt.Chart(pd.DataFrame({"off": [0.0]}))
        .mark_rule(color=MUTED, strokeDash=[3, 3])
        .encode(alt.X(field="off", **x))
    )
    points = (
        alt.Chart(table)
        .mark_circle(size=90, opacity=1, color=ARM_COLOURS[0])
        .encode(alt.X(field="off (%)", **x), y)
    )
    return finished(band + zero + points, width, 34 * max(1, len(labels)) + 20)


def verify_width(table: pd.DataFrame, width: int = WIDE) -> alt.LayerChart:
    """Time of a verify against its width: predicted as a line, measured as points.

    table: ``cycle.widths``.
    """
    kinds = {"predicted (ms)": "predicted", "measured (ms)": "measured"}
    rows = (
        table.melt("tokens verified", list(kinds), "kind", "verify (ms)")
        .dropna()
        .replace({"kind": kinds})
    )
    base = alt.Chart(rows).encode(
        alt.X(
            "tokens verified:Q",
            axis=alt.Axis(tickMinStep=1, format="d", grid=False),
            scale=alt.Scale(nice=False, padding=12),
        ),
        alt.Y("verify (ms):Q", scale=alt.Scale(zero=True, padding=10)),
        alt.Color(
            "kind:N",
            title=None,
            scale=alt.Scale(
                domain=list(kinds.values()), range=(STAGE_COLOURS[2], STAGE_COLOURS[1])
            ),
        ),
    )
    return finished(
        base.transform_filter(alt.datum.kind == "predicted").mark_line(strokeWidth=2.5)
        + base.transform_filter(alt.datum.kind == "measured").mark_circle(size=90, opacity=1),
        width,
        220,
    )


def decomposition(table: pd.DataFrame, width: int = WIDE) -> alt.Chart:
    """What the device did in a profiled cycle: a bar an arm and stage, by class of kernel and kind
    of gap.

    table: ``traces.bars``.
    """
    if table.empty:
        return nothing("no cycle was profiled", width)
    whats = list(dict.fromkeys(table["what"]))
    bars = table.assign(
        order=table["what"].map(whats.index), label=table["arm"] + ", " + table["stage"]
    )
    chart = (
        alt.Chart(bars[bars["time (ms/cycle)"] > 0])
        .mark_bar()
        .encode(
            alt.X("time (ms/cycle):Q", stack="zero"),
            alt.Order("order:Q"),
            alt.Y(
                "label:N",
                title=None,
                sort=[
                    label
                    for arm in order(table["arm"])
                    for label in dict.fromkeys(bars.loc[bars["arm"] == arm, "label"])
                ],
                axis=alt.Axis(ticks=False, labelPadding=8, labelLimit=width * 0.4),
                scale=alt.Scale(padding=0.25),
            ),
            alt.Color(
                "what:N",
                title=None,
                scale=alt.Scale(domain=whats, range=WORK_COLOURS[: len(whats)]),
            ),
        )
    )
    return finished(chart, width, 26 * bars["label"].nunique())
