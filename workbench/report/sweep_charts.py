"""Charts of searches: candidates, loads, and intervals as they narrow with every pair."""

from __future__ import annotations

import altair as alt
import pandas as pd

from workbench.report import cells
from workbench.report.chart_parts import (
    ARM_COLOURS,
    INK,
    MUTED,
    WIDE,
    finished,
    nothing,
)


def sweep_map(table: pd.DataFrame, width: int = WIDE) -> alt.LayerChart:
    """Speed of every candidate of a search, as a share of the best one's: steps across, placements
    and trees down.

    table: ``best.sweep_map``. A cell tells the share and, in brackets, how many pairs of blocks the
        candidate was given.
    """
    share = "speed (% of the best)"
    known = table.dropna(subset=share)
    if known.empty:
        return nothing(
            "no search: there was nothing to choose from, or nothing was measured", width
        )
    words = [
        f"{cells.decimal(value, 0)} ({pairs})"
        for value, pairs in zip(known[share], known["pairs of blocks"])
    ]
    low = known[share].min()
    base = alt.Chart(known.assign(words=words, share=known[share])).encode(
        alt.X(
            "steps:O",
            title="draft steps",
            axis=alt.Axis(labelAngle=0, orient="bottom"),
            scale=alt.Scale(padding=0),
        ),
        alt.Y(
            "shape:N",
            title=None,
            sort=None,
            axis=alt.Axis(ticks=False, labelPadding=8, labelLimit=width * 0.4),
            scale=alt.Scale(padding=0),
        ),
    )
    squares = base.mark_rect(stroke="white", strokeWidth=2).encode(
        alt.Color(
            "share:Q",
            title=share,
            scale=alt.Scale(domain=[min(low, 99.0), 100], range=["#f3e3d7", "#c65d21"]),
            legend=alt.Legend(gradientLength=160, tickCount=3),
        )
    )
    text = base.mark_text().encode(
        text="words:N",
        color=alt.condition(f"datum.share > {(low + 300) / 4}", alt.value("white"), alt.value(INK)),
    )
    return finished(squares + text, width, 44 * known["shape"].nunique() + 10)


def by_load(table: pd.DataFrame, width: int = WIDE) -> alt.LayerChart:
    """Each ratio with its interval over the number of requests at once; where its line crosses 1
    the other arm takes over.

    table: ``best.load_table``.
    """
    if table.empty:
        return nothing("no comparison has a result", width)
    names = list(dict.fromkeys(table["comparison"]))
    colour = alt.Color(
        "comparison:N",
        title=None,
        scale=alt.Scale(
            domain=names, range=[ARM_COLOURS[i % len(ARM_COLOURS)] for i in range(len(names))]
        ),
    )
    loads = sorted(set(table["requests at once"]))
    base = alt.Chart(table).encode(
        alt.X(
            "requests at once:Q",
            scale=alt.Scale(type="log", base=2, nice=False, padding=24),
            axis=alt.Axis(values=loads, format="d", grid=False),
        ),
        colour,
    )
    y = dict(
        type="quantitative",
        title="ratio of throughput (1: no difference)",
        scale=alt.Scale(zero=False, padding=10),
    )
    one = (
        alt.Chart(pd.DataFrame({"ratio": [1.0]}))
        .mark_rule(color=MUTED, strokeDash=[3, 3])
        .encode(alt.Y(field="ratio", **y))
    )
    return finished(
        one
        + base.mark_line(strokeWidth=1.5).encode(alt.Y(field="ratio", **y))
        + base.mark_rule(strokeWidth=2, opacity=0.6).encode(alt.Y(field="low", **y), alt.Y2("high"))
        + base.mark_circle(size=70, opacity=1).encode(alt.Y(field="ratio", **y)),
        width,
        260,
    )


def narrowing(table: pd.DataFrame, width: int = WIDE) -> alt.LayerChart:
    """How a ratio settles start by start: each start's own, the ratio of all so far, and its
    interval, which narrows.

    table: ``watching.narrowing``.
    """
    if table.empty:
        return nothing("no server start yet", width)
    y = dict(
        type="quantitative",
        title=f"ratio of {table['of'].iloc[0]}",
        scale=alt.Scale(zero=False, padding=10),
    )
    ticks = list(range(1, len(table) + 1, 1 + len(table) // 16))
    base = alt.Chart(table).encode(
        alt.X(
            "start:Q",
            title="server starts",
            axis=alt.Axis(values=ticks, format="d", grid=False),
            scale=alt.Scale(nice=False, padding=16),
        )
    )
    known = base.transform_filter("isValid(datum.low)")
    one = (
        alt.Chart(pd.DataFrame({"ratio": [1.0]}))
        .mark_rule(color=MUTED, strokeDash=[3, 3])
        .encode(alt.Y(field="ratio", **y))
    )
    return finished(
        one
        + known.mark_area(color=ARM_COLOURS[0], opacity=0.16).encode(
            alt.Y(field="low", **y), alt.Y2("high")
        )
        + known.mark_rule(color=ARM_COLOURS[0], strokeWidth=1.5, opacity=0.6).encode(
            alt.Y(field="low", **y), alt.Y2("high")
        )
        + base.mark_line(color=ARM_COLOURS[0], strokeWidth=2).encode(alt.Y(field="ratio", **y))
        + base.mark_circle(color=MUTED, size=40, opacity=0.8).encode(
            alt.Y(field="ratio of the start", **y)
        ),
        width,
        220,
    )
