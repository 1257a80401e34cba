"""The negative control's choice of arms and its words, with no server: a rank that passes unnoticed
is said to.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from workbench.answers import negative_control
from workbench.experiment import runlog
from workbench.experiment.errors import Hung, ServerFailed
from workbench.experiment.profile import load
from workbench.run import lab


def test_without_simulation_both_ways_must_notice_and_with_it_only_the_one_that_compares():
    assert [arm.name for arm in negative_control.arms(load("cpu-tiny"))] == [
        "own-1+agreement=check",
        "own-1+agreement=off",
    ]
    assert [arm.name for arm in negative_control.arms(load("h200-x2"))] == ["own-1+agreement=check"]
    assert negative_control.arms(load("cpu-tiny", {"arms": ["none", "shared"]})) == []


class Fake:
    """Stands for workbench.serving.server.serve: what its server does, and what its log says."""

    def __init__(self, monkeypatch, starts=None, error=None, log="", named=True):
        self.started, self.starts, self.log, self.named = [], starts, log, named
        monkeypatch.setattr(negative_control.servers, "serve", self.serve)
        monkeypatch.setattr(negative_control.servers, "imported_once", nullcontext)
        monkeypatch.setattr(
            negative_control.client, "send", lambda *_, **__: [SimpleNamespace(error=error)]
        )

    @contextmanager
    def serve(self, profile, arm, log, corrupt_rank):
        self.started.append((arm.name, corrupt_rank, profile.server.token_within_s))
        log.parent.mkdir(exist_ok=True)
        log.write_text(
            f"draft-tp: TP0: ranks [{corrupt_rank}] drafted another tree than rank 0"
            if arm.agreement == "check" and self.named
            else self.log
        )
        if self.starts:
            raise self.starts
        yield SimpleNamespace(url="http://127.0.0.1:1", unattested=("a planted fault",))


UP = "INFO:     Uvicorn running on http://127.0.0.1:1 (Press CTRL+C to quit)\n"


@pytest.fixture
def run(tmp_path):
    return lab.open_lab("cpu-tiny", tmp_path / "run", {"negative_control": True})


@pytest.mark.parametrize("error", [None, "the server ended while requests were at work"])
def test_what_a_corrupted_rank_did_is_kept_once(monkeypatch, run, error):
    fake = Fake(monkeypatch, error=error, log=UP)
    said = negative_control.corrupted_rank(run)
    assert sorted(fake.started) == [
        ("own-1+agreement=check", 1, 20.0),
        ("own-1+agreement=off", 1, 20.0),
    ]
    assert all(("unnoticed" in line) is (error is None) for line in said)
    assert negative_control.corrupted_rank(run) == said and len(fake.started) == 2
    assert {r.value["detected"] for r in run.records if r.experiment == runlog.NEGATIVE} == {
        error is not None
    }


@pytest.mark.parametrize(
    ("failure", "log"),
    [
        (Hung("the server accepts requests but no completion came within 20 s"), ""),
        (ServerFailed("the server died while starting: gloo"), UP),
    ],
)
def test_ranks_that_part_over_a_request_are_caught_without_a_comparison(
    monkeypatch, run, failure, log
):
    Fake(monkeypatch, failure, log=log)
    assert all("caught within" in line for line in negative_control.corrupted_rank(run))


@pytest.mark.parametrize(
    ("failure", "log"),
    [
        (ServerFailed("the server died while starting: a port was taken"), ""),
        (ServerFailed("the server died while starting: CUDA out of memory"), UP),
    ],
)
def test_a_server_that_fails_for_another_reason_proves_nothing_and_is_tried_again(
    monkeypatch, run, failure, log
):
    fake = Fake(monkeypatch, failure, log=log)
    with pytest.raises(
        ServerFailed,
        match=(
            "own-1\\+agreement=off, rank 1 corrupted on purpose: its server failed for another"
            " reason"
        ),
    ):
        negative_control.corrupted_rank(run)
    assert list(negative_control.known(run)) == [
        "own-1+agreement=check"
    ]  # whose log names the rank
    with pytest.raises(ServerFailed):
        negative_control.corrupted_rank(run)
    assert [name for name, *_ in fake.started].count("own-1+agreement=off") == 2 and len(
        fake.started
    ) == 3


def test_check_counts_only_where_it_names_the_rank(monkeypatch, run):
    Fake(monkeypatch, Hung("hung: no token for 20 s"), named=False)
    with pytest.raises(ServerFailed, match="agreement=check.*failed for another reason"):
        negative_control.corrupted_rank(run)
    assert list(negative_control.known(run)) == ["own-1+agreement=off"]


def test_nothing_is_started_unless_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(negative_control.servers, "serve", None)
    assert negative_control.corrupted_rank(lab.open_lab("cpu-tiny", tmp_path / "run")) == []
