"""The panel without a browser: one run at a time whoever clicks, found again, stopped by its own
means, everything from outside escaped.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from simulated_replay import measured
from simulated_runs import profile, sound

from workbench import panel as door
from workbench.experiment.runlog import Block, RunLog
from workbench.judge import narrowing
from workbench.panel import Panel
from workbench.report import chart_parts, sweep_charts
from workbench.run import ticket

SLEEPER = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(130));"
    " print('draft_tp: block 3 of 12 on own-1, about 40 s left', flush=True); time.sleep(60)"
)


class Quick(Panel):
    """A panel whose runs sleep, and are waited for at the end."""

    started: list = []

    def command(self, folder, options):
        Quick.started.append((folder, options))
        return [sys.executable, "-c", SLEEPER]


@pytest.fixture
def place(tmp_path, monkeypatch):
    Quick.started = []
    made = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        door.subprocess, "Popen", lambda *at, **how: made.append(popen(*at, **how)) or made[-1]
    )
    yield tmp_path / "outputs" / "notebook"
    for process in made:
        process.kill()
        process.wait()


def ended(folder: Path) -> None:
    end = time.monotonic() + 20
    while ticket.read(folder).alive and time.monotonic() < end:
        time.sleep(0.1)


def test_two_clicks_and_a_second_panel_start_one_run(place):
    first = Quick("cpu-tiny", place, "04_draft_tp")
    assert (first.start.disabled, first.stop.disabled) == (False, True)
    folder = first.begin()
    assert first.begin() == folder and Quick("cpu-tiny", place, "04_draft_tp").begin() == folder
    assert len(Quick.started) == 1 and ticket.read(folder).alive
    assert (first.start.disabled, first.stop.disabled) == (True, False)


def test_a_new_panel_finds_the_run_at_work_and_can_stop_it(place):
    folder = Quick("cpu-tiny", place).begin()
    again = Quick("cpu-tiny", place)
    ticket.tell_progress(folder, ticket.Progress("draft_tp", 3, 12, "own-1", 40.0))
    time.sleep(1)  # folders are named by the second
    again.refresh()
    assert (
        again.folder == folder
        and "Running" in again.state.value
        and "block 3 of 12 on own-1, about 40 s left" in again.state.value
    )
    assert (again.bar.value, again.bar.max) == (2, 12)
    again.end()
    ended(folder)
    again.refresh()
    assert "Ended" in again.state.value and again.start.disabled is False
    assert again.begin() != folder or len(Quick.started) == 2


def test_the_run_is_the_one_that_was_chosen(place):
    panel = Quick("cpu-tiny", place, "04_draft_tp")
    next(box for box in panel.arms.children if box.description == "none").value = False
    panel.pairs.value, panel.budget.value, panel.decided.value = 6, 90, True
    folder, options = (panel.begin(), Quick.started[0][1])
    changes = [word for flag, word in zip(options, options[1:]) if flag == "-p"]
    assert changes == ["arms=[shared, own-1]", "pairs=6", "starts=3", "stop=true", "budget_s=90.0"]
    skipped = [word for flag, word in zip(options, options[1:]) if flag == "--skip"]
    assert "04_draft_tp" not in skipped and len(skipped) == 7 and folder.parent == place.parent
    from workbench.commands import changes as parsed
    from workbench.experiment.profile import load

    assert load("cpu-tiny", parsed(changes)) == panel.chosen()


def test_what_cannot_be_run_is_said_and_not_started(place):
    panel = Quick("cpu-tiny", place)
    for box in panel.arms.children:
        box.value = False
    assert (
        panel.begin() is None
        and "plan.arms: is empty; tick an arm." in panel.checks.value
        and not Quick.started
    )


def test_the_widgets_take_a_profiles_own_plan_and_every_divisor_of_its_tp(place):
    panel = Quick("h200-x4" if "h200-x4" in door.available() else "cpu-tiny", place)
    names = [box.description for box in panel.arms.children]
    assert names[:2] == ["none", "shared"] and "own-1" in names
    assert panel.pairs.value == panel.chosen().plan.pairs


def test_a_finished_run_is_shown_with_its_verdict_and_nothing_of_it_is_markup(place):
    panel = Quick("cpu-tiny", place)
    folder = place.parent / "cpu-tiny-1"
    lab = measured(folder)
    from workbench.publish import publish

    publish(lab)
    (folder / ticket.LOG).write_text("<b>draft_tp: block 9 of 9 on own-1</b>")
    ticket.write(folder, ticket.Ticket(1, -7, "08_report", 8, 8, 0))
    panel.folder = folder
    panel.refresh()
    assert panel.pairs.value == lab.profile.plan.pairs
    assert (
        "finished, valid" in panel.state.value
        and "Valid." in panel.result.value
        and "own-1 is" in panel.result.value
    )
    assert (
        "<svg" in panel.chart.value
        and "&lt;b&gt;" in panel.log.value
        and "<b>draft" not in panel.log.value
    )


def test_a_notebook_shows_it_by_its_last_line(place):
    assert door.show("cpu-tiny", place).view.children


# ------------------------------------------------------------------ what is seen of a run at work


def test_the_interval_narrows_and_ends_as_the_verdict_has_it():
    records = [r for r in sound() if not isinstance(r, Block) or r.role != "parity"]
    table = narrowing.narrowing(profile(), records)
    assert narrowing.question(records) == ("draft_tp", "own-1", "shared")
    widths = (table["high"] - table["low"]).tolist()
    assert (
        table["start"].tolist() == [1, 2, 3, 4]
        and widths[2] > widths[3]
        and all(w != w for w in widths[:2])
        and set(table["of"]) == {"cycle time"}
    )
    from workbench.judge import verdict

    found = next(
        c
        for c in verdict.judge(profile(), sound()).comparisons
        if (c.a, c.b, c.metric) == ("own-1", "shared", "cycle_ms")
    )
    assert table.iloc[-1]["low"] == pytest.approx(found.interval.low) and table.iloc[-1][
        "ratio"
    ] == pytest.approx(found.interval.ratio)
    assert chart_parts.svg(sweep_charts.narrowing(table)).count("<path") > 6


def test_whoever_watches_a_run_at_work_sees_whole_starts_at_a_level_that_pays_for_it():
    records = [r for r in sound() if not isinstance(r, Block) or r.role != "parity"]
    last = max(r.start for r in records if isinstance(r, Block) and r.arm == "own-1")
    while not (isinstance(records[-1], Block) and records[-1].start == last):
        records.pop()
    chosen = profile(plan={"starts": 8})
    ended, live = (narrowing.narrowing(chosen, records, at_work) for at_work in (False, True))
    assert len(live) == len(ended) - 1
    same = ended.iloc[len(live) - 1]
    assert live.iloc[-1]["high"] - live.iloc[-1]["low"] > 2 * (same["high"] - same["low"])


def test_what_was_shown_is_kept_for_the_process_that_measures(place, monkeypatch):
    whole = narrowing.narrowing
    monkeypatch.setattr(narrowing, "narrowing", lambda chosen, log, _: whole(chosen, log))
    panel = Quick("cpu-tiny", place)
    folder = place.parent / "cpu-tiny-2"
    measured(folder)
    ticket.write(folder, ticket.of_process(os.getpid()))
    panel.folder = folder
    panel.refresh()
    assert "<svg" in panel.chart.value and ticket.seen(folder).starts >= 2
    assert "Valid" not in panel.result.value


def test_before_the_first_pair_there_is_nothing_to_see(tmp_path):
    assert (
        narrowing.narrowing(profile(), []).empty
        and narrowing.question([]) is None
        and ticket.progress(tmp_path) is None
    )
    assert "no server start yet" in chart_parts.svg(
        sweep_charts.narrowing(narrowing.narrowing(profile(), []))
    )


def test_progress_is_a_record_that_the_panel_words(place):
    panel = Quick("cpu-tiny", place)
    folder = panel.begin()
    at = ticket.Progress("draft_tp", 2, 9, "shared+steps=2", 120.0)
    ticket.tell_progress(folder, at)
    assert ticket.progress(folder) == at
    panel.refresh()
    assert "block 2 of 9 on shared+steps=2, about 2 min left" in panel.state.value and (
        panel.bar.value,
        panel.bar.max,
    ) == (1, 9)
    with ticket.Claim(folder.parent / "next"):
        assert ticket.progress(folder.parent / "next") is None


def test_a_log_under_work_with_a_torn_line_is_read(tmp_path):
    lab = measured(tmp_path)
    with open(tmp_path / "runs.jsonl", "ab") as file:
        file.write(b'{"kind": "blo')
    assert len(narrowing.narrowing(lab.profile, lab.records)) == 3
    with RunLog(tmp_path / "runs.jsonl"):
        pass
