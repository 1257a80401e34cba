"""SGLang is imported once for all tests that start servers, as it is for all servers of a run."""
from pathlib import Path

import pytest

from workbench import profile, server


@pytest.fixture(scope="session")
def imported_once():
    with server.imported_once(profile.load("cpu-tiny")):
        yield


def pytest_itemcollected(item: pytest.Item) -> None:
    """All that use servers or a browser share one process under pytest-xdist, and its fixtures; the rest is handed out singly."""
    if Path(item.path).parent.name in ("browser", "engine", "notebooks"):
        item.add_marker(pytest.mark.xdist_group("servers"))
