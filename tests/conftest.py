"""SGLang is imported once for all tests that start servers, as it is for all servers of a run; under pytest-xdist in each process."""
import os

import pytest
from xdist.scheduler import LoadScopeScheduling

from workbench import profile, server

# Their tests share fixtures and go one by one: whole runs in one process, single servers in the other.
ONE_BY_ONE = {"tests/browser/": "runs", "tests/notebooks/": "runs", "tests/engine/": "servers"}


@pytest.fixture(scope="session")
def imported_once():
    with server.imported_once(profile.load("cpu-tiny")):
        yield


class Scheduling(LoadScopeScheduling):
    """The two kinds of tests that use servers begin first, and a third process and whichever is done take the rest singly."""

    def _split_scope(self, nodeid: str) -> str:
        return next((kind for folder, kind in ONE_BY_ONE.items() if nodeid.startswith(folder)), nodeid)


def pytest_configure(config: pytest.Config) -> None:
    """Tests that use servers wait half of their time, often for each other's processes: the third process has what they leave of two cores."""
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw2":
        os.nice(10)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    return Scheduling(config, log)
