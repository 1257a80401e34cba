"""Successive halving, held against simulated fields whose best is known; and what an estimate from
the search itself would claim.
"""

import numpy as np
import pytest

from workbench.experiment import halving

NOISE, PAIR_NOISE = 0.04, 0.15  # of a block; of what moves all blocks of a pair alike


def race(rng, truth, pairs):
    """The winner, the blocks it took, and all that was measured: a field of true log speeds, with
    the plan of 05_steps.
    """
    logs, left, pair, used = {name: {} for name in truth}, list(truth), 0, 0
    while len(left) > 1:
        for unit in range(pair, pair + pairs):
            shared = PAIR_NOISE * rng.standard_normal()
            for name in left:
                logs[name][unit] = truth[name] + shared + NOISE * rng.standard_normal()
                used += 1
        pair, pairs = pair + pairs, 2 * pairs
        left = list(halving.better_half({name: logs[name] for name in left}))
    return left[0], used, logs


def grid(rng, truth, pairs):
    """The best of a full grid, every candidate with as many pairs."""
    total = {name: 0.0 for name in truth}
    for _ in range(pairs):
        shared = PAIR_NOISE * rng.standard_normal()
        for name in truth:
            total[name] += truth[name] + shared + NOISE * rng.standard_normal()
    return max(total, key=total.get)


@pytest.fixture
def field():
    """Twelve settings from 3 % to 30 % slower than the best."""
    return {f"s{n}": -0.03 * n if n < 3 else -0.025 * n for n in range(12)}


def test_halving_finds_the_best_more_often_than_a_grid_of_as_many_blocks(field):
    rng, runs = np.random.default_rng(1), 400
    raced = [race(rng, field, 2) for _ in range(runs)]
    used = raced[0][1]
    assert used == 2 * 12 + 4 * 6 + 8 * 3 + 16 * 2
    found, by_grid = (
        np.mean([name == "s0" for name in names])
        for names in (
            [name for name, *_ in raced],
            [grid(rng, field, used // len(field)) for _ in range(runs)],
        )
    )
    assert found > 0.9 and found > by_grid + 0.03


def test_what_moves_a_whole_pair_does_not_choose(field):
    rng = np.random.default_rng(2)
    unpaired = [
        max(field, key=lambda n: field[n] + (NOISE + PAIR_NOISE) * rng.standard_normal())
        for _ in range(300)
    ]
    assert (
        np.mean([race(rng, field, 1)[0] in ("s0", "s1") for _ in range(300)])
        > 0.9
        > np.mean([n in ("s0", "s1") for n in unpaired])
    )


def test_the_searchs_own_figures_flatter_the_winner_and_fresh_blocks_do_not():
    """Twelve equal settings: by its search the winner is ahead of the field's mean, which is why it
    is measured again.
    """
    rng, claimed = np.random.default_rng(3), []
    for _ in range(200):
        winner, _, logs = race(rng, {f"s{n}": 0.0 for n in range(12)}, 1)
        claimed.append(
            halving.standing({name: {0: found[0]} for name, found in logs.items()})[winner]
        )
    assert np.mean(claimed) > 0.01


def test_effects_use_every_pair_and_cancel_what_moves_them():
    rng = np.random.default_rng(4)
    truth = {f"s{n}": -0.03 * n for n in range(8)}
    logs = race(rng, truth, 4)[2]
    for (
        found
    ) in logs.values():  # survivors alone got the later pairs: a trend would pass for their speed
        for unit in found:
            found[unit] += 0.5 * unit
    found = halving.effects(logs)
    assert max(found.values()) == 0
    assert all(abs((found[name] - found["s0"]) - truth[name]) < 0.06 for name in truth)


def test_of_equals_the_first_goes_on_and_odd_fields_keep_the_larger_half():
    assert halving.better_half({"a": {0: 1.0}, "b": {0: 1.0}, "c": {0: 0.5}}) == ("a", "b")
    assert halving.better_half({"a": {0: 1.0}, "b": {0: 2.0}}) == ("b",)


def test_a_unit_that_one_candidate_lacks_does_not_count():
    logs = {"a": {0: 0.0, 1: 9.0}, "b": {0: 0.1}}
    assert halving.better_half(logs) == ("b",)
    with pytest.raises(ValueError, match="no unit has all of a, b"):
        halving.standing({"a": {0: 1.0}, "b": {1: 1.0}})
