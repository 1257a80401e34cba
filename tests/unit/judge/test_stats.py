"""Intervals and resolution, held against simulated blocks whose truth is known."""

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
    assert 0.93 <= covered(*stats.mean_error(ratios), truth=math.log(1.03)) <= 0.97


def test_rare_slow_blocks_make_the_interval_wider_than_needed_never_too_short():
    assert (
        covered(*stats.mean_error(abba(np.random.default_rng(2), "spikes", "linear", 12))) >= 0.95
    )


def test_the_mean_ratio_is_the_textbook_one_and_ratios_multiply():
    logs = np.log([1.02, 1.05, 0.99, 1.04, 1.03])
    found = stats.mean_ratio(logs, 0.9)
    expected = scipy_stats.ttest_1samp(logs, 0).confidence_interval(0.9)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx(tuple(expected))
    assert found.ratio == pytest.approx((1.02 * 1.05 * 0.99 * 1.04 * 1.03) ** 0.2)
    assert found.n == 5 and found.level == 0.9
    mirrored = stats.mean_ratio(-logs, 0.9)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_equal_units_give_an_interval_of_no_width():
    found = stats.mean_ratio([0.1] * 5)
    assert found.low == found.high == pytest.approx(math.exp(0.1)) and found.decided


@pytest.mark.parametrize("values", [[], [0.1], [0.1, math.nan], [0.1, -math.inf]])
def test_too_little_or_broken_data_is_an_error(values):
    with pytest.raises(ValueError):
        stats.mean_ratio(values)
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
    mean, error, df = stats.mean_error(runs + math.log1p(effect))
    assert np.mean(mean > stats.half_width(error, df)) == pytest.approx(0.80, abs=0.01)


@pytest.mark.parametrize("level", [0.95, 0.983])
@pytest.mark.parametrize("wished", [0.005, 0.03, 0.5])
@pytest.mark.parametrize("sides", [1, 2])
def test_the_starts_needed_are_the_fewest_that_resolve(wished, level, sides):
    def reached(n):
        error = 0.07 * math.sqrt(sides / n)
        return stats.resolution(error, sides * (n - 1), level) <= wished

    n = stats.starts_needed(0.07, wished, level, sides=sides)
    assert reached(n) and (n == stats.MIN_STARTS or not reached(n - 1))


def test_the_normal_limit_of_the_starts_needed():
    # n = (1.960 + 0.842)^2 sd^2 / log(1 + r)^2 for large n
    assert stats.starts_needed(0.07, 0.005, sides=1) == pytest.approx(
        (2.8016 * 0.07 / math.log(1.005)) ** 2, rel=0.01
    )


def test_a_speed_up_of_3_percent_is_found_by_pairs_and_missed_by_one_block_an_arm():
    """5 % of block noise, 10 % of drift, the same 120 blocks' time: 60 pairs in A B B A against one
    long block of each arm.
    """
    rng = np.random.default_rng(9)
    mean, error, df = stats.mean_error(abba(rng, "noise", "linear", 60, effect=0.03))
    assert np.mean(mean - stats.half_width(error, df) > 0) > 0.80
    blocks = noise(rng, "noise", (SIMULATIONS, 120)) + drift(rng, "linear", (SIMULATIONS, 120))
    one_each = blocks[:, 60:].mean(-1) + math.log1p(0.03) - blocks[:, :60].mean(-1)
    assert (
        np.mean(one_each > 0) < 0.05
    )  # it even says that B is slower: the drift is in the difference
