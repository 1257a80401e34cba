"""Accept metrics: definitions, weights, intervals that cover, and unknown that stays unknown."""

import math

import numpy as np
import pytest

from workbench.experiment.runlog import Request
from workbench.judge import accept


def request(prompt="p", rounds=None, correct=None, histogram=None, steps=3, completion=64, **more):
    proposed = rounds * steps if rounds else None
    return Request(
        prompt=prompt,
        prompt_tokens=8,
        completion_tokens=completion,
        sent=0,
        end=1,
        verify_ct=rounds,
        correct=correct,
        proposed=more.pop("proposed", proposed),
        histogram=histogram,
        **more,
    )


def test_accepted_drafts_of_1_1_are_an_accept_length_of_2_1():
    found = accept.measure([request(rounds=100, correct=110)])
    assert found.drafts.value == pytest.approx(1.1) and found.length.value == pytest.approx(2.1)


def test_sums_are_divided_never_averages_averaged():
    found = accept.measure(
        [
            request("long", rounds=30, correct=30, completion=61),
            request("short", rounds=10, correct=30, completion=41),
        ]
    )
    assert found.length.value == 1 + 60 / 40
    assert found.length_by_request.value == ((1 + 30 / 30) + (1 + 30 / 10)) / 2
    assert (
        found.rate.value == 60 / 120 and found.rounds == 40 and found.requests == found.units == 2
    )


def test_sglangs_own_counter_includes_the_token_of_the_prefill():
    found = accept.measure([request(rounds=20, correct=42, completion=63)])
    assert found.reported_length.value == 63 / 20 == pytest.approx(found.length.value + 1 / 20)


def test_positions_come_from_the_histogram_and_add_up_to_the_accepted_drafts():
    found = accept.measure(
        [
            request("a", rounds=10, correct=3 * 4 + 2 * 1 + 1 * 2, histogram=(3, 2, 1, 4)),
            request("b", rounds=6, correct=1, histogram=(5, 1)),
        ]
    )
    assert [p.value for p in found.positions] == [8 / 16, 5 / 16, 4 / 16]
    assert sum(p.value for p in found.positions) == pytest.approx(found.drafts.value)


def test_a_tree_proposes_more_than_its_steps():
    assert accept.measure([request(rounds=10, correct=15, proposed=70)]).rate.value == 15 / 70


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [request()],
        [request(rounds=0, correct=0)],
        [request(rounds=5)],
        [request(correct=5)],
        [request(rounds=5, correct=5, error="aborted")],
    ],
)
def test_missing_counts_are_unknown(requests):
    assert accept.measure(requests) is None


def test_what_some_requests_do_not_tell_is_left_out_and_counted():
    found = accept.measure(
        [
            request("a", rounds=10, correct=20),
            request("b"),
            request("c", rounds=4, correct=0, proposed=None),
        ]
    )
    assert (found.requests, found.unknown, found.units) == (2, 1, 2)
    assert (
        found.length.value == 1 + 20 / 14
        and found.rate.value == 20 / 30
        and found.positions is None
    )


def test_one_prompt_gives_no_interval_and_its_repeats_count_once():
    alone = accept.measure([request("a", rounds=10, correct=20)] * 5)
    assert alone.length.low is None and alone.length.high is None and alone.units == 1
    two = [request("a", rounds=10, correct=20), request("b", rounds=12, correct=15)]
    once, often = accept.measure(two), accept.measure(two * 5)
    assert (often.length.low, often.length.high) == pytest.approx(
        (once.length.low, once.length.high)
    )


def test_equal_rounds_give_the_t_interval_over_requests():
    correct = np.array([12, 20, 15, 17, 9])
    found = accept.measure(
        [request(str(i), rounds=10, correct=int(c)) for i, c in enumerate(correct)]
    )
    half = 2.7764 * (correct / 10).std(ddof=1) / math.sqrt(5)
    assert (found.length.low, found.length.high) == pytest.approx(
        (1 + 1.46 - half, 1 + 1.46 + half), rel=1e-4
    )


def simulated(rng, prompts, p, tokens=64, steps=3):
    """Requests that each make ``tokens`` tokens, with drafts accepted with the prompt's own
    probability.
    """
    found = []
    for i, chance in enumerate(p[:prompts]):
        made, histogram = 1, [0] * (steps + 1)
        while made < tokens:
            correct = int(np.argmin(np.append(rng.random(steps) < chance, False)))
            histogram[correct] += 1
            made += correct + 1
        found.append(
            request(
                str(i),
                rounds=sum(histogram),
                correct=sum(k * n for k, n in enumerate(histogram)),
                histogram=tuple(histogram),
                completion=tokens,
            )
        )
    return found


def test_the_interval_covers_the_length_that_endless_requests_would_have():
    rng = np.random.default_rng(1)
    p = rng.beta(6, 3, 20_000)
    per_round = p + p**2 + p**3
    truth = 1 + np.sum(per_round * 1 / (1 + per_round)) / np.sum(
        1 / (1 + per_round)
    )  # rounds of a prompt go as 1 / its own length
    covered = [
        found.length.low <= truth <= found.length.high
        for _ in range(250)
        if (found := accept.measure(simulated(rng, 16, rng.beta(6, 3, 16))))
    ]
    assert 0.91 <= np.mean(covered) <= 0.98


def test_a_difference_between_arms_is_taken_prompt_by_prompt():
    rng = np.random.default_rng(2)
    p = rng.beta(6, 3, 24)
    a, b = simulated(rng, 24, p), simulated(rng, 24, p)
    worse = simulated(rng, 24, 0.8 * p)
    same, moved = accept.difference(a, b), accept.difference(a, worse)
    assert same.low <= 0 <= same.high and moved.low > 0
    assert moved.value == pytest.approx(
        accept.measure(a).length.value - accept.measure(worse).length.value
    )
    apart = accept.measure(a).length
    assert same.high - same.low < 0.9 * (apart.high - apart.low) * math.sqrt(2)
    assert accept.difference(a, a) == accept.Estimate(0, 0, 0)


def test_only_prompts_of_both_arms_are_compared():
    a = [request("x", rounds=10, correct=20), request("only a", rounds=10, correct=0)]
    b = [request("x", rounds=10, correct=20), request("only b", rounds=10, correct=30)]
    assert accept.difference(a, b).value == 0
    assert accept.difference(a[1:], b[1:]) is None


def test_a_share_stays_between_0_and_1():
    found = accept.measure(
        [
            request("a", rounds=10, correct=30, histogram=(0, 0, 0, 10)),
            request("b", rounds=10, correct=28, histogram=(0, 1, 0, 9)),
        ]
    )
    assert all(0 <= e.low <= e.value <= e.high <= 1 for e in (*found.positions, found.rate))
