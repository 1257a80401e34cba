"""Charts of a run: pure functions from the tables of workbench.report.tables to altair charts, and
how they are shown without a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd
import vl_convert
from IPython.display import SVG

import workbench.report.lean_imports  # noqa: F401  (before altair)
from workbench.report import tables

WIDE, NARROW = 720, 340  # pixels of a whole chart: on a page or a screen, on a phone
FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
INK, MUTED, FAINT, BAND = "#1f2933", "#66717d", "#e4e7eb", "#eceef1"
# Near Okabe and Ito's order of hues, which colour-blind readers tell apart; grey is kept for the
# arm without a draft.
ARM_COLOURS = ("#c65d21", "#2b6ca3", "#2f8f75", "#a35d94", "#b8902c", "#5a9bc9")
WITHOUT_DRAFT = "#7b8794"
# Attention, matrix, other, collective and waiting for a rank, then the two gaps in grey.
WORK_COLOURS = ("#9fb8cf", "#35618f", "#5f9e8f", "#c65d21", "#e3a987", "#b9c0c8", "#dfe3e7")
STAGE_COLOURS = ("#d9a441", "#35618f", "#9fb8cf", "#8c6bb1")


def throughput_by_pair(
    blocks: pd.DataFrame, arms: Sequence[str] | None = None, width: int = WIDE
) -> alt.LayerChart:
    """Tokens a second of each block over the number of its pair; what moves both arms of a pair
    alike cancels in their ratio.

    blocks: ``tables.blocks`` of one experiment.
    arms: all arms of the report, so that an arm keeps its colour in every chart.
    """
    base = alt.Chart(tables.thinned(blocks)).encode(
        alt.X(
            "pair:Q",
            title="pair of blocks",
            axis=alt.Axis(tickMinStep=1, format="d", grid=False),
            scale=alt.Scale(nice=False, padding=12),
        ),
        alt.Y("throughput (tokens/s):Q", scale=alt.Scale(zero=False, padding=10)),
        _colour(blocks, arms, width),
    )
    return _finished(
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
    base = alt.Chart(tables.thinned(blocks)).encode(
        alt.X("start:O", title="server start", axis=alt.Axis(labelAngle=0)),
        _colour(blocks, arms, width),
    )
    y = dict(
        field="throughput (tokens/s)",
        type="quantitative",
        title="throughput (tokens/s)",
        scale=alt.Scale(zero=False, padding=10),
    )
    return _finished(
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
        return _nothing("nothing was compared", width)
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
    return _finished(
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
        alt.XOffset("arm:N", sort=_order(table["arm"]), scale=alt.Scale(paddingInner=0.12)),
    )
    bars = base.mark_bar().encode(alt.Y(field=share, **y), _colour(table, arms, width))
    whiskers = (
        base.transform_filter("isValid(datum.low)")
        .mark_rule(color=INK)
        .encode(alt.Y(field="low", **y), alt.Y2("high"))
    )
    numbers = base.mark_text(dy=-8, color=MUTED).encode(
        alt.Y(field="top", **y), alt.Text(field=share, type="quantitative", format=".0f")
    )
    room = len(table) * 24 <= width  # else the numbers would run into each other
    return _finished(bars + whiskers + numbers if room else bars + whiskers, width, 230)


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
        text=[kinds or tables.decimal(n) for kinds, n in zip(table["kinds"], counts)],
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
        _order(table["arm"]),
    )  # only what was counted has a row, and a stage is named at its first
    for stage in _stages(table):
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
    bars = base.mark_bar().encode(alt.X(field="count", **x), _colour(table, arms, width))
    words = base.mark_text(align="left", dx=5, color=MUTED).encode(
        alt.X(field="end", **x), text="text:N"
    )
    return _finished(bars + words, width, 18 * len(rows))


def stage_times(table: pd.DataFrame, width: int = WIDE) -> alt.Chart:
    """How a cycle's milliseconds divide into its stages, one bar an arm.

    table: ``tables.stage_times``.
    """
    stages = _stages(table)
    chart = (
        alt.Chart(table.assign(order=table["stage"].map(stages.index)))
        .mark_bar()
        .encode(
            alt.X("time (ms/cycle):Q", stack="zero"),
            alt.Order("order:Q"),
            alt.Y(
                "arm:N",
                title=None,
                sort=_order(table["arm"]),
                axis=alt.Axis(ticks=False, labelPadding=8),
                scale=alt.Scale(padding=0.3),
            ),
            alt.Color(
                "stage:N",
                title=None,
                scale=alt.Scale(domain=stages, range=STAGE_COLOURS),
                legend=_legend(stages, width),
            ),
        )
    )
    return _finished(chart, width, 42 * table["arm"].nunique())


def misses(table: pd.DataFrame, allowed: float, width: int = WIDE) -> alt.LayerChart:
    """How far predictions of the cycle are off, one line an arm; the band is what they may be.

    table: ``predictions.misses``.
    allowed: percent either way.
    """
    if table.empty:
        return _nothing("no prediction that anything could be held against", width)
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
    kinds = list(dict.fromkeys(table["prediction"]))
    points = (
        alt.Chart(table)
        .mark_circle(size=90, opacity=1)
        .encode(
            alt.X(field="off (%)", **x),
            y,
            alt.Color(
                "prediction:N",
                title=None,
                scale=alt.Scale(domain=kinds, range=ARM_COLOURS[: len(kinds)]),
            ),
        )
    )
    return _finished(band + zero + points, width, 34 * max(1, len(labels)) + 20)


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
    return _finished(
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
        return _nothing("no cycle was profiled", width)
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
                    for arm in _order(table["arm"])
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
    return _finished(chart, width, 26 * bars["label"].nunique())


def sweep_map(table: pd.DataFrame, width: int = WIDE) -> alt.LayerChart:
    """Speed of every candidate of a search, as a share of the best one's: steps across, placements
    and trees down.

    table: ``best.sweep_map``. A cell tells the share and, in brackets, how many pairs of blocks the
        candidate was given.
    """
    share = "speed (% of the best)"
    known = table.dropna(subset=share)
    if known.empty:
        return _nothing(
            "no search: there was nothing to choose from, or nothing was measured", width
        )
    words = [
        f"{tables.decimal(value, 0)} ({pairs})"
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
    cells = base.mark_rect(stroke="white", strokeWidth=2).encode(
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
    return _finished(cells + text, width, 44 * known["shape"].nunique() + 10)


def by_load(table: pd.DataFrame, width: int = WIDE) -> alt.LayerChart:
    """Each ratio with its interval over the number of requests at once; where its line crosses 1
    the other arm takes over.

    table: ``best.load_table``.
    """
    if table.empty:
        return _nothing("no comparison has a result", width)
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
    return _finished(
        one
        + base.mark_line(strokeWidth=1.5).encode(alt.Y(field="ratio", **y))
        + base.mark_rule(strokeWidth=2, opacity=0.6).encode(alt.Y(field="low", **y), alt.Y2("high"))
        + base.mark_circle(size=70, opacity=1).encode(alt.Y(field="ratio", **y)),
        width,
        260,
    )


def narrowing(table: pd.DataFrame, width: int = WIDE) -> alt.LayerChart:
    """How a ratio settles pair by pair: each pair's own, the ratio of all so far, and its interval,
    which narrows.

    table: ``watching.narrowing``.
    """
    if table.empty:
        return _nothing("no pair of blocks yet", width)
    y = dict(
        type="quantitative", title="ratio of throughput", scale=alt.Scale(zero=False, padding=10)
    )
    ticks = list(range(1, len(table) + 1, 1 + len(table) // 16))
    base = alt.Chart(table).encode(
        alt.X(
            "pair:Q",
            title="pairs of blocks",
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
    return _finished(
        one
        + known.mark_area(color=ARM_COLOURS[0], opacity=0.16).encode(
            alt.Y(field="low", **y), alt.Y2("high")
        )
        + known.mark_rule(color=ARM_COLOURS[0], strokeWidth=1.5, opacity=0.6).encode(
            alt.Y(field="low", **y), alt.Y2("high")
        )
        + base.mark_line(color=ARM_COLOURS[0], strokeWidth=2).encode(alt.Y(field="ratio", **y))
        + base.mark_circle(color=MUTED, size=40, opacity=0.8).encode(
            alt.Y(field="ratio of the pair", **y)
        ),
        width,
        220,
    )


def two_runs(table: pd.DataFrame, width: int = WIDE) -> alt.LayerChart:
    """The same comparisons as two runs made them, one under the other, and the line of no
    difference at 1.

    table: ``versus.points``.
    """
    table = table.assign(label=[_compared(label, width) for label in table["label"]])
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
    return _finished(
        one
        + base.mark_rule(strokeWidth=2.5).encode(alt.X(field="low", **x), alt.X2("high"))
        + base.mark_circle(size=80, opacity=1).encode(alt.X(field="ratio", **x)),
        width,
        52 * len(labels) + 10,
    )


def precision(table: pd.DataFrame, width: int = WIDE) -> alt.LayerChart:
    """Standard error of a ratio against the time spent, on logarithmic axes: each way of measuring
    falls by half a decade in a decade, and the lower line is the cheaper way.

    table: ``bench.table``.
    """
    scale = dict(type="log", nice=False, padding=12)
    base = alt.Chart(table[table["standard error (%)"] > 0]).encode(
        alt.X(
            "time (s):Q",
            title="time spent, starting servers included (s)",
            scale=alt.Scale(**scale),
            axis=alt.Axis(grid=False, format="~s"),
        ),
        alt.Y(
            "standard error (%):Q",
            title="standard error of the ratio (%)",
            scale=alt.Scale(**scale),
            axis=alt.Axis(format="~g"),
        ),
        alt.Color(
            "way:N",
            title=None,
            scale=alt.Scale(domain=list(dict.fromkeys(table["way"])), range=ARM_COLOURS[:2]),
        ),
    )
    return _finished(
        base.mark_line(strokeWidth=1.5) + base.mark_circle(size=46, opacity=1), width, 280
    )


def svg(chart: alt.TopLevelMixin) -> str:
    """The chart as one SVG element: no script, nothing loaded, text escaped by Vega."""
    return vl_convert.vegalite_to_svg(chart.to_dict(), allowed_base_urls=[])


def inline(chart: alt.TopLevelMixin) -> SVG:
    """The chart for a notebook's output: an image that stays in the file and needs neither network
    nor JavaScript.
    """
    return SVG(data=svg(chart))


def palette(arms: Sequence[str]) -> dict[str, str]:
    """A colour for each arm: by its configuration's place among all of them, grey without a draft,
    a replica paler.
    """
    parsed = {name: tables.parsed(name) for name in _order(arms)}
    hues: dict[object, str] = {}
    colours = {}
    for name, arm in parsed.items():
        if arm is not None and not arm.speculates:
            hue = WITHOUT_DRAFT
        else:
            hue = hues.setdefault(
                name if arm is None else arm.configuration,
                ARM_COLOURS[len(hues) % len(ARM_COLOURS)],
            )
        colours[name] = _paler(hue) if arm is not None and arm.replica else hue
    return colours


def _paler(colour: str) -> str:
    """Half way to white."""
    return "#" + "".join(f"{(int(colour[n : n + 2], 16) + 255) // 2:02x}" for n in (1, 3, 5))


def _order(arms: Sequence[str]) -> list[str]:
    """none, shared, then own groups by size, replicas after the arm they repeat; names that are no
    arm last.
    """

    def key(name: str) -> tuple:
        arm = tables.parsed(name) or tables.parsed(
            name.split(", ")[0]
        )  # "shared, measured" stands with shared
        return (
            (3, 0, 0, name)
            if arm is None
            else (
                ("none", "shared", "own").index(arm.placement),
                arm.group or 0,
                arm.replica or 0,
                name,
            )
        )

    return sorted(dict.fromkeys(arms), key=key)


def _stages(table: pd.DataFrame) -> list[str]:
    return [stage for stage, _ in tables.in_order(dict.fromkeys(table["stage"]))]


def _colour(table: pd.DataFrame, arms: Sequence[str] | None, width: int) -> alt.Color:
    """Only the table's own arms are in the legend, in the colours they have among all."""
    colours = palette([*table["arm"], *(arms or ())])
    present = _order(table["arm"])
    return alt.Color(
        "arm:N",
        title=None,
        scale=alt.Scale(domain=present, range=[colours[name] for name in present]),
        legend=_legend(present, width),
    )


