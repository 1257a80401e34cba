"""Intervals, resolution and stop rule, held against simulated blocks whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from workbench.judge import stats

SIMULATIONS = 20_000


def noise(rng, kind, shape):
    """Log throughput of blocks: 5 % of noise, heavy tails (Student's t with 3 degrees), or 1 block
    in 20 slowed by 30 %.
    """
    if kind == "heavy":
        return 0.05 / math.sqrt(3) * rng.standard_t(3, shape)
    if kind == "spikes":
        return 0.02 * rng.standard_normal(shape) - 0.30 * (rng.random(shape) < 0.05)
    return 0.05 * rng.standard_normal(shape)


def drift(rng, kind, shape):
    """What the machine does meanwhile, over the blocks in time: nothing, 10 % slower to the end, a
    wave, or a random walk.
    """
    time = np.arange(shape[-1])
    if kind == "walk":
        return np.cumsum(0.02 * rng.standard_normal(shape), -1)
    return np.broadcast_to(
        {
            "none": 0 * time,
            "linear": -0.10 * time / time[-1],
            "wave": 0.03 * np.sin(2 * np.pi * time / 11),
        }[kind],
        shape,
    )


def abba(rng, kind, drifting, pairs, effect=0.0, runs=SIMULATIONS):
    """Log ratios B / A (runs, pairs) of blocks in the order A B B A; B is faster by ``effect``
    (0.03 is 3 %).
    """
    blocks = noise(rng, kind, (runs, 2 * pairs)) + drift(rng, drifting, (runs, 2 * pairs))
    first, second = blocks[:, ::2], blocks[:, 1::2]
    return np.where(np.arange(pairs) % 2 == 0, second - first, first - second) + math.log1p(effect)


def covered(mean, error, df, truth=0.0, level=0.95):
    return float(np.mean(np.abs(mean - truth) <= stats.half_width(error, df, level)))


@pytest.mark.parametrize("pairs", [stats.MIN_PAIRS, 6, 12, 24])
@pytest.mark.parametrize("drifting", ["none", "linear", "wave", "walk"])
@pytest.mark.parametrize("kind", ["noise", "heavy"])
def test_the_paired_interval_covers_the_truth_in_95_of_100_runs(kind, drifting, pairs):
    ratios = abba(np.random.default_rng(1), kind, drifting, pairs, effect=0.03)
    assert 0.93 <= covered(*stats.paired_error(ratios), truth=math.log(1.03)) <= 0.97


def test_rare_slow_blocks_make_the_interval_wider_than_needed_never_too_short():
    assert (
        covered(*stats.paired_error(abba(np.random.default_rng(2), "spikes", "linear", 12))) >= 0.95
    )


def test_bca_covers_too_rarely_with_few_pairs_and_t_on_the_same_runs_does_not():
    runs = abba(np.random.default_rng(3), "noise", "none", 6, runs=400)
    both = [stats.paired_ratio(run, resamples=999) for run in runs]
    share = {
        name: np.mean([getattr(b, name).low <= 1 <= getattr(b, name).high for b in both])
        for name in ("t", "bca")
    }
    assert share["t"] >= 0.93 and share["bca"] < 0.90


def test_the_paired_interval_is_the_textbook_one_and_ratios_multiply():
    logs = np.log([1.02, 1.05, 0.99, 1.04, 1.03])
    both = stats.paired_ratio(logs, 0.9)
    expected = scipy_stats.ttest_1samp(logs, 0).confidence_interval(0.9)
    assert (math.log(both.t.low), math.log(both.t.high)) == pytest.approx(tuple(expected))
    assert (
        both.t.ratio == both.bca.ratio == pytest.approx((1.02 * 1.05 * 0.99 * 1.04 * 1.03) ** 0.2)
    )
    assert both.bca.low < both.t.ratio < both.bca.high and both.t.n == 5 and both.t.level == 0.9
    mirrored = stats.paired_ratio(-logs, 0.9).t
    assert (mirrored.low, mirrored.high) == pytest.approx((1 / both.t.high, 1 / both.t.low))


def test_equal_pairs_give_an_interval_of_no_width():
    both = stats.paired_ratio([0.1] * 5)
    assert (
        both.t.low == both.t.high == both.bca.low == both.bca.high == pytest.approx(math.exp(0.1))
        and both.t.decided
    )


@pytest.mark.parametrize("values", [[], [0.1], [0.1, math.nan], [0.1, -math.inf]])
def test_too_little_or_broken_data_is_an_error(values):
    with pytest.raises(ValueError):
        stats.paired_ratio(values)
    with pytest.raises(ValueError):
        stats.welch_ratio([0.1, 0.2], values)


def starts(rng, number, blocks=4, spread=0.08):
    """Log throughput (runs, starts, blocks): starts of one arm differ by 8 %, blocks of one start
    by 3 %.
    """
    return spread * rng.standard_normal((SIMULATIONS, number, 1)) + 0.03 * rng.standard_normal(
        (SIMULATIONS, number, blocks)
    )


@pytest.mark.parametrize("number", [stats.MIN_STARTS, 4, 8])
def test_welch_over_starts_covers_and_blocks_taken_as_units_do_not(number):
    rng = np.random.default_rng(4)
    a, b = starts(rng, number), starts(rng, number)
    assert 0.93 <= covered(*stats.welch_error(a.mean(-1), b.mean(-1))) <= 0.97
    naive = stats.welch_error(a.reshape(SIMULATIONS, -1), b.reshape(SIMULATIONS, -1))
    assert covered(*naive) < 0.80


def test_welch_covers_when_one_arm_starts_more_evenly_than_the_other():
    rng = np.random.default_rng(5)
    a, b = starts(rng, 4, spread=0.08).mean(-1), starts(rng, 6, spread=0.02).mean(-1)
    assert 0.93 <= covered(*stats.welch_error(a, b)) <= 0.97


def test_welch_is_the_textbook_one():
    a, b = [4.60, 4.71, 4.66], [4.50, 4.52, 4.47, 4.55]
    interval = stats.welch_ratio(a, b)
    expected = scipy_stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert (math.log(interval.low), math.log(interval.high)) == pytest.approx(tuple(expected))
    assert interval.ratio == pytest.approx(math.exp(np.mean(a) - np.mean(b))) and interval.n == 7


def test_a_difference_of_the_resolution_is_found_in_80_of_100_runs():
    runs = abba(np.random.default_rng(6), "noise", "none", 10, runs=SIMULATIONS)
    effect = stats.resolution(0.05 * math.sqrt(2 / 10), 9)
    mean, error, df = stats.paired_error(runs + math.log1p(effect))
    assert np.mean(mean > stats.half_width(error, df)) == pytest.approx(0.80, abs=0.01)


@pytest.mark.parametrize("level", [0.95, 0.983])
@pytest.mark.parametrize("wished", [0.005, 0.03, 0.5])
def test_the_pairs_needed_are_the_fewest_that_resolve(wished, level):
    n = stats.pairs_needed(0.07, wished, level)
    assert stats.resolution(0.07 / math.sqrt(n), n - 1, level) <= wished
    assert n == stats.MIN_PAIRS or stats.resolution(0.07 / math.sqrt(n - 1), n - 2, level) > wished
    side = stats.starts_needed(0.07, wished, level)
    assert stats.resolution(0.07 * math.sqrt(2 / side), 2 * side - 2, level) <= wished
    assert (
        side == stats.MIN_STARTS
        or stats.resolution(0.07 * math.sqrt(2 / (side - 1)), 2 * side - 4, level) > wished
    )


def test_the_normal_limit_of_the_pairs_needed():
    # n = (1.960 + 0.842)^2 sd^2 / log(1 + r)^2 for large n
    assert stats.pairs_needed(0.07, 0.005) == pytest.approx(
        (2.8016 * 0.07 / math.log(1.005)) ** 2, rel=0.01
    )


def test_alpha_is_spent_as_published_and_never_more():
    looks = stats.Checkpoints.every(24, 6)
    assert looks.looks == (6, 12, 18, 24)
    spends = [1 - looks.level(n) for n in looks.looks]
    # DeMets & Lan, Stat. Med. 13 (1994) 1341: 0.00153 and 0.00965 of a one-sided 0.025 at 1/2 and
    # 3/4
    assert np.cumsum(spends)[1:] == pytest.approx([0.00305, 0.0193, 0.05], abs=5e-5)
    assert looks.level(10) == pytest.approx(
        1 - (0.05 - spends[0])
    )  # ended by a budget: what is left over
    assert looks.level(30) == looks.level(24) and looks.level(4) == pytest.approx(0.95)
    assert 1 - looks.level(24, comparisons=3) == pytest.approx(spends[-1] / 3)
    assert stats.Checkpoints((12,)).level(12) == pytest.approx(0.95)


@pytest.mark.parametrize("looks", [(), (2, 8), (8, 8), (12, 8)])
def test_looks_must_ascend(looks):
    with pytest.raises(ValueError, match="looks"):
        stats.Checkpoints(looks)


def live(run, checkpoints, **wishes):
    """One run as it is watched live: asked after every pair, until told to stop."""
    for pairs in range(1, len(run) + 1):
        decision = stats.should_stop(checkpoints, run[:pairs], **wishes)
        if decision.stop:
            return decision
    raise AssertionError("the last look did not stop the run")


@pytest.mark.parametrize(
    "kind, drifting", [("noise", "none"), ("heavy", "none"), ("noise", "linear")]
)
@pytest.mark.parametrize("wishes", [{}, {"wished": 0.06}])
def test_the_whole_procedure_finds_a_difference_of_an_arm_to_itself_in_at_most_5_of_100_runs(
    kind, drifting, wishes
):
    runs = abba(np.random.default_rng(7), kind, drifting, 24, runs=2000)
    decisions = [live(run, stats.Checkpoints.every(24, 6), **wishes) for run in runs]
    assert 0.005 <= np.mean([d.interval.decided for d in decisions]) <= 0.05
    if wishes:
        assert {d.why for d in decisions} == {"resolution", "pairs"}


def test_looking_after_every_pair_at_95_percent_would_find_far_more():
    runs = abba(np.random.default_rng(7), "noise", "none", 24)
    found = np.zeros(len(runs), bool)
    for n in range(stats.MIN_PAIRS, 25):
        mean, error, df = stats.paired_error(runs[:, :n])
        found |= np.abs(mean) > stats.half_width(error, df)
    assert found.mean() > 0.15


def test_intervals_of_stopped_runs_cover_a_true_difference_and_large_ones_stop_early():
    runs = abba(np.random.default_rng(8), "noise", "none", 24, effect=0.06, runs=1000)
    decisions = [live(run, stats.Checkpoints.every(24, 6)) for run in runs]
    assert np.mean([d.interval.low <= 1.06 <= d.interval.high for d in decisions]) >= 0.94
    assert np.mean([d.interval.n < 24 for d in decisions]) > 0.5 and {d.why for d in decisions} == {
        "decided",
        "pairs",
    }


def test_the_stop_rule_looks_at_checkpoints_only_and_minds_its_budgets():
    looks = stats.Checkpoints((4, 8))
    clear = [0.2, 0.21, 0.19, 0.2, 0.2]
    assert stats.should_stop(looks, clear[:3]) == stats.Decision(False, None, None)
    assert stats.should_stop(looks, clear) == stats.Decision(
        False, None, None
    )  # 5 pairs: no checkpoint
    assert stats.should_stop(looks, clear[:4]).why == "decided"
    assert stats.should_stop(looks, clear[:4], wished=0.001).why is None
    assert stats.should_stop(looks, clear, seconds_left=0.0).why == "seconds"
    assert stats.should_stop(looks, clear[:2], seconds_left=-1.0) == stats.Decision(
        True, "seconds", None
    )
    assert stats.should_stop(looks, [0.3, -0.3] * 4).why == "pairs"


def test_a_speed_up_of_3_percent_is_found_by_pairs_and_missed_by_one_block_an_arm():
    """5 % of block noise, 10 % of drift, the same 120 blocks' time: 60 pairs in A B B A against one
    long block of each arm.
    """
    rng = np.random.default_rng(9)
    mean, error, df = stats.paired_error(abba(rng, "noise", "linear", 60, effect=0.03))
    assert np.mean(mean - stats.half_width(error, df) > 0) > 0.80
    blocks = noise(rng, "noise", (SIMULATIONS, 120)) + drift(rng, "linear", (SIMULATIONS, 120))
    one_each = blocks[:, 60:].mean(-1) + math.log1p(0.03) - blocks[:, :60].mean(-1)
    assert (
        np.mean(one_each > 0) < 0.05
    )  # it even says that B is slower: the drift is in the difference
