"""The crossover over requests at once, with simulated pairs that cross 1 at a known load."""

import math

import numpy as np
import pytest

from workbench.answers.steps import crossover, crossover_sentence
from workbench.judge import stats
from workbench.judge.stats import Interval

LOADS = (1, 2, 4, 8, 16, 32)


def simulated(rng, at, slope, pairs=16, noise=0.03):
    """Ratios whose logarithm falls by ``slope`` a doubling and is 0 at the load ``at``."""
    return {
        load: (stats.mean_ratio(-slope * math.log2(load / at) + noise * rng.standard_normal(pairs)))
        for load in LOADS
    }


def test_a_planted_crossing_is_found():
    rng = np.random.default_rng(1)
    found = [crossover(simulated(rng, 6, 0.08)) for _ in range(100)]
    assert sum(f.sure and max(f.faster) < 6 < min(f.slower) for f in found) >= 90
    nearest = [f.at[0] for f in found if len(f.at) == 1]
    assert len(nearest) > 90 and abs(np.mean(np.log2(nearest)) - math.log2(6)) < 0.1


def test_no_crossing_is_claimed_where_there_is_none():
    rng = np.random.default_rng(2)
    assert sum(crossover(simulated(rng, 4, 0.0)).sure for _ in range(200)) <= 10


def interval(ratio, half=0.02):
    return Interval(ratio, ratio - half, ratio + half, 0.95, "paired t", 8)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ({1: 1.2, 4: 1.1}, "a against b: faster at 1, 4 requests at once."),
        ({1: 0.9}, "a against b: slower at 1 request at once."),
        ({1: 1.01, 4: 0.99}, "a against b: not told apart at 1, 4 requests at once."),
        (
            {1: 1.1, 4: 0.9},
            (
                "a against b: faster at 1 request at once, slower at 4 requests at once; its ratio"
                " crosses 1 near 1.9 at once."
            ),
        ),
        ({}, ""),
    ],
)
def test_the_sentence_says_what_the_intervals_do(ratios, words):
    assert (
        crossover_sentence("a", "b", {load: interval(ratio) for load, ratio in ratios.items()})
        == words
    )


def test_a_ratio_of_exactly_one_is_a_crossing_once():
    assert crossover({1: interval(1.1), 2: interval(1.0), 4: interval(0.9)}).at == (2.0,)
