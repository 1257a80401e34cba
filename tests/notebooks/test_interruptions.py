"""A replay that is killed in one notebook after another ends with the verdict of one that was not;
one broken notebook does not hold up the others.
"""

import json
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from replaying import replay
from simulated_replay import measured

from workbench.experiment.profile_sections import ROOT
from workbench.experiment.runlog import Finding, RunLog
from workbench.replay import NOTEBOOKS, finished
from workbench.run import ticket as tickets


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A replay on a log that holds every block, by simulation: notebooks run, no server starts.
    Most that measure nothing then are left out.
    """
    folder = tmp_path_factory.mktemp("whole") / "run"
    measured(folder)
    return replay(
        folder,
        "--resume",
        *[
            word
            for name in (
                "01_probe",
                "02_budget",
                "03_baseline",
                "05_steps",
                "06_collectives",
                "07_cycle",
            )
            for word in ("--skip", name)
        ],
    )


@pytest.mark.parametrize(
    "chosen, killed",
    [
        # Two are at work at once, and the first takes a third of the last one's time.
        pytest.param([NOTEBOOKS[0], NOTEBOOKS[-1]], NOTEBOOKS[-1:], id="in the last"),
        pytest.param(NOTEBOOKS, NOTEBOOKS, id="in every one", marks=pytest.mark.long),
    ],
)
def test_a_recording_killed_in_notebooks_in_turn_ends_with_the_verdict_of_one_that_was_not(
    chosen, killed, rendered, tmp_path
):
    folder = tmp_path / "run"
    skipped = [word for n in NOTEBOOKS if n not in chosen for word in ("--skip", n.name)]
    for notebook in killed:
        output = folder / "notebooks" / f"{notebook.name}.ipynb"
        begun = time.time()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "workbench.cli",
                "replay",
                "recorded:cpu-tiny",
                "--out",
                str(folder),
                "--resume",
                *skipped,
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _until(lambda: output.exists() and output.stat().st_mtime > begun, process)
            if len(chosen) == 2:
                _until(lambda: finished(folder / "notebooks" / f"{chosen[0].name}.ipynb"), process)
            else:
                time.sleep(1)  # the notebook's kernel starts
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not finished(output), notebook.name
    last = replay(folder, "--resume", *skipped, profile="recorded:cpu-tiny")
    assert last.status == rendered.status == 0, last.said[-2000:]
    assert (folder / "verdict.json").read_bytes() == (rendered.folder / "verdict.json").read_bytes()
    assert all(finished(folder / "notebooks" / f"{notebook.name}.ipynb") for notebook in chosen)
    assert "finished before: 0" in last.said


@pytest.mark.long
def test_killed_in_every_notebook_in_turn_it_ends_with_the_same_verdict(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    measured(folder)
    for notebook in NOTEBOOKS:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "workbench.cli",
                "replay",
                "cpu-tiny",
                "--out",
                str(folder),
                "--resume",
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _until(
                lambda: (
                    (ticket := tickets.read(folder))
                    and ticket.pid == process.pid
                    and ticket.notebook == notebook.name
                ),
                process,
            )
            time.sleep(1)  # the notebook's kernel is at work
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert (
            not finished(folder / "notebooks" / f"{notebook.name}.ipynb")
            or notebook is NOTEBOOKS[-1]
        ), notebook.name
    last = replay(folder, "--resume")
    assert last.status == uninterrupted.status == 0, last.said[-2000:]
    assert last.verdict == uninterrupted.verdict and last.verdict["valid"]
    assert all(finished(folder / "notebooks" / f"{notebook.name}.ipynb") for notebook in NOTEBOOKS)
    assert [line for line in last.said.splitlines() if "was finished before" in line] == [
        f"[{n}/8] {notebook.name} was finished before"
        for n, notebook in enumerate(NOTEBOOKS[:-1], 1)
    ]


def _until(true, process, seconds: float = 400) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert process.poll() is None and time.monotonic() < end, (
            "the replay did not reach the notebook"
        )
        time.sleep(0.1)


def test_an_interrupted_replay_judges_and_reports_what_it_has(tmp_path):
    folder = tmp_path / "run"
    measured(folder)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "workbench.cli",
            "replay",
            "cpu-tiny",
            "--out",
            str(folder),
            "--resume",
            "--skip",
            "01_probe",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _until(lambda: (ticket := tickets.read(folder)) and ticket.notebook == "02_budget", process)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 130 and "--resume goes on from there" in said, said[-2000:]
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (
        any("stopped by hand" in note for note in verdict["notes"])
        and (folder / "report.html").exists()
    )
    assert tickets.read(folder).ended == 130


def test_a_failed_notebook_is_kept_up_to_its_error_and_the_others_go_on(tmp_path):
    folder = tmp_path / "run"
    measured(folder)
    with RunLog(folder / "runs.jsonl") as log:
        # No sentence, as 04 keeps one towards its end.
        log.append(Finding(experiment="draft_tp", name="memory", time="t", value={"ok": None}))
    skipped = [
        word
        for name in ("01_probe", "02_budget", "03_baseline", "05_steps", "06_collectives")
        for word in ("--skip", name)
    ]
    done = replay(folder, "--resume", *skipped)
    assert done.status == 1 and "the finding memory of draft_tp is damaged" in done.said, done.said[
        -2000:
    ]
    cells = [
        c
        for c in nbformat.read(folder / "notebooks" / "04_draft_tp.ipynb", as_version=4).cells
        if c.cell_type == "code"
    ]
    broken = next(
        n for n, c in enumerate(cells) if any(o.output_type == "error" for o in c.outputs)
    )
    assert (
        broken > 5
        and all(c.execution_count for c in cells[:broken])
        and not any(c.outputs for c in cells[broken + 1 :])
    )
    assert all(
        finished(folder / "notebooks" / f"{name}.ipynb") for name in ("07_cycle", "08_report")
    )
    assert done.verdict["sentence"] and (folder / "report.html").exists()
