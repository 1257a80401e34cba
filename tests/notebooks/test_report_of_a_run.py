"""The report of a real replay in a browser without a network: its charts are seen, nothing is
complained of; pictures of it are kept.
"""

import pytest

from tests.browser.chromium import Chromium
from workbench import publish
from workbench.experiment.profile_sections import ROOT
from workbench.run import lab
from workbench.run.recording import FOLDER

pytestmark = pytest.mark.engine
PICTURES = ROOT / "outputs" / "pictures"
SECTION = (
    "[...document.querySelectorAll('section')].find(s => s.querySelector('h2') &&"
    " s.querySelector('h2').textContent === '{}')"
)
SEEN = (
    "[...document.querySelectorAll('figure svg')].filter(svg => svg.getBoundingClientRect().height"
    " > 50)"
)


@pytest.fixture(scope="module")
def browser():
    with Chromium() as chromium:
        yield chromium


@pytest.mark.parametrize("width", [1000, 390])
def test_every_chart_of_the_run_is_seen_and_nothing_is_asked_of_a_network(browser, replayed, width):
    browser.open(replayed.folder / "report.html", width, 900)
    titles = browser.evaluate("[...document.querySelectorAll('figure h3')].map(h => h.textContent)")
    assert {
        "Search over draft steps",
        "The best settings by requests at once",
        "Accepted drafts by position",
    } <= set(titles)
    assert any(title.startswith("Settings of the communication layer") for title in titles)
    marks = browser.evaluate(
        SEEN + ".map(svg => svg.querySelectorAll('.role-mark path, .role-mark line, .role-mark"
        " text').length)"
    )
    assert len(marks) == len(titles) and min(marks) >= 2
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert "jupyter-widget" not in browser.evaluate("document.documentElement.outerHTML")
    assert [
        e
        for e in browser.events
        if e["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    ] == []
    assert {
        e["params"]["request"]["url"].partition(":")[0]
        for e in browser.events
        if e["method"] == "Network.requestWillBeSent"
    } <= {"file", "data"}


def test_pictures_are_kept(browser, rendered):
    """Of a recording, so that they are the same wherever the tests run."""
    browser.open(rendered.folder / "report.html", 1000, 900)
    browser.picture(PICTURES / "report.png")
    browser.picture(
        PICTURES / "sweeps.png", SECTION.format("Sweeps of settings"), margin=12, most=800
    )
    browser.open(rendered.folder / "report.html", 390, 844)
    browser.picture(PICTURES / "report-phone.png")
    assert all(
        (PICTURES / f"{name}.png").stat().st_size > 10_000
        for name in ("report", "sweeps", "report-phone")
    )


def test_two_runs_side_by_side(browser, tmp_path):
    page = tmp_path / "page.html"
    publish.beside(
        *(lab.reopen(FOLDER / f"h200-x2-{name}") for name in ("head-32000", "hostpath-head-32000")),
        page,
    )
    browser.open(page, 1000, 900)
    assert browser.evaluate(SEEN + ".length") == 2 and browser.evaluate(
        f"!!({SECTION.format('What differs in where they come from')})"
    )
    assert [
        e for e in browser.events if e["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")
    ] == []
    browser.picture(PICTURES / "two-runs.png")
