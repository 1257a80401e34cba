"""SGLang is imported once for all tests that start servers, as it is for all servers of a run."""
import pytest

from workbench import profile, server


@pytest.fixture(scope="session")
def imported_once():
    with server.imported_once(profile.load("cpu-tiny")):
        yield
