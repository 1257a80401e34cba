"""SGLang is imported once for all tests that start servers, as it is for all servers of a run; under pytest-xdist they share one process."""
import pytest
from xdist.scheduler import LoadScopeScheduling

from workbench import profile, server

# Tests of one of these share fixtures and go one by one in one process. They wait as much as they compute, so two cores serve three processes.
ONE_BY_ONE = ("tests/browser/", "tests/engine/", "tests/notebooks/")


@pytest.fixture(scope="session")
def imported_once():
    with server.imported_once(profile.load("cpu-tiny")):
        yield


class Scheduling(LoadScopeScheduling):
    """The kinds of tests that use servers or a browser begin first, and whichever process is done takes the rest singly."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in ONE_BY_ONE if nodeid.startswith(folder)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    return Scheduling(config, log)
