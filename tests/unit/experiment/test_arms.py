"""Names of arms: what the grammar takes, and that a name and its arm are the same thing."""

import pytest

from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput


@pytest.mark.parametrize(
    "name",
    [
        "none",
        "shared",
        "own-1",
        "own-16",
        "none#2",
        "shared#3",
        "own-2+steps=2+agreement=off",
        "shared+topk=2+draft_tokens=6",
        "own-4#2+steps=5",
    ],
)
def test_a_name_survives_the_round_trip(name):
    assert Arm.parse(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "own",
        "own-0",
        "own--1",
        "own-1x",
        "Shared",
        "none+steps=2",
        "shared+speed=9",
        "own-1+agreement=maybe",
        "own-1+steps=many",
        "shared#0",
        "own-1 ",
    ],
)
def test_an_unknown_name_is_one_sentence(name):
    with pytest.raises(BadInput) as error:
        Arm.parse(name)
    assert (
        str(error.value).startswith("arm: ")
        and error.value.status == 2
        and "\n" not in str(error.value)
    )


def test_a_replica_is_served_by_the_same_configuration():
    assert Arm.parse("shared#2").configuration == Arm.parse("shared")
    assert Arm.parse("shared#2") != Arm.parse("shared")
