"""Every profile that ships passes the preflight on the machine it is for; what a user must fill in
is refused by name.
"""

import pytest

from workbench.experiment import profile
from workbench.predict import preflight

YOURS = {"rtx6000-x8-kimi": {"pair.target", "pair.draft", "workload.prompts"}}


@pytest.mark.parametrize("name", profile.available())
def test_a_profile_that_ships_is_refused_for_nothing_but_what_is_to_be_filled_in(name):
    chosen = profile.load(name)
    refused = {
        found.name
        for found in preflight.check(chosen, free_bytes=[139 << 30] * chosen.tp)
        if found.status == "refused"
    }
    assert refused == YOURS.get(name, set())


def test_a_stand_in_for_pcie_says_so():
    for name in profile.available():
        if name.endswith("hostpath"):
            assert "stand-in for PCIe" in profile.load(name).about
