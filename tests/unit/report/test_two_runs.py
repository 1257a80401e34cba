"""Two runs side by side: what differs is said, what does not is not, and the ratio of two ratios
keeps its coverage.
"""

import copy
import json
import math
import re

import numpy as np
import pytest
from simulated_replay import measured

from tests.simulated import PROFILE, PROVENANCE, VERDICT
from workbench import cli
from workbench.judge import stats
from workbench.judge.stats import Interval
from workbench.judge.verdict_file import VerdictFile
from workbench.report import two_runs
from workbench.report.two_runs import Side

HOSTILE = "<script>alert(1)</script>"


def run(name="first", **changes):
    verdict = copy.deepcopy(VERDICT)
    for comparison in verdict["comparisons"]:
        comparison |= changes.get("comparisons", {})
    return Side(
        name,
        VerdictFile.read(verdict | changes.get("verdict", {})),
        PROVENANCE | changes.get("provenance", {}),
        PROFILE | changes.get("profile", {}),
    )


@pytest.mark.parametrize(
    ("pairs_a", "pairs_b", "noise_b"), [(6, 6, 0.05), (4, 12, 0.05), (8, 8, 0.15)]
)
def test_the_ratio_of_two_ratios_keeps_its_coverage(pairs_a, pairs_b, noise_b):
    rng, held, runs = np.random.default_rng(1), 0, 2000
    for _ in range(runs):
        a, b = rng.normal(0.05, 0.05, pairs_a), rng.normal(-0.02, noise_b, pairs_b)
        intervals = []
        for x in (a, b):
            intervals.append(stats.mean_ratio(x))
        found = stats.ratio_of_ratios(*intervals)
        held += found.low < math.exp(0.07) < found.high
    assert 0.94 < held / runs < 0.99


def test_a_run_beside_itself_differs_in_nothing():
    a, b = run("one"), run("other")
    assert two_runs.differences(a, b).empty
    rows = two_runs.compared(a, b)
    assert set(rows["told"]) == {"cannot be told apart"} and (rows["A ÷ B"] == 1).all()
    assert two_runs.sentence(a, b).startswith(
        "The runs cannot be told apart: own-1 ÷ shared in throughput is 1.057 (1.031 to 1.083) in A"
    )


def test_what_differs_in_provenance_and_setting_is_said_and_nothing_else():
    other = run(
        "second", provenance={"time": "2026-02-02", "gpus": [{"name": "H200"}]}, profile={"tp": 4}
    )
    rows = two_runs.differences(run(), other)
    assert rows["fact"].tolist() == [
        "tp",
        "gpus.1.name",
        "time",
    ]  # when comes last: it explains nothing
    assert rows.iloc[0].tolist() == ["tp", "setting", "2", "4"] and rows.iloc[1].tolist()[2:] == [
        "–",
        "H200",
    ]


def test_runs_that_differ_are_said_to():
    rows = two_runs.compared(
        run(), run("second", comparisons={"ratio": 0.9, "low": 0.88, "high": 0.92})
    )
    assert set(rows[rows["metric"] == "throughput"]["told"]) == {"differ"}
    assert two_runs.sentence(
        run(), run("second", comparisons={"ratio": 0.9, "low": 0.88, "high": 0.92})
    ).startswith("The runs differ: own-1 ÷ shared")


def test_a_comparison_of_one_run_alone_and_a_refused_one_have_no_ratio_of_ratios():
    first, second, third = copy.deepcopy(VERDICT["comparisons"])
    refused = [first | {"valid": False}, second | {"valid": False}, third]
    other = run("second", verdict={"comparisons": refused})
    rows = two_runs.compared(run(), other).set_index(["comparison", "metric"])
    assert rows.loc[("own-1 ÷ shared", "throughput"), "told"] == "in A alone" and math.isnan(
        rows.loc[("own-1 ÷ shared", "throughput"), "A ÷ B"]
    )
    assert rows.loc[("shared ÷ none", "throughput"), "told"] == "cannot be told apart"


def test_two_runs_with_nothing_in_common_have_a_page_that_says_so():
    empty = Side("empty", VerdictFile(), {}, {})
    assert (
        two_runs.sentence(run(), empty)
        == "Nothing was compared with a result in both runs, first (A) and empty (B)."
    )
    page = two_runs.render(run(), empty)
    assert (
        "No verdict was stated." in page and "in A alone" in page and two_runs.render(empty, empty)
    )


def test_the_page_runs_nothing_loads_nothing_and_escapes():
    page = two_runs.render(
        run(HOSTILE), run("second", verdict={"sentence": HOSTILE}, provenance={"command": HOSTILE})
    )
    assert HOSTILE not in page and "&lt;script&gt;" in page
    assert not re.search(
        r"<script|<link(?! rel=\"icon\" href=\"data:)|https?://(?!www\.w3\.org)", page
    )
    assert page.count("<svg") == 4 and "A-verdict.json" in page


def test_the_levels_of_both_runs_stand_under_each_other():
    rows = two_runs.arms(run(), run("second"))
    assert rows[["arm", "run"]].values.tolist() == [
        [arm, letter] for arm in ("none", "shared", "own-1") for letter in "AB"
    ]


def test_a_verdict_that_flips_with_the_targets_tp_is_seen_to_with_the_stages_that_tell_why():
    """As has been reported of EAGLE: speculation wins at TP1 and loses at TP4."""
    flipped = [
        c | ({"ratio": 0.97, "low": 0.94, "high": 1.0} if c["a"] == "shared" else {})
        for c in copy.deepcopy(VERDICT["comparisons"])
    ]
    slower = copy.deepcopy(VERDICT["arms"]) | {
        "shared": VERDICT["arms"]["shared"] | {"stage_ms": {"draft": 21.0, "verify": 25.0}}
    }
    one, four = (
        run("tp1", profile={"tp": 1}),
        run("tp4", profile={"tp": 4}, verdict={"comparisons": flipped, "arms": slower}),
    )
    page = two_runs.render(one, four)
    assert two_runs.differences(one, four)["fact"].tolist() == ["tp"]
    assert "They differ in shared ÷ none (baseline) too." in two_runs.sentence(one, four)
    assert (
        "Where a cycle’s time goes in both runs" in page
        and "shared, A" in page
        and "shared, B" in page
    )


def test_by_the_command_line(tmp_path, capsys):
    for name in ("a", "b"):
        measured(tmp_path / name)
    assert (
        cli.main(
            [
                "report",
                str(tmp_path / "a"),
                str(tmp_path / "b"),
                "--out",
                str(tmp_path / "page.html"),
            ]
        )
        == 0
    )
    assert (
        "cannot be told apart" in capsys.readouterr().out
        and "side by side" in (tmp_path / "page.html").read_text()
    )
    assert cli.main(["report", str(tmp_path / "a"), "recorded:nothing"]) == 2
    assert "there is no recording 'nothing'" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "a"), str(tmp_path / "nowhere")]) == 2


def test_intervals_at_two_levels_give_one_at_the_lower():
    found = stats.ratio_of_ratios(
        Interval(1.1, 1.0, 1.21, 0.975, "x", 8), Interval(1.0, 0.95, 1.05, 0.95, "x", 8)
    )
    assert (
        found.level == 0.95
        and found.ratio == pytest.approx(1.1)
        and found.low < 1.0 < 1.1 < found.high
    )
    json.dumps(vars(found))
