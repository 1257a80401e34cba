"""A planted cost of the first block after a switch is found, and none where there is none."""

from __future__ import annotations

import pytest
from simulated_runs import EXPERIMENT, play, profile

from workbench.experiment import schedule
from workbench.experiment.metrics import RunView
from workbench.experiment.runlog import Block
from workbench.judge import after_switch, verdict

HOT = ("shared", "own-1", "shared#2")


def hot(
    slower: float = 0.0, starts: int = 4, blocks: int = 4, seed: int = 1, noise: float = 0.01
) -> RunView:
    """A run of hot servers: a block that follows another arm's takes ``slower`` more time."""
    records, last = [], None
    for record in play(
        schedule.by_starts(EXPERIMENT, (HOT,), starts, blocks, 60, 1, 1, seed=3),
        noise=noise,
        speedup=0.1,
        seed=seed,
        spread=0.05,
    ):
        if isinstance(record, Block):
            if last is not None and last.start == record.start and last.arm != record.arm:
                requests = tuple(
                    r.model_copy(update={"end": r.first + (r.end - r.first) * (1 + slower)})
                    for r in record.requests
                )
                record = record.model_copy(update={"requests": requests})
            last = record
        records.append(record)
    return RunView(profile(), records)


@pytest.mark.parametrize("slower", [0.0, 0.05])
def test_the_planted_cost_lies_in_the_interval(slower):
    found = [after_switch.after_switch(hot(slower, seed=seed), EXPERIMENT) for seed in range(12)]
    assert sum(i.low <= 1 + slower <= i.high for i in found) >= 10
    assert all(i.decided for i in found) if slower else sum(i.decided for i in found) <= 2


def test_without_noise_it_is_the_cost_itself_whatever_arms_and_starts_take():
    assert after_switch.after_switch(hot(0.03, noise=0.0), EXPERIMENT).ratio == pytest.approx(
        1.03, abs=1e-6
    )


def test_the_note_says_which():
    assert "has a longer cycle than later ones (ratio 1.0" in after_switch.note(
        hot(0.05), EXPERIMENT
    )
    assert "is not seen to differ from later ones" in after_switch.note(hot(), EXPERIMENT)
    assert "too few blocks" in after_switch.note(hot(starts=1, blocks=1), EXPERIMENT)


def test_servers_of_one_arm_have_no_note():
    run = RunView(profile(), play(schedule.by_starts(EXPERIMENT, HOT, 3, 2, 40, 1, 1, seed=3)))
    assert (
        after_switch.note(run, EXPERIMENT) is None and after_switch.note(hot(), "baseline") is None
    )


def test_the_verdict_says_it():
    run = hot(0.05)
    assert after_switch.note(run, EXPERIMENT) in verdict.judge(run.profile, run.records).notes
