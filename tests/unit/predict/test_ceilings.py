"""Ceilings from four numbers: the field report's figures, the limits of what they tell, and
input that cannot be true.
"""

import math

import pytest

from workbench.experiment.errors import BadInput
from workbench.predict.ceilings import Numbers, ceilings, sentence, table


def by_name(numbers: Numbers) -> dict:
    return {c.name: (c.low, c.high) for c in ceilings(numbers)}


def test_the_origins_numbers_are_the_default():
    origin = Numbers()
    assert 1e3 * origin.step_s == pytest.approx(11.1, abs=0.05)
    assert 1e3 * origin.cycle_s == pytest.approx(29.6, abs=0.05)
    assert origin.break_even == pytest.approx(2.66, abs=0.005)
    assert origin.collectives_s() == pytest.approx((0.5e-3, 1e-3))
    assert by_name(origin)["the draft's collectives were free, as given"] == pytest.approx(
        (72.2, 73.5), abs=0.05
    )
    assert by_name(origin)["both: a cycle of one plain step"] == pytest.approx((189, 189))


def test_the_counted_collectives_are_twice_the_estimate():
    assert Numbers().collectives_s(4) == pytest.approx((1e-3, 2e-3))
    low, high = by_name(Numbers())["the draft's collectives were free, as counted"]
    assert low == pytest.approx(2.1 / (2.1 / 71 - 1e-3)) and high == pytest.approx(
        2.1 / (2.1 / 71 - 2e-3)
    )


def test_the_sentence_says_the_origins_conclusion():
    said = sentence(Numbers())
    for figure in (
        "11.1 ms",
        "29.6 ms",
        "2.66 plain steps",
        "72 to 73.5 tokens/s",
        "17.5 to 18 ms",
    ):
        assert figure in said
    assert (
        "does not win at 2.1" in said
        and "that alone cannot be faster than no speculation (90)" in said
    )


def test_the_sentence_follows_the_numbers():
    assert "wins at 3" in sentence(
        Numbers(accept_length=3.0, speculative=100.0)
    ) and "it is 100 now" in sentence(Numbers(accept_length=3.0, speculative=100.0))
    assert "that alone would be faster" in sentence(
        Numbers(speculative=88.0, collective_s=(200e-6, 300e-6))
    )
    assert "that alone could be faster" in sentence(
        Numbers(speculative=86.0, collective_s=(1e-6, 300e-6))
    )
    assert "the 4 counted" not in sentence(Numbers(collectives_a_step=4))


def test_four_numbers_leave_draft_and_verify_open():
    assert by_name(Numbers())["the whole draft were free"] == pytest.approx((71, 189))
    assert by_name(Numbers())["verify cost one plain step"] == pytest.approx((71, 189))


def test_a_measured_draft_time_splits_the_cycle():
    known = Numbers(draft_s=8e-3)
    rest = known.cycle_s - 8e-3
    assert by_name(known)["the whole draft were free"] == pytest.approx((2.1 / rest,) * 2)
    # A verify of one plain step leaves that step and the draft.
    assert by_name(known)["verify cost one plain step"] == pytest.approx(
        (2.1 / (known.step_s + 8e-3),) * 2
    )


def test_no_ceiling_is_a_cycle_shorter_than_a_plain_step():
    wild = Numbers(collective_s=(1e-3, 1.0))
    assert max(c.high for c in ceilings(wild)) == pytest.approx(wild.accept_length * wild.baseline)
    assert "0 to" in sentence(wild)  # nothing is left elsewhere, and never less than nothing
    slow_draft = Numbers(
        draft_s=28e-3
    )  # with a verify below a plain step, which cannot be: held at the step
    assert by_name(slow_draft)["the whole draft were free"] == pytest.approx((189, 189))


def test_the_table_says_what_can_win():
    assert table(Numbers())["faster than no speculation"].tolist() == [
        "no",
        "no",
        "perhaps",
        "perhaps",
        "yes",
    ]
    assert len(table(Numbers(draft_s=8e-3))) == 5


@pytest.mark.parametrize(
    "field, changes",
    [
        ("baseline", {"baseline": 0}),
        ("baseline", {"baseline": math.nan}),
        ("speculative", {"speculative": -1}),
        ("speculative", {"speculative": "71"}),
        ("accept_length", {"accept_length": 0.9}),
        ("accept_length", {"accept_length": 6.5}),
        ("steps", {"steps": 0}),
        ("steps", {"steps": True}),
        ("collective_s", {"collective_s": (2e-4, 1e-4)}),
        ("collective_s", {"collective_s": (math.nan, 1e-4)}),
        ("collective_s", {"collectives_a_step": -1}),
        ("draft_s", {"draft_s": 0.03}),
        ("draft_s", {"draft_s": math.inf}),
        ("speculative", {"speculative": 200}),
    ],
)
def test_numbers_that_cannot_be_true_are_named(field, changes):
    with pytest.raises(BadInput) as error:
        Numbers(**changes)
    assert error.value.field == field and error.value.mend


def test_a_cycle_of_exactly_one_step_is_allowed():
    assert Numbers(
        baseline=50, speculative=100, accept_length=2.0, steps=1
    ).break_even == pytest.approx(1)
