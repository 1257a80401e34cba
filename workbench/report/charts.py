"""Charts of a run: pure functions from the tables of workbench.report.tables to altair charts, and
how they are shown without a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from workbench.report import cells, log_tables
from workbench.report.chart_parts import (
    ARM_COLOURS,
    BAND,
    INK,
    MUTED,
    NARROW,
    WIDE,
    WITHOUT_DRAFT,
    colour,
    compared,
    finished,
    nothing,
    order,
    stage_names,
)


def throughput_by_pair(
    blocks: pd.DataFrame, arms: Sequence[str] | None = None, width: int = WIDE
) -> alt.LayerChart:
    """Tokens a second of each block over the number of its pair; what moves both arms of a pair
    alike cancels in their ratio.

    blocks: ``tables.blocks`` of one experiment.
    arms: all arms of the report, so that an arm keeps its colour in every chart.
    """
    base = alt.Chart(log_tables.thinned(blocks)).encode(
        alt.X(
            "pair:Q",
            title="pair of blocks",
            axis=alt.Axis(tickMinStep=1, format="d", grid=False),
            scale=alt.Scale(nice=False, padding=12),
        ),
        alt.Y("throughput (tokens/s):Q", scale=alt.Scale(zero=False, padding=10)),
        colour(blocks, arms, width),
    )
    return finished(
        base.mark_line(strokeWidth=1, opacity=0.45) + base.mark_circle(size=46, opacity=1),
        width,
        250,
    )


def throughput_by_start(
    blocks: pd.DataFrame, arms: Sequence[str] | None = None, width: int = WIDE
) -> alt.LayerChart:
    """Tokens a second of each block by the server start it ran in; the bar is the start's mean, the
    unit of comparison.

    blocks, arms: as for ``throughput_by_pair``.
    """
    base = alt.Chart(log_tables.thinned(blocks)).encode(
        alt.X("start:O", title="server start", axis=alt.Axis(labelAngle=0)),
        colour(blocks, arms, width),
    )
    y = dict(
        field="throughput (tokens/s)",
        type="quantitative",
        title="throughput (tokens/s)",
        scale=alt.Scale(zero=False, padding=10),
    )
    return finished(
        base.mark_circle(size=40, opacity=0.5).encode(alt.Y(**y))
        + base.mark_tick(thickness=3, size=26).encode(alt.Y(**y, aggregate="mean")),
        width,
        250,
    )


def forest(
    comparisons: pd.DataFrame, controls: pd.DataFrame | None = None, width: int = WIDE
) -> alt.LayerChart:
    """Each ratio with its interval, the line of no difference at 1, and behind each its control as
    a grey band.

    comparisons, controls: ``tables.comparisons`` and ``tables.controls``; a control is the
    yardstick of what was compared in its experiment by its metric and method. A row without numbers
    keeps its place and says "refused" or "unknown".
    """
    if comparisons.empty and (controls is None or controls.empty):
        return nothing("nothing was compared", width)
    parts = [comparisons.assign(control=False)] + (
        [] if controls is None or controls.empty else [controls.assign(control=True)]
    )
    rows = pd.concat(parts, ignore_index=True)
    telling = [column for column in ("metric", "experiment") if rows[column].nunique() > 1]
    rows["label"] = [_forest_label(row, telling, width) for row in rows.to_dict("records")]
    lines = 1 + rows["label"].str.count("\n").max()
    same = ["experiment", "metric", "method"]
    known = rows.drop(columns="reasons").dropna(subset="ratio")
    bands = known.merge(
        known.loc[known["control"], [*same, "low", "high"]], on=same, suffixes=("_own", "")
    )
    ends = [1.0, *known[["ratio", "low", "high"]].stack()]
    margin = 0.08 * (max(ends) - min(ends)) or 0.1
    scale = alt.Scale(domain=[min(ends) - margin, max(ends) + margin], nice=False, zero=False)
    x = dict(
        type="quantitative",
        title="ratio (1: no difference)",
        scale=scale,
        axis=alt.Axis(grid=False, tickCount=width // 90),
    )
    label = alt.Axis(
        labelExpr="split(datum.label, '\\n')",
        labelLimit=width * 0.45,
        labelLineHeight=15,
        labelPadding=10,
        labelOffset=-7.5 * (lines - 1),
        ticks=False,
        domain=False,
    )
    y = alt.Y(
        "label:N",
        title=None,
        sort=None,
        scale=alt.Scale(domain=rows["label"].tolist(), padding=0),
        axis=label,
    )
    base = alt.Chart(known).encode(
        y,
        color=alt.when(alt.datum.control).then(alt.value(WITHOUT_DRAFT)).otherwise(alt.value(INK)),
    )
    return finished(
        alt.Chart(bands).mark_rect(color=BAND).encode(y, alt.X(field="low", **x), alt.X2("high"))
        + alt.Chart(pd.DataFrame({"ratio": [1.0]}))
        .mark_rule(color=MUTED, strokeDash=[3, 3])
        .encode(alt.X(field="ratio", **x))
        + base.mark_rule(strokeWidth=2.5).encode(alt.X(field="low", **x), alt.X2("high"))
        + base.mark_circle(size=90, opacity=1).encode(alt.X(field="ratio", **x)),
        width,
        (18 + 16 * lines) * len(rows),
    )


def accept_by_position(
    table: pd.DataFrame, arms: Sequence[str] | None = None, width: int = WIDE
) -> alt.LayerChart:
    """Share of the cycles in which the draft token at each position was accepted, with its
    interval, the arms side by side.

    table: ``tables.accept_by_position``.
    arms: all arms of the report.
    """
    share = "accepted (% of cycles)"
    y = dict(
        type="quantitative",
        title=share,
        scale=alt.Scale(domain=[0, 110], nice=False),
        axis=alt.Axis(values=list(range(0, 101, 20))),
    )
    base = alt.Chart(table.assign(top=table["high"].fillna(table[share]))).encode(
        alt.X(
            "position:O",
            title="position of the draft token",
            axis=alt.Axis(labelAngle=0),
            scale=alt.Scale(paddingInner=0.35),
        ),
        alt.XOffset("arm:N", sort=order(table["arm"]), scale=alt.Scale(paddingInner=0.12)),
    )
    bars = base.mark_bar().encode(alt.Y(field=share, **y), colour(table, arms, width))
    whiskers = (
        base.transform_filter("isValid(datum.low)")
        .mark_rule(color=INK)
        .encode(alt.Y(field="low", **y), alt.Y2("high"))
    )
    numbers = base.mark_text(dy=-8, color=MUTED).encode(
        alt.Y(field="top", **y), alt.Text(field=share, type="quantitative", format=".0f")
    )
    room = len(table) * 24 <= width  # else the numbers would run into each other
    return finished(bars + whiskers + numbers if room else bars + whiskers, width, 230)


def collectives(
    table: pd.DataFrame, arms: Sequence[str] | None = None, width: int = WIDE
) -> alt.LayerChart:
    """Collectives a cycle by stage, the arms under each other, each bar with the kinds it is made
    of.

    table: ``tables.collectives``.
    arms: all arms of the report.
    """
    counts = table["collectives (per cycle)"]
    table = table.assign(
        count=counts,
        end=counts.fillna(0),
        text=[kinds or cells.decimal(n) for kinds, n in zip(table["kinds"], counts)],
    )
    room = 1.9 if width > NARROW else 2.8  # the words stand to the right of the longest bar
    x = dict(
        type="quantitative",
        title="collectives (per cycle)",
        axis=alt.Axis(tickMinStep=1, tickCount=width // 60),
        scale=alt.Scale(domain=[0, room * (table["end"].max() or 1)], nice=False),
    )
    rows, seen = (
        [],
        order(table["arm"]),
    )  # only what was counted has a row, and a stage is named at its first
    for stage in stage_names(table):
        arms_of_it = [arm for arm in seen if arm in set(table.loc[table["stage"] == stage, "arm"])]
        rows += [
            (stage, arm, f"{len(rows) + n}|{'' if n else stage}")
            for n, arm in enumerate(arms_of_it)
        ] + [("", "", f"{len(rows) + len(arms_of_it)}|")]
    base = alt.Chart(
        table.merge(pd.DataFrame(rows, columns=["stage", "arm", "row"]), on=["stage", "arm"])
    ).encode(
        alt.Y(
            "row:N",
            title=None,
            scale=alt.Scale(domain=[row for _, _, row in rows[:-1]], paddingInner=0.15),
            axis=alt.Axis(ticks=False, labelPadding=8, labelExpr="split(datum.label, '|')[1]"),
        )
    )
    bars = base.mark_bar().encode(alt.X(field="count", **x), colour(table, arms, width))
    words = base.mark_text(align="left", dx=5, color=MUTED).encode(
        alt.X(field="end", **x), text="text:N"
    )
    return finished(bars + words, width, 18 * len(rows))


def two_runs(table: pd.DataFrame, width: int = WIDE) -> alt.LayerChart:
    """The same comparisons as two runs made them, one under the other, and the line of no
    difference at 1.

    table: ``versus.points``.
    """
    table = table.assign(label=[compared(label, width) for label in table["label"]])
    labels = list(dict.fromkeys(table["label"]))
    x = dict(
        type="quantitative",
        title="ratio (1: no difference)",
        scale=alt.Scale(zero=False, padding=20),
        axis=alt.Axis(tickCount=width // 90),
    )
    base = alt.Chart(table).encode(
        alt.Y(
            "label:N",
            title=None,
            sort=labels,
            axis=alt.Axis(
                ticks=False,
                domain=False,
                labelPadding=8,
                labelLimit=width * 0.45,
                labelExpr="split(datum.label, '\\n')",
            ),
            scale=alt.Scale(paddingInner=0.3),
        ),
        alt.YOffset("run:N", sort=["A", "B"]),
        alt.Color("run:N", title=None, scale=alt.Scale(domain=["A", "B"], range=ARM_COLOURS[:2])),
    )
    one = (
        alt.Chart(pd.DataFrame({"ratio": [1.0]}))
        .mark_rule(color=MUTED, strokeDash=[3, 3])
        .encode(alt.X(field="ratio", **x))
    )
    return finished(
        one
        + base.mark_rule(strokeWidth=2.5).encode(alt.X(field="low", **x), alt.X2("high"))
        + base.mark_circle(size=80, opacity=1).encode(alt.X(field="ratio", **x)),
        width,
        52 * len(labels) + 10,
    )


def _forest_label(row: Mapping[str, Any], telling: Sequence[str], width: int) -> str:
    """Lines of a row's label: what is compared, what tells it from other rows, its interval."""
    interval = (
        f"{cells.fixed(row['ratio'])} [{cells.fixed(row['low'])}, {cells.fixed(row['high'])}]"
        if row["valid"]
        else "refused"
    )
    about = ", ".join(
        filter(None, [*(row[column] for column in telling), "control" if row["control"] else ""])
    )
    return "\n".join(filter(None, [compared(row["comparison"], width), about, interval]))
