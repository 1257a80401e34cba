"""The best number of draft steps: by hand, at its limits, and with public acceptance figures."""

import math

import numpy as np
import pytest

from workbench.experiment.errors import BadInput
from workbench.predict.step_count import best, choices, sentence, table

# Kimi-K2.5 with EAGLE-3, thinking off, accept length by draft tokens 1 to 8
# (SemiAnalysisAI/InferenceX, kimik2.5_eagle3.yaml).
KIMI = (1.80, 2.33, 2.75, 3.06, 3.25, 3.43, 3.46, 3.51)
FLAT = {1: 10e-3, 9: 10e-3}


def positions(accept_lengths):
    """Acceptance at each position: what each further draft token adds to the accept length, the
    first one's against 1.
    """
    return tuple(np.diff([1.0, *accept_lengths]).tolist())


def test_accept_lengths_are_one_and_the_positions_before():
    assert positions(KIMI) == pytest.approx((0.80, 0.53, 0.42, 0.31, 0.19, 0.18, 0.03, 0.05))
    assert [c.accept_length for c in choices(positions(KIMI), FLAT, 0)] == pytest.approx(
        [1.0, *KIMI]
    )


def test_a_cycle_is_verify_and_its_draft_steps():
    found = choices([0.8, 0.5], {1: 10e-3, 2: 12e-3, 3: 15e-3}, 1e-3, fixed_s=2e-3)
    assert [c.cycle_s for c in found] == pytest.approx([12e-3, 15e-3, 19e-3])
    assert [c.tokens_per_s for c in found] == pytest.approx([1 / 12e-3, 1.8 / 15e-3, 2.3 / 19e-3])
    assert best(found).steps == 2


def test_steps_that_cost_nothing_are_all_worth_it_and_costly_ones_are_none():
    assert best(choices(positions(KIMI), FLAT, 0)).steps == 8
    assert best(choices(positions(KIMI), FLAT, 20e-3)).steps == 0
    assert best(choices([0.0, 0.0], FLAT, 0)).steps == 0  # of equals, no speculation


@pytest.mark.parametrize(
    "slope, steps", [(0.0, 6), (0.8e-3, 4), (2e-3, 3), (3e-3, 2), (4e-3, 1), (9e-3, 0)]
)
def test_the_dearer_a_wider_verify_the_fewer_steps(slope, steps):
    verify = {width: 10e-3 + slope * (width - 1) for width in range(1, 10)}
    assert best(choices(positions(KIMI), verify, 0.4e-3)).steps == steps


def test_the_best_is_where_a_further_position_no_longer_pays():
    found = choices(positions(KIMI), {w: 10e-3 + 0.8e-3 * w for w in range(1, 10)}, 0.4e-3)
    chosen = best(found)
    # A position pays while its acceptance over its cost is above the tokens a second without it.
    pays = [share / 1.2e-3 > before.tokens_per_s for share, before in zip(positions(KIMI), found)]
    assert pays[: chosen.steps] == [True] * chosen.steps and not pays[chosen.steps]


def test_widths_between_measured_ones_are_linear_and_none_beyond():
    found = choices([0.9] * 6, {1: 10e-3, 3: 14e-3, 5: 16e-3}, 0)
    assert [c.cycle_s for c in found] == pytest.approx([10e-3, 12e-3, 14e-3, 15e-3, 16e-3])
    assert len(choices([0.9] * 2, FLAT, 0)) == 3


def test_a_measured_plain_step_is_the_yardstick():
    assert choices([0.5], {1: 10e-3, 2: 11e-3}, 0, plain_s=7e-3)[0].tokens_per_s == pytest.approx(
        1 / 7e-3
    )
    assert best(choices([0.5], {1: 10e-3, 2: 11e-3}, 0, plain_s=7e-3)).steps == 0


@pytest.mark.parametrize(
    "field, arguments",
    [
        ("acceptance", ([1.2], FLAT, 0)),
        ("acceptance", ([-0.1], FLAT, 0)),
        ("acceptance", ([math.nan], FLAT, 0)),
        ("verify_s", ([0.5], {}, 0)),
        ("verify_s", ([0.5], {2: 1e-3}, 0)),
        ("verify_s", ([0.5], {1: 0.0}, 0)),
        ("verify_s", ([0.5], FLAT, math.inf)),
        ("verify_s", ([0.5], FLAT, -1)),
    ],
)
def test_what_cannot_be_is_refused(field, arguments):
    with pytest.raises(BadInput) as error:
        choices(*arguments)
    assert error.value.field == field


def test_the_words_follow_the_numbers():
    found = choices(positions(KIMI), {w: 10e-3 + 0.8e-3 * w for w in range(1, 10)}, 0.4e-3)
    assert sentence(found).startswith(
        f"{best(found).steps} steps would be best: {best(found).tokens_per_s:.3g} tokens/s"
    )
    assert "1 step would be best (the most that is known" in sentence(choices([0.9], FLAT, 0))
    assert sentence(choices([0.1], FLAT, 5e-3)).startswith("No speculation is best: 100 tokens/s")
    assert sentence(choices([], FLAT, 0)) == sentence([]) and sentence([]).startswith(
        "No number of steps can be judged"
    )
    assert table(found)["steps"].tolist() == list(range(9))
