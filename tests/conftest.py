"""SGLang is imported once for all tests that start servers, as it is for all servers of a run; under pytest-xdist they share one process."""
import pytest
from xdist.scheduler import LoadScopeScheduling

from workbench import profile, server

ONE_BY_ONE = ("tests/browser/", "tests/engine/", "tests/notebooks/")       # servers take both cores, and share fixtures


@pytest.fixture(scope="session")
def imported_once():
    with server.imported_once(profile.load("cpu-tiny")):
        yield


class Scheduling(LoadScopeScheduling):
    """One process has all tests that use servers or a browser, the other takes the rest singly."""

    def _split_scope(self, nodeid: str) -> str:
        return "servers" if nodeid.startswith(ONE_BY_ONE) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    return Scheduling(config, log)
