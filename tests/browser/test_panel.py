"""JupyterLab in a real browser: the panel runs the CPU engine to a verdict, survives its tab, and
is stopped half way; pictures are kept.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.browser.chromium import Chromium
from workbench.experiment import profile, runlog
from workbench.experiment.profile_sections import ROOT
from workbench.experiment.runlog import Block, Start
from workbench.run import ticket as tickets
from workbench.serving import supervisor

pytestmark = pytest.mark.engine
NOTEBOOK, TOKEN = "05_steps.ipynb", "a-token-of-this-test"
PANEL = "document.querySelector('.dtw')"
PICTURES = ROOT / "outputs" / "pictures"  # what a person may look at after the tests
BUTTON = (
    "[...document.querySelectorAll('.dtw button')].find(b => b.textContent.trim() === '{}' &&"
    " !b.disabled)"
)
BOX = (
    "[...document.querySelectorAll('.dtw label, .dtw .widget-label-basic')].find(l =>"
    " l.textContent.trim() === '{}')"
)
FIELD = (
    "[...document.querySelectorAll('.dtw .widget-label')].find(l => l.textContent.trim() ==="
    " '{}').parentElement.querySelector('input')"
)
CELLS = "[...document.querySelectorAll('.jp-Notebook .jp-Cell')]"
VERDICT = "(document.querySelector('.dtw .said') || {innerText: ''}).innerText"
DOTS = (  # server starts in the chart
    "document.querySelectorAll('.dtw svg .mark-symbol path').length"
)
WINDOW = 1400, 1700
SAID = "(document.querySelector('.dtw') || document.body).innerText"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A copy of the notebook with a plan of one server start and few blocks."""
    folder = tmp_path_factory.mktemp("lab")
    tiny = profile.load("cpu-tiny").model_dump(mode="json")
    tiny["name"] = "panel-tiny"
    tiny["plan"] |= {"arms": ["none", "shared", "own-1"], "starts": 1}
    tiny["sweep"] |= {"step_counts": [3], "loads": [1]}
    tiny["workload"] |= {"requests_per_block": 1, "max_new_tokens": 8}
    (folder / "panel-tiny.yaml").write_text(yaml.safe_dump(tiny))
    (folder / "notebooks").mkdir()
    notebook = json.loads((ROOT / "notebooks" / NOTEBOOK).read_text())
    parameters = next(c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", ()))
    parameters["source"] = [
        line.replace('"cpu-tiny"', f'"{folder / "panel-tiny.yaml"}"')
        for line in parameters["source"]
    ]
    (folder / "notebooks" / NOTEBOOK).write_text(json.dumps(notebook))
    return folder


@pytest.fixture(scope="module")
def address(place, imported_once):
    """JupyterLab as ``make lab`` starts it, on a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (
        f"--no-browser --allow-root --ip=127.0.0.1 --port={port} --IdentityProvider.token={TOKEN} "
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"
    )
    asked = (
        place / "settings" / "@jupyterlab" / "apputils-extension"
    )  # no question about news over the pictures
    asked.mkdir(parents=True)
    (asked / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    with open(place / "lab.log", "wb") as said:
        lab = subprocess.Popen(
            ["make", "-s", "lab", f"NOTEBOOKS={place / 'notebooks'}", f"ARGS={arguments}"],
            cwd=ROOT,
            start_new_session=True,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "JUPYTER_RUNTIME_DIR": str(place / "runtime"),
                "JUPYTERLAB_SETTINGS_DIR": str(place / "settings"),
                "JUPYTERLAB_WORKSPACES_DIR": str(place / "workspaces"),
            },
        )
    try:
        end = time.monotonic() + 120
        while not _listens(port):
            assert lab.poll() is None and time.monotonic() < end, (place / "lab.log").read_text()[
                -2000:
            ]
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}/lab/tree/{NOTEBOOK}?token={TOKEN}"
    finally:
        if lab.poll() is None:
            os.killpg(lab.pid, signal.SIGTERM)
            lab.wait(30)
        for run in (place / "outputs").glob("*/process.json"):
            if (ticket := tickets.read(run.parent)) and ticket.alive:
                os.kill(ticket.pid, signal.SIGTERM)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def browser():
    with Chromium(local=True) as chromium:
        yield chromium


def show_panel(browser, address) -> None:
    """Open the notebook and run its cells, by the keyboard, up to the panel's."""
    browser.open(address, *WINDOW)
    browser.until("document.querySelectorAll('.jp-Notebook .jp-Cell').length > 4", 90)
    browser.until("document.body.innerText.includes('| Idle')", 90)
    browser.click("document.querySelector('.jp-Notebook .jp-CodeCell .cm-content')")
    cells = browser.evaluate(f"{CELLS}.map(c => c.innerText)")
    first = next(n for n, text in enumerate(cells) if "profile =" in text)
    last = next(n for n, text in enumerate(cells) if "panel.show(" in text)
    for n in range(first, last + 1):
        browser.press("Enter", "Shift")
        browser.until(
            f"(p => !p || p.textContent !== '[ ]:')({CELLS}[{n}].querySelector('.jp-InputPrompt'))"
        )
    browser.until("!!document.querySelector('.dtw button')", 120)


def blocks(folder: Path) -> list[Block]:
    return [r for r in runlog.read(folder / "runs.jsonl") if isinstance(r, Block)]


def runs(place: Path) -> list[Path]:
    return sorted(path.parent for path in (place / "outputs").glob("*/process.json"))


def nothing_is_left(folder: Path) -> None:
    servers = {r.server for r in runlog.read(folder / "runs.jsonl") if isinstance(r, Start)}
    end = time.monotonic() + 30
    while (
        left := [p for server in servers for p in supervisor.processes(server)]
    ) and time.monotonic() < end:
        time.sleep(0.5)
    assert servers and not left


def test_a_run_is_started_found_again_and_watched_to_its_verdict_though_its_tab_was_closed(
    browser, address, place
):
    show_panel(browser, address)
    browser.click(BOX.format("none"))  # two arms are enough
    browser.write(FIELD.format("pairs"), "6")
    browser.click(BUTTON.format("Check"))
    browser.until(f"{SAID}.includes('Preflight: nothing refused')")
    browser.picture(PICTURES / "panel-check.png", PANEL)
    browser.click(BUTTON.format("Start"), times=2)  # twice, as an impatient hand does
    browser.until(f"{SAID}.includes('Running')")
    (folder,) = runs(place)
    browser.open("about:blank", *WINDOW)  # the tab is closed while the server starts
    assert tickets.read(folder).alive
    show_panel(browser, address)  # and opened again: the run is found
    browser.until(f"{SAID}.includes('{folder.name}')")
    assert len(runs(place)) == 1 and not (
        tickets.read(folder).alive and browser.evaluate(f"!!({BUTTON.format('Start')})")
    )
    browser.until(f"{SAID}.includes('Ended {folder.name}')", 240)
    verdict = json.loads((folder / "verdict.json").read_text())
    word, ended = (
        ("Valid.", "finished, valid")
        if verdict["valid"]
        else ("Not valid.", "finished without a valid result")
    )
    browser.until(f"{VERDICT}.includes({json.dumps(word + ' ' + verdict['sentence'][:60])})", 30)
    browser.picture(PICTURES / "panel-verdict.png", PANEL)
    assert (
        browser.evaluate(SAID).count(f"Ended {folder.name}: {ended}")
        and browser.evaluate(f"{FIELD.format('pairs')}.value") == "6"
    )
    assert {c["pairs"] for c in verdict["comparisons"]} == {6} and all(
        arm["attested"] for arm in verdict["arms"].values()
    )
    assert {b.arm for b in blocks(folder)} == {"shared", "own-1", "shared#2"} and (
        folder / "report.html"
    ).exists()
    assert len({b.start for b in blocks(folder)}) == 1  # two clicks, one server
    nothing_is_left(folder)


def test_a_run_that_is_stopped_half_way_keeps_and_judges_what_it_measured(browser, address, place):
    before = set(runs(place))
    browser.write(FIELD.format("starts"), "6")
    browser.write(FIELD.format("pairs"), "12")
    browser.click(BUTTON.format("Start"))
    browser.until(f"{SAID}.includes('Running')")
    (folder,) = set(runs(place)) - before
    browser.until(f"!document.querySelector('.dtw svg') && !{VERDICT}")  # nothing of the run before
    browser.until(f"{DOTS} >= 3", 120)  # of 6 starts; the interval begins with the third
    browser.picture(PICTURES / "panel-running.png", PANEL)
    browser.click(BUTTON.format("Stop now"))
    browser.until(f"{SAID}.includes('Ended {folder.name}: stopped')", 60)
    kept, verdict = blocks(folder), json.loads((folder / "verdict.json").read_text())
    browser.until(f"{VERDICT}.includes({json.dumps(verdict['sentence'][:60])})", 30)
    browser.picture(PICTURES / "panel-stopped.png", PANEL)
    assert 3 <= len({b.start for b in kept}) < 6
    assert any("stopped by hand" in note for note in verdict["notes"])
    assert (
        all(c["starts"] >= 3 and c["low"] < c["ratio"] < c["high"] for c in verdict["comparisons"])
        and verdict["comparisons"]
    )
    assert (folder / "report.html").exists()
    nothing_is_left(folder)


def test_nothing_broke_in_the_browser(browser):
    errors = [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]
    assert errors == []