def _legend(names: Sequence[str], width: int) -> alt.Legend:
    """In as many columns as the chart has room for beside its axis."""
    room = width if width > NARROW else 0.7 * width
    return alt.Legend(
        columns=int(
            min(max(1, room // (30 + 7 * max(map(len, names), default=1))), len(names) or 1)
        )
    )


def _compared(comparison: str, width: int) -> str:
    """A comparison's name, in two lines where a phone would cut it."""
    return (
        comparison.replace(" ÷ ", "\n÷ ")
        if width <= NARROW and len(comparison) > 20
        else comparison
    )


def _forest_label(row: Mapping[str, Any], telling: Sequence[str], width: int) -> str:
    """Lines of a row's label: what is compared, what tells it from other rows, its interval."""
    interval = (
        f"{tables.fixed(row['ratio'])} [{tables.fixed(row['low'])}, {tables.fixed(row['high'])}]"
        if row["valid"]
        else "refused"
    )
    about = ", ".join(
        filter(None, [*(row[column] for column in telling), "control" if row["control"] else ""])
    )
    return "\n".join(filter(None, [_compared(row["comparison"], width), about, interval]))


def _nothing(said: str, width: int) -> alt.TopLevelMixin:
    """In the place of a chart that has nothing to show."""
    return _finished(
        alt.Chart(pd.DataFrame({"said": [said]})).mark_text(color=MUTED).encode(text="said:N"),
        width,
        30,
    )


def _finished(chart: alt.TopLevelMixin, width: int, height: float) -> alt.TopLevelMixin:
    """The look all charts share; width is that of the whole picture, axes and legend included."""
    axis = dict(
        labelColor=MUTED,
        titleColor=MUTED,
        titleFontWeight="normal",
        labelFontSize=12,
        titleFontSize=12,
        titlePadding=8,
        gridColor=FAINT,
        domainColor="#b8c0c8",
        tickColor="#b8c0c8",
    )
    legend = dict(
        orient="top",
        direction="horizontal",
        labelFontSize=12,
        labelColor=INK,
        symbolType="circle",
        symbolOpacity=1,
        offset=12,
        labelLimit=220,
    )
    return (
        chart.properties(
            width=width,
            height=height,
            autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
            padding=4,
            background="transparent",
        )
        .configure(font=FONT)
        .configure_view(stroke=None)
        .configure_axis(**axis)
        .configure_legend(**legend)
        .configure_text(fontSize=11)
    )
