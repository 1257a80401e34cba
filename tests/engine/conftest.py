"""Real SGLang servers on the CPU engine, with the trained tiny pair. A server is shared by the
tests of a module.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import TOKENS

from workbench.answers import offline_decoder, reference_models
from workbench.experiment import profile


@pytest.fixture(scope="session", autouse=True)
def _import(imported_once):
    pass


@pytest.fixture(scope="session")
def tiny() -> profile.Profile:
    return profile.load("cpu-tiny")


@pytest.fixture(scope="session")
def heldout(tiny) -> list[dict]:
    return json.loads(tiny.workload.prompts.read_text())


@pytest.fixture(scope="session")
def decoded(tiny, heldout) -> list[reference_models.Decoded]:
    """The offline reference for the first 32 held-out prompts, chain of 3."""
    return offline_decoder.decode(
        tiny.pair.target, tiny.pair.draft, [p["input_ids"] for p in heldout[:32]], TOKENS, 3
    )


@pytest.fixture(scope="session")
def logfolder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")
