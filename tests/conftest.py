"""SGLang is imported once for all tests that start servers, as it is for all servers of a run;
under pytest-xdist by the process that starts the others.
"""

import pytest
from xdist.scheduler import LoadScopeScheduling

import workbench.report.lean_imports  # noqa: F401  (before tests import nbformat)
from tests.imported import Imported
from workbench.experiment import profile
from workbench.experiment.arms import Arm
from workbench.serving import launch_command, server

# Their tests share fixtures and go one by one: whole runs in one process, single servers in the
# other.
ONE_BY_ONE = {
    "tests/browser/": "runs",
    "tests/notebooks/": "runs",
    "tests/engine/": "servers",
    "tests/unit/engine/test_stand_ins.py": "servers",
}


@pytest.fixture(scope="session")
def imported_once():
    with server.imported_once(profile.load("cpu-tiny")):
        yield


@pytest.fixture(scope="session")
def imported():
    """A process that has imported SGLang with the environment of a CPU server without orders."""
    launch = launch_command.plan(profile.load("cpu-tiny"), Arm.parse("none"), port=1, server="")
    process = Imported({k: v for k, v in launch.environment.items() if k != "DRAFT_TP_ORDERS"})
    yield process
    process.end()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before pytest-xdist starts its processes, which then find the fork server as a run's do."""
    asked = [str(argument) for argument in session.config.args]
    if getattr(session.config.option, "numprocesses", None) and not all("unit" in a for a in asked):
        everyones = server.imported_once(profile.load("cpu-tiny"))
        everyones.__enter__()
        session.config.add_cleanup(lambda: everyones.__exit__(None, None, None))


class Scheduling(LoadScopeScheduling):
    """The two kinds of tests that use servers begin first, and whichever process is done takes the
    rest singly.
    """

    def _split_scope(self, nodeid: str) -> str:
        return next(
            (kind for folder, kind in ONE_BY_ONE.items() if nodeid.startswith(folder)), nodeid
        )


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    return Scheduling(config, log)
