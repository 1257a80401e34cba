"""What every chart shares: widths, colours, order, legends, and how it is finished."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

import altair as alt
import pandas as pd
import vl_convert
from IPython.display import SVG

from workbench.report import cells, tables

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


def svg(chart: alt.TopLevelMixin) -> str:
    """The chart as one SVG element: no script, nothing loaded, text escaped by Vega."""
    # Altair allows 5,000 rows, for the sake of pages that hold the data; a drawing holds none.
    with alt.data_transformers.disable_max_rows():
        # Altair validated each part when it was made; the whole again takes as long as drawing it.
        return _drawn(json.dumps(chart.to_dict(validate=False)))


@lru_cache(maxsize=64)  # a panel asks again and again, mostly for what it shows already
def _drawn(spec: str) -> str:
    return vl_convert.vegalite_to_svg(json.loads(spec), allowed_base_urls=[])


def picture(chart: alt.TopLevelMixin) -> SVG:
    """The chart for a notebook's output: an image that stays in the file and needs neither network
    nor JavaScript.
    """
    return SVG(data=svg(chart))


def palette(arms: Sequence[str]) -> dict[str, str]:
    """A colour for each arm: by its configuration's place among all of them, grey without a draft,
    a replica paler.
    """
    parsed = {name: cells.parsed(name) for name in order(arms)}
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


def order(arms: Sequence[str]) -> list[str]:
    """none, shared, then own groups by size, replicas after the arm they repeat; names that are no
    arm last.
    """

    def key(name: str) -> tuple:
        arm = cells.parsed(name) or cells.parsed(
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


def stage_names(table: pd.DataFrame) -> list[str]:
    return [stage for stage, _ in tables.in_order(dict.fromkeys(table["stage"]))]


def colour(table: pd.DataFrame, arms: Sequence[str] | None, width: int) -> alt.Color:
    """Only the table's own arms are in the legend, in the colours they have among all."""
    colours = palette([*table["arm"], *(arms or ())])
    present = order(table["arm"])
    return alt.Color(
        "arm:N",
        title=None,
        scale=alt.Scale(domain=present, range=[colours[name] for name in present]),
        legend=legend(present, width),
    )


def legend(names: Sequence[str], width: int) -> alt.Legend:
    """In as many columns as the chart has room for beside its axis."""
    room = width if width > NARROW else 0.7 * width
    return alt.Legend(
        columns=int(
            min(max(1, room // (30 + 7 * max(map(len, names), default=1))), len(names) or 1)
        )
    )


def compared(comparison: str, width: int) -> str:
    """A comparison's name, in two lines where a phone would cut it."""
    return (
        comparison.replace(" ÷ ", "\n÷ ")
        if width <= NARROW and len(comparison) > 20
        else comparison
    )


def nothing(said: str, width: int) -> alt.TopLevelMixin:
    """In the place of a chart that has nothing to show."""
    return finished(
        alt.Chart(pd.DataFrame({"said": [said]})).mark_text(color=MUTED).encode(text="said:N"),
        width,
        30,
    )


def finished(chart: alt.TopLevelMixin, width: int, height: float) -> alt.TopLevelMixin:
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
    # All at once: each call of configure_axis and its like would copy the whole chart again.
    return chart.properties(
        width=width,
        height=height,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        padding=4,
        background="transparent",
        config=alt.Config(
            font=FONT,
            view=alt.ViewConfig(stroke=None),
            axis=alt.AxisConfig(**axis),
            legend=alt.LegendConfig(**legend),
            text=alt.MarkConfig(fontSize=11),
        ),
    )
