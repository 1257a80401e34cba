"""Hot arms against restarts: planted noise gives the planted costs, and the interval of their ratio
holds the truth.
"""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta, timezone

import pytest
from scipy import special
from simulated_runs import play, profile

from workbench import cli
from workbench.answers import bench_arms
from workbench.experiment.errors import WorkbenchError
from workbench.experiment.runlog import Block, RunLog, Start
from workbench.run import lab

START_S = 15.0


def records(
    seed: int, *, pairs: int = 12, starts: int = 4, noise: float = 0.01, spread: float = 0.08
) -> list:
    """Both ways of one machine, with a clock: blocks take their seconds, a start takes 15 s before
    its blocks.
    """
    made = lab.Run(profile(), None)
    made.__dict__["prompts"] = [{"id": f"p{n}"} for n in range(60)]
    planned = [task.planned for task in bench_arms.tasks(made, "own-1", "shared", pairs, starts)]
    found, clock = [], datetime(2026, 1, 1, tzinfo=timezone.utc)
    for way in (bench_arms.HOT, bench_arms.RESTARTS):
        plan = [p for p in planned if p.experiment == way]
        for record in play(
            plan,
            noise=noise,
            spread=spread,
            speedup=0.05,
            seed=seed,
            first_start=100 * (way == bench_arms.RESTARTS),
        ):
            if isinstance(record, Start):
                clock += timedelta(seconds=START_S)
            if isinstance(record, (Start, Block)):
                found.append(record.model_copy(update={"time": clock.isoformat()}))
            if isinstance(record, Block):
                clock += timedelta(seconds=record.seconds)
    return found


def last(seed: int, **how) -> tuple[bench_arms.Point, bench_arms.Point]:
    return tuple(
        bench_arms.curve(records(seed, **how), way, "own-1", "shared")[-1]
        for way in (bench_arms.HOT, bench_arms.RESTARTS)
    )


def test_the_plan_holds_both_arms_in_one_start_and_restarts_them_alternately():
    made = records(1)
    assert [s.arms for s in made if isinstance(s, Start)][0] in (
        ("own-1", "shared"),
        ("shared", "own-1"),
    )
    order = [
        s.arms[0] for s in made if isinstance(s, Start) and s.experiment == bench_arms.RESTARTS
    ]
    assert (
        len(order) == 8
        and order.count("own-1") == 4
        and order[0] != order[1] == order[2] != order[3]
    )


def test_seconds_count_starts_and_units_count_up():
    hot = bench_arms.curve(records(1), bench_arms.HOT, "own-1", "shared")
    restarts = bench_arms.curve(records(1), bench_arms.RESTARTS, "own-1", "shared")
    assert [p.units for p in hot] == [p.units for p in restarts] == [2, 3, 4]
    assert all(
        a.seconds < b.seconds for points in (hot, restarts) for a, b in zip(points, points[1:])
    )
    assert hot[-1].seconds > 4 * START_S and restarts[-1].seconds > 8 * START_S
    blocks = [r for r in records(1) if isinstance(r, Block) and r.experiment == bench_arms.RESTARTS]
    assert restarts[-1].seconds == pytest.approx(
        8 * START_S + sum(b.seconds for b in blocks), abs=1e-3
    )


def test_errors_are_those_planted():
    found = [last(seed) for seed in range(40)]
    hot, restarts = (
        [math.sqrt(sum(pair[way].error ** 2 for pair in found) / 40)] for way in (0, 1)
    )
    assert hot[0] == pytest.approx(0.01 * math.sqrt(2 / 12), rel=0.15)
    assert restarts[0] == pytest.approx(0.08 * math.sqrt(2 / 4), rel=0.25)
    bound = special.stdtrit(3, 0.99)  # 98 % of four starts
    logs = [math.log(pair[0].ratio) for pair in found]
    truth = sum(logs) / len(logs)  # the 5 %, less by the prefill, which both arms share
    assert truth == pytest.approx(-math.log(0.95), abs=0.006)
    errors = [pair[0].error for pair in found]
    assert sum(abs(log - truth) < bound * error for log, error in zip(logs, errors)) >= 37


def test_the_gains_interval_holds_the_truth():
    found = [(bench_arms.gain(*pair), pair) for pair in (last(seed) for seed in range(60))]
    hot, restarts = found[0][1]
    truth = (
        (0.08**2 * 2 / 4 + 0.01**2 * 2 / 8) * restarts.seconds / (0.01**2 * 2 / 12 * hot.seconds)
    )
    assert sum(gain.low <= truth <= gain.high for gain, _ in found) >= 52
    assert all(gain.low < gain.ratio < gain.high for gain, _ in found)


def test_equal_ways_have_a_gain_of_one():
    one = bench_arms.Point("hot arms", 100.0, 12, 1.0, 0.02, 11)
    gain = bench_arms.gain(one, bench_arms.Point("restarts", 400.0, 4, 1.0, 0.01, 11))
    assert gain.ratio == pytest.approx(1) and gain.low == pytest.approx(1 / gain.high)
    with pytest.raises(WorkbenchError, match="run more"):
        bench_arms.gain(one, bench_arms.Point("restarts", 400.0, 4, 1.0, 0.0, 6))


def test_it_leaves_curves_chart_and_sentence(tmp_path, monkeypatch):
    made = lab.Run(profile(), tmp_path)
    made.__dict__["prompts"] = [{"id": f"p{n}"} for n in range(60)]
    asked = []

    def measure(self, tasks):
        asked.extend(tasks)
        with RunLog(tmp_path / "runs.jsonl") as file:
            for record in records(1):
                file.append(record)

    monkeypatch.setattr(lab.Run, "measure", measure)
    said = bench_arms.arms(made)
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept["sentence"] == said and kept["gain"]["ratio"] > 5 and len(kept["points"]) == 6
    assert (
        "4 starts that held both" in said and "4 starts a side" in said and "95% interval" in said
    )
    assert len(asked) == 8 + 24 + 8 + 16


def test_too_few_units_are_said_to_be(tmp_path, monkeypatch):
    made = lab.Run(profile(), tmp_path)
    made.__dict__["prompts"] = [{"id": f"p{n}"} for n in range(60)]
    monkeypatch.setattr(lab.Run, "measure", lambda self, tasks: None)
    with pytest.raises(WorkbenchError, match="two starts that held both"):
        bench_arms.arms(made)


def test_the_command_line_runs_it(tmp_path, monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(
        bench_arms,
        "arms",
        lambda made, a, b, pairs, starts: (
            seen.update(a=a, b=b, pairs=pairs, starts=starts) or "said."
        ),
    )
    assert (
        cli.main(
            [
                "bench",
                "arms",
                "cpu-tiny",
                "--out",
                str(tmp_path / "run"),
                "--pairs",
                "8",
                "-p",
                "tp=1",
            ]
        )
        == 0
    )
    assert (
        seen == {"a": "own-1", "b": "shared", "pairs": 8, "starts": 4}
        and "said." in capsys.readouterr().out
    )
    assert json.loads((tmp_path / "run" / "profile.json").read_text())["tp"] == 1
