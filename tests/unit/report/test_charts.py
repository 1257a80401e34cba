"""Charts: the marks are those of the table, refused is said and not drawn, and the SVG carries no
script and loads nothing.
"""

import math
import re
from xml.etree import ElementTree

import pandas as pd
import pytest

from tests.simulated import VERDICT, records, refused
from workbench.judge.verdict_file import VerdictFile
from workbench.report import (
    chart_parts,
    charts,
    cycle_charts,
    log_tables,
    sweep_charts,
    tables,
)

LOG = records()
SOUND, REFUSED = VerdictFile.read(VERDICT), VerdictFile.read(refused())
BLOCKS = log_tables.blocks(LOG)
HOSTILE = """<script>alert(1)</script>"><img src=x onerror='alert(2)'>&amp;"""
ARMS = ["none", "shared", "own-1"]


def throughput_of(verdict):
    comparisons, controls = tables.comparisons(verdict), tables.controls(verdict)
    return comparisons[comparisons["metric"] == "throughput"], controls


def drawn(width=chart_parts.WIDE):
    return {
        "by pair": charts.throughput_by_pair(
            BLOCKS[BLOCKS["experiment"] == "draft_tp"], ARMS, width
        ),
        "by start": charts.throughput_by_start(
            BLOCKS[BLOCKS["experiment"] == "baseline"], ARMS, width
        ),
        "forest": charts.forest(*throughput_of(SOUND), width),
        "positions": charts.accept_by_position(tables.accept_by_position(SOUND), ARMS, width),
        "collectives": charts.collectives(tables.collectives(SOUND), ARMS, width),
        "stages": cycle_charts.stage_times(tables.stage_times(SOUND), width),
    }


def parsed(chart):
    return ElementTree.fromstring(chart_parts.svg(chart))


def elements(picture, name):
    return [e for e in picture.iter() if e.tag.endswith("}" + name)]


def marks(picture, kind, colour=None):
    """The drawn marks of one kind, axes and legends left out."""
    groups = [
        g
        for g in elements(picture, "g")
        if {f"mark-{kind}", "role-mark"} <= set(g.get("class", "").split())
    ]
    found = [e for g in groups for e in g if e.tag.rsplit("}", 1)[-1] in ("path", "line", "text")]
    return [e for e in found if colour is None or colour in (e.get("fill"), e.get("stroke"))]


def words(picture):
    """Every line of text; a label of several lines is one text of several spans."""
    return [line for e in elements(picture, "text") for line in e.itertext()]


@pytest.mark.parametrize("width", [chart_parts.WIDE, chart_parts.NARROW])
def test_every_chart_has_the_width_that_was_asked_for(width):
    for name, chart in drawn(width).items():
        assert float(parsed(chart).get("width")) == pytest.approx(width, abs=1), name


def test_a_point_a_block():
    picture = parsed(drawn()["by pair"])
    assert len(marks(picture, "symbol")) == 36
    assert len(marks(picture, "symbol", chart_parts.palette(ARMS)["own-1"])) == 12


def test_a_bar_for_each_starts_mean():
    picture = parsed(drawn()["by start"])
    assert len(marks(picture, "symbol")) == 18 and len(marks(picture, "rect")) == 6


def test_the_forest_draws_each_interval_the_control_behind_it_and_the_line_of_no_difference():
    picture = parsed(drawn()["forest"])
    assert len(marks(picture, "symbol")) == 3  # two comparisons and the control
    assert (
        len(marks(picture, "rule", chart_parts.INK)) == 2
        and len(marks(picture, "rule", chart_parts.MUTED)) == 1
    )
    assert (
        len(marks(picture, "rect", chart_parts.BAND)) == 2
    )  # behind the control and what it is the yardstick of, not behind the other
    assert {"1.057 [1.031, 1.083]", "1.443 [1.302, 1.599]", "1.004 [0.981, 1.027]"} <= set(
        words(picture)
    )


def test_rows_of_a_forest_are_told_apart_by_metric_and_experiment():
    picture = parsed(charts.forest(tables.comparisons(SOUND), tables.controls(SOUND)))
    assert {
        "throughput, draft_tp",
        "cycle time, draft_tp",
        "throughput, baseline",
        "throughput, draft_tp, control",
    } <= set(words(picture))
    assert len(marks(picture, "symbol")) == 4 and len(marks(picture, "rect", chart_parts.BAND)) == 2


def test_the_forest_places_ratios_in_order():
    picture = parsed(charts.forest(throughput_of(SOUND)[0]))
    places = [
        float(re.match(r"translate\(([\d.]+)", e.get("transform"))[1])
        for e in marks(picture, "symbol")
    ]
    one = float(
        re.match(
            r"translate\(([\d.]+)", marks(picture, "rule", chart_parts.MUTED)[0].get("transform")
        )[1]
    )
    assert one < places[0] < places[1]


def test_a_refused_comparison_is_said_and_not_drawn():
    picture = parsed(charts.forest(*throughput_of(REFUSED)))
    assert len(marks(picture, "symbol")) == 1 and len(marks(picture, "rect", chart_parts.BAND)) == 0
    assert words(picture).count("refused") == 2


def test_a_forest_without_any_number_still_has_its_line():
    comparisons, _ = throughput_of(REFUSED)
    picture = parsed(charts.forest(comparisons[:1]))
    assert marks(picture, "symbol") == [] and len(marks(picture, "rule")) == 1


def test_bars_of_positions_carry_their_percentage():
    table = tables.accept_by_position(SOUND)
    picture = parsed(charts.accept_by_position(table, ARMS))
    assert (
        len(marks(picture, "rect")) == len(marks(picture, "rule")) == 6
    )  # three positions of two arms, each with its interval
    assert [e.text for e in marks(picture, "text")] == ["86", "69", "46"] * 2


