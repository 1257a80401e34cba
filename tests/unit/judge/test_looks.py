"""Looks are paid for: the whole procedure finds what is not there in at most 5 of 100 runs, whoever
ends it and for what he sees.
"""

import math

import numpy as np
import pytest

from workbench.judge import looks, stats
from workbench.judge.looks import WATCHED, Checkpoints, Decision, should_stop

STARTS, SIMULATIONS = 10, 4000


def start_means(rng, runs=SIMULATIONS, starts=STARTS, effect=0.0, heavy=False):
    """Mean log ratios of starts (runs, starts), 3 % apart."""
    shape = runs, starts
    x = rng.standard_t(3, shape) / math.sqrt(3) if heavy else rng.standard_normal(shape)
    return 0.03 * x + math.log1p(effect)


def decided(means, level):
    """Whether the interval of each run excludes 1 (runs,)."""
    mean, error, df = stats.mean_error(means)
    return np.abs(mean) > stats.half_width(error, df, level)


def test_alpha_is_spent_as_published_and_never_more():
    spending = Checkpoints((3, 6, 9, 12))
    spends = [1 - spending.level(n) for n in spending.looks]
    # DeMets & Lan, Stat. Med. 13 (1994) 1341: 0.00153 and 0.00965 of a one-sided 0.025 at 1/2 and
    # 3/4
    assert np.cumsum(spends)[1:] == pytest.approx([0.00305, 0.0193, 0.05], abs=5e-5)
    # Ended by a budget: what is left over.
    assert spending.level(5) == pytest.approx(1 - (0.05 - spends[0]))
    assert spending.level(15) == spending.level(12) and spending.level(2) == pytest.approx(0.95)
    assert 1 - spending.level(12, share=3) == pytest.approx(spends[-1] / 3)
    assert Checkpoints((6,)).level(6) == pytest.approx(0.95)


@pytest.mark.parametrize("starts", [3, 4, 6, 10, 16])
def test_the_looks_of_whoever_watches_share_a_tenth_of_alpha_and_the_end_has_the_rest(starts):
    watching = Checkpoints.after_each(starts, early=WATCHED)
    assert watching.looks == tuple(range(3, starts + 1))
    spends = [1 - watching.level(n) for n in watching.looks]
    assert sum(spends) == pytest.approx(0.05)
    assert spends[-1] == pytest.approx(0.05 if starts == 3 else 0.05 - WATCHED)
    assert len({round(spend, 12) for spend in spends[:-1]}) <= 1
    assert Checkpoints.after_each(2).looks == (3,)


@pytest.mark.parametrize("wrong", [(), (2, 8), (8, 8), (12, 8)])
def test_looks_must_ascend(wrong):
    with pytest.raises(ValueError, match="looks"):
        Checkpoints(wrong)


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("starts", [6, 10, 16])
def test_whoever_watches_and_stops_when_the_band_leaves_1_is_wrong_in_at_most_5_of_100(
    heavy, starts
):
    runs = start_means(np.random.default_rng(1), starts=starts, heavy=heavy)
    watching = Checkpoints.after_each(starts, early=WATCHED)
    paid, plain = np.zeros(len(runs), bool), np.zeros(len(runs), bool)
    for n in watching.looks:
        paid |= decided(runs[:, :n], watching.level(n))
        plain |= decided(runs[:, :n], 0.95)
    assert paid.mean() <= 0.055
    assert plain.mean() > 0.08  # what looking costs where nobody pays


def live(run, checkpoints, **wishes):
    """One run as it is watched live: asked after every start, until told to stop."""
    for starts in range(1, len(run) + 1):
        decision = should_stop(checkpoints, run[:starts], **wishes)
        if decision.stop:
            return decision
    raise AssertionError("the last look did not stop the run")


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("wishes", [{}, {"wished": 0.04}])
def test_a_run_that_stops_by_its_rule_finds_what_is_not_there_in_at_most_5_of_100(heavy, wishes):
    runs = start_means(np.random.default_rng(2), runs=1000, heavy=heavy)
    decisions = [live(run, Checkpoints.after_each(STARTS), **wishes) for run in runs]
    assert np.mean([d.interval.decided for d in decisions]) <= 0.06
    if wishes:
        assert {d.why for d in decisions} == {"resolution", "starts"}


@pytest.mark.parametrize("experiments", [2, 3])
def test_experiments_that_answer_one_question_share_its_5_percent(experiments):
    rng = np.random.default_rng(3)
    found = np.zeros(SIMULATIONS, bool)
    for _ in range(experiments):
        found |= decided(start_means(rng), 1 - stats.ALPHA / experiments)
    assert found.mean() <= 0.056


def test_the_whole_procedure_with_looks_experiments_and_a_stop_by_hand():
    """Three experiments that answer one question, each watched after every start and stopped when
    its band leaves 1.
    """
    rng, watching = np.random.default_rng(4), Checkpoints.after_each(STARTS, early=WATCHED)
    found = np.zeros(SIMULATIONS, bool)
    for _ in range(3):
        runs = start_means(rng)
        for n in watching.looks:
            found |= decided(runs[:, :n], watching.level(n, share=3))
    assert found.mean() <= 0.055


def test_intervals_of_stopped_runs_cover_a_true_difference_and_large_ones_stop_early():
    runs = start_means(np.random.default_rng(5), runs=1000, effect=0.06)
    decisions = [live(run, Checkpoints.after_each(STARTS)) for run in runs]
    assert np.mean([d.interval.low <= 1.06 <= d.interval.high for d in decisions]) >= 0.94
    assert np.mean([d.interval.n < STARTS for d in decisions]) > 0.5
    assert {d.why for d in decisions} == {"decided", "starts"}


def test_the_stop_rule_looks_at_checkpoints_only_and_minds_its_budgets():
    spending = Checkpoints((3, 6))
    clear = [0.2, 0.201, 0.2, 0.2]
    assert should_stop(spending, clear[:2]) == Decision(False, None, None)
    assert should_stop(spending, clear) == Decision(False, None, None)  # 4: no checkpoint
    assert should_stop(spending, clear[:3]).why == "decided"
    assert should_stop(spending, clear[:3], wished=0.0001).why is None
    assert should_stop(spending, clear, seconds_left=0.0).why == "seconds"
    assert should_stop(spending, clear[:2], seconds_left=-1.0) == Decision(True, "seconds", None)
    assert should_stop(spending, [0.3, -0.3] * 3).why == "starts"
    assert looks.MIN_STARTS == 3
