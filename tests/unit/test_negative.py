"""The negative control's choice of arms and its words, with no server: a rank that passes unnoticed is said to."""
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from workbench import lab, negative, runlog
from workbench.profile import load


def test_without_simulation_both_ways_must_notice_and_with_it_only_the_one_that_compares():
    assert [arm.name for arm in negative.arms(load("cpu-tiny"))] == ["own-1+agreement=check", "own-1+agreement=off"]
    assert [arm.name for arm in negative.arms(load("h200-x2"))] == ["own-1+agreement=check"]
    assert negative.arms(load("cpu-tiny", {"arms": ["none", "shared"]})) == []


@pytest.mark.parametrize("error", [None, "the ranks' tokens differ"])
def test_what_a_corrupted_rank_did_is_kept_once(monkeypatch, tmp_path, error):
    started = []

    @contextmanager
    def serve(profile, arm, log, corrupt_rank):
        started.append((arm.name, corrupt_rank, profile.server.token_within_s))
        yield SimpleNamespace(url="http://127.0.0.1:1", unattested=("a planted fault",))

    monkeypatch.setattr(negative.servers, "serve", serve)
    monkeypatch.setattr(negative.client, "send", lambda *_, **__: [SimpleNamespace(error=error)])
    run = lab.open_lab("cpu-tiny", tmp_path / "run", {"negative_control": True})
    said = negative.corrupted_rank(run)
    assert sorted(started) == [("own-1+agreement=check", 1, 20.0), ("own-1+agreement=off", 1, 20.0)]
    assert all(("unnoticed" in line) is (error is None) for line in said) and negative.corrupted_rank(run) == said and len(started) == 2
    assert {r.value["detected"] for r in run.records if r.experiment == runlog.NEGATIVE} == {error is not None}


def test_nothing_is_started_unless_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(negative.servers, "serve", None)
    assert negative.corrupted_rank(lab.open_lab("cpu-tiny", tmp_path / "run")) == []
