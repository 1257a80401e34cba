"""Real SGLang servers on the CPU engine, with the trained tiny pair. A server is shared by the tests of a module."""
from __future__ import annotations

from pathlib import Path

import pytest
from serving import TOKENS

from workbench import profile, reference, server


@pytest.fixture(scope="session", autouse=True)
def _import(imported_once):
    pass


@pytest.fixture(scope="session")
def tiny() -> profile.Profile:
    return profile.load("cpu-tiny")


@pytest.fixture(scope="session")
def heldout(tiny) -> list[dict]:
    return list(server.prompts(tiny.workload.prompts))


@pytest.fixture(scope="session")
def decoded(tiny, heldout) -> list[reference.Decoded]:
    """The offline reference for the first 32 held-out prompts, chain of 3."""
    return reference.decode(tiny.pair.target, tiny.pair.draft, [p["input_ids"] for p in heldout[:32]], TOKENS, 3)


@pytest.fixture(scope="session")
def logfolder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")