def test_bars_without_intervals_have_no_whiskers_and_many_bars_no_numbers():
    accept = {"positions": [{"value": 0.5}] * 15}
    table = tables.accept_by_position(VerdictFile.read({"arms": {"own-1": {"accept": accept}}}))
    wide, narrow = (
        parsed(charts.accept_by_position(table, width=width))
        for width in (chart_parts.WIDE, chart_parts.NARROW)
    )
    assert len(marks(wide, "rect")) == 15 and marks(wide, "rule") == []
    assert len(marks(wide, "text")) == 15 and marks(narrow, "text") == []


def test_no_collective_is_a_zero_and_an_unknown_count_is_unknown():
    facts = {"collectives_per_round": {"draft": 0, "verify": math.nan}}
    verdict = VerdictFile.read({"arms": {"own-1": facts}})
    picture = parsed(charts.collectives(tables.collectives(verdict)))
    assert [e.text for e in marks(picture, "text")] == ["0", "unknown"]
    assert len(marks(picture, "rect")) == 1


def test_stages_are_stacked_in_the_cycles_order():
    assert [
        w for w in words(parsed(drawn()["stages"])) if w in ("draft", "verify", "draft-extend")
    ] == ["draft", "verify", "draft-extend"]


def test_an_arm_keeps_its_colour_whatever_else_is_in_the_chart():
    verdict = SOUND.model_copy(update={"arms": {"own-1": SOUND.arms["own-1"]}})
    few = parsed(charts.collectives(tables.collectives(verdict), ARMS))
    assert marks(few, "rect", chart_parts.palette(ARMS)["own-1"])


def test_colours_tell_arms_apart_and_replicas_are_pale_copies():
    colours = chart_parts.palette(["own-2", "shared#2", "none", "own-1", "shared", "own-1+steps=2"])
    assert len(set(colours.values())) == 6 and colours["none"] == chart_parts.WITHOUT_DRAFT
    assert (
        colours["shared"] == chart_parts.palette(["shared"])["shared"] == chart_parts.ARM_COLOURS[0]
    )
    pairs = zip(re.findall("..", colours["shared#2"][1:]), re.findall("..", colours["shared"][1:]))
    assert all(int(pale, 16) > int(full, 16) for pale, full in pairs)


@pytest.mark.parametrize("number", [5_001, 12_000])
def test_more_than_five_thousand_rows_never_reach_a_chart(number):
    table = pd.DataFrame(
        {
            "experiment": "e",
            "arm": "shared",
            "start": [n % 4 for n in range(number)],
            "pair": range(number),
            "tokens": 100,
            "time (s)": 1.0,
            "blocks": 1,
            "throughput (tokens/s)": 100.0,
        }
    )
    for chart in (charts.throughput_by_pair(table), charts.throughput_by_start(table)):
        rows = chart.to_dict()["datasets"].values()
        assert 0 < max(map(len, rows)) <= 5_000


def test_names_are_text_in_every_chart():
    blocks = BLOCKS.replace({"arm": {"own-1": HOSTILE}, "experiment": {"draft_tp": HOSTILE}})
    verdict = SOUND.model_copy(
        update={
            "arms": {HOSTILE: SOUND.arms["own-1"]},
            "comparisons": (SOUND.comparisons[0].model_copy(update={"a": HOSTILE}),),
        }
    )
    positions = tables.accept_by_position(SOUND).replace({"arm": {"own-1": HOSTILE}})
    for chart in (
        charts.throughput_by_pair(blocks[blocks["experiment"] == HOSTILE]),
        charts.forest(tables.comparisons(verdict)),
        charts.accept_by_position(positions),
        charts.collectives(tables.collectives(verdict)),
        cycle_charts.stage_times(tables.stage_times(verdict)),
    ):
        picture = parsed(chart)
        assert not elements(picture, "script") and not elements(picture, "img")
        assert any(word.startswith("<script>alert(1)") for word in words(picture))


def test_a_picture_loads_nothing_and_has_no_ids_that_could_clash_with_another_pictures():
    for name, chart in drawn().items():
        text = chart_parts.svg(chart)
        assert not re.search(r"<script|<image|<style|href=|url\(|\bid=", text), name
        assert set(re.findall(r"https?://[^\"]*", text)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
        }, name


def test_a_picture_is_an_image_kept_in_the_notebook():
    shown = chart_parts.picture(drawn()["stages"])
    assert "<svg" in shown._repr_svg_() and "<script" not in shown._repr_svg_()


def test_a_stage_that_an_arm_has_not_takes_no_room():
    counted = {"none": {"decode": 14}, "shared": {"verify": 14, "draft": 8}}
    arms = {arm: {"collectives_per_round": found} for arm, found in counted.items()}
    verdict = VerdictFile.read({"arms": arms})
    picture = parsed(charts.collectives(tables.collectives(verdict)))
    assert len(marks(picture, "rect")) == 3 and [
        w for w in words(picture) if w in ("draft", "verify", "decode")
    ] == ["draft", "verify", "decode"]


def test_charts_of_any_number_of_rows_are_drawn():
    """6,667 pairs of two arms, and as many starts in the live panel."""
    many = 6_667
    settled = pd.DataFrame(
        {
            "start": range(1, many + 1),
            "ratio of the start": 1.0,
            "ratio": 1.0,
            "low": 0.9,
            "high": 1.1,
            "of": "cycle time",
        }
    )
    widths = pd.DataFrame(
        {"tokens verified": range(many), "predicted (ms)": 1.0, "measured (ms)": 1.0}
    )
    for chart in (sweep_charts.narrowing(settled), cycle_charts.verify_width(widths)):
        assert chart_parts.svg(chart).startswith("<svg")
