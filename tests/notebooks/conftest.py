"""One replay of the whole investigation, shared by the tests that look at what it leaves."""

import pytest
from replaying import SHORT, Replayed, replay


@pytest.fixture(scope="session", autouse=True)
def _import(imported_once):
    """Every replay here is served by the one import of SGLang; that a run makes one of its own is
    what tests/engine/test_faults.py has."""


@pytest.fixture(scope="session")
def replayed(tmp_path_factory) -> Replayed:
    """What ``make replay`` does, in a folder of its own, with blocks of one short request: whether
    all of it is done, and what it finds of tokens, does not hang on how long a block is.
    """
    return replay(tmp_path_factory.mktemp("run") / "tiny", *SHORT)


@pytest.fixture(scope="session")
def rendered(tmp_path_factory) -> Replayed:
    """The replay of a recording that nobody interrupts."""
    return replay(tmp_path_factory.mktemp("rendered") / "run", profile="recorded:cpu-tiny")
