"""The report in a real browser without a network: charts are seen, on a page, on a phone, in print
and with JavaScript off.
"""

import base64
import io

import pytest
from PIL import Image

from tests.browser.chromium import Chromium
from tests.simulated import PROFILE, PROVENANCE, VERDICT, block, records
from workbench.experiment import runlog
from workbench.judge.verdict_file import VerdictFile
from workbench.report import chart_parts, report

FIGURES = 8
HOSTILE = (
    """<img src=x onerror="document.title='broken'"><script>document.title='broken'</script>"""
)
# Charts with a size on the screen, and the marks inside those.
SEEN = (
    "[...document.querySelectorAll('figure svg')].filter(svg => svg.getBoundingClientRect().height"
    " > 50)"
)
MARKS = (
    SEEN + ".map(svg => svg.querySelectorAll('.role-mark path, .role-mark line, .role-mark"
    " text').length)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report.render(VerdictFile.read(VERDICT), records(), PROVENANCE, PROFILE))
    return path


@pytest.fixture(scope="module")
def browser():
    with Chromium() as chromium:
        yield chromium


def picture(browser):
    return Image.open(
        io.BytesIO(base64.b64decode(browser.call("Page.captureScreenshot")["data"]))
    ).convert("RGB")


def colour_count(image, colour):
    wanted = tuple(int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return sum(
        count for count, seen in image.getcolors(image.width * image.height) if seen == wanted
    )


@pytest.mark.parametrize(
    "width, height, scripts",
    [(1280, 900, True), (1280, 900, False), (390, 844, True), (390, 844, False)],
)
def test_every_chart_is_seen_with_its_marks(browser, page, width, height, scripts):
    browser.open(page, width, height, scripts)
    marks = browser.evaluate(MARKS)
    assert len(marks) == FIGURES and min(marks) >= 3
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width, height", [(1280, 900), (390, 844)])
def test_charts_are_drawn_large_enough_to_read(browser, page, width, height):
    browser.open(page, width, height)
    assert (
        min(
            browser.evaluate(
                SEEN + ".map(svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)"
            )
        )
        > 0.9
    )


def test_a_charts_colours_reach_the_screen(browser, page):
    browser.open(page, 1280, 900)
    browser.evaluate(
        "[...document.querySelectorAll('h3')].find(h => h.textContent.startsWith('Accepted"
        " drafts')).scrollIntoView()"
    )
    image, colours = picture(browser), chart_parts.palette(list(VERDICT["arms"]))
    assert all(colour_count(image, colours[arm]) > 2_000 for arm in ("shared", "own-1"))


def test_the_first_screen_holds_question_verdict_validity_and_arms(browser, page):
    browser.open(page, 1280, 900)
    for selector in ("h1", ".sentence", ".validity", ".arms table"):
        assert (
            0
            < browser.evaluate(
                f"document.querySelector('{selector}').getBoundingClientRect().bottom"
            )
            <= 900
        ), selector


def test_nothing_is_asked_of_a_network_and_nothing_is_complained_of(browser, page):
    browser.open(page, 1280, 900)
    asked = {
        e["params"]["request"]["url"].partition(":")[0]
        for e in browser.events
        if e["method"] == "Network.requestWillBeSent"
    }
    assert asked <= {"file", "data"}
    assert [
        e
        for e in browser.events
        if e["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    ] == []


def test_the_browser_of_these_tests_has_no_network_and_would_tell(browser, tmp_path):
    leaky = tmp_path / "leaky.html"
    leaky.write_text("<script src='http://charts.example/vega.js'></script>")
    browser.open(leaky, 1280, 900)
    assert "http" in {
        e["params"]["request"]["url"].partition(":")[0]
        for e in browser.events
        if e["method"] == "Network.requestWillBeSent"
    }
    assert any(
        "ERR_NAME_NOT_RESOLVED" in str(e) for e in browser.events if e["method"] == "Log.entryAdded"
    )


def test_in_print_charts_are_whole_and_no_table_is_cut(browser, page):
    browser.open(page, 673, 950)  # A4 less its margins, in CSS pixels
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert len(browser.evaluate(MARKS)) == FIGURES
        assert (
            browser.evaluate(
                "[...document.querySelectorAll('table')].filter(t => t.scrollWidth > 674).length"
            )
            == 0
        )
        assert base64.b64decode(
            browser.call("Page.printToPDF", preferCSSPageSize=True)["data"]
        ).startswith(b"%PDF")
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


def test_raw_data_is_downloaded_from_the_page_alone(browser, tmp_path):
    log = [block(n, "own-1", n, 0) for n in range(1_300)]
    path = tmp_path / "large.html"
    path.write_text(report.render(VerdictFile(profile="simulated"), log, PROVENANCE, PROFILE))
    assert path.stat().st_size > 2_500_000  # beyond what browsers once allowed a link to hold
    browser.call(
        "Browser.setDownloadBehavior",
        behavior="allow",
        downloadPath=str(tmp_path),
        eventsEnabled=True,
    )
    browser.open(path, 1280, 900)
    browser.evaluate("document.querySelector('a[download=\"runs.jsonl\"]').click()")
    browser.wait_for("Browser.downloadProgress", state="completed")
    assert runlog.read(tmp_path / "runs.jsonl") == log


def test_hostile_names_stay_text(browser, tmp_path):
    arms = {HOSTILE: VERDICT["arms"]["own-1"]}
    verdict = VerdictFile.read(VERDICT | {"sentence": HOSTILE, "arms": arms})
    path = tmp_path / "hostile.html"
    path.write_text(
        report.render(verdict, [block(1, HOSTILE, 0, 0)], {"command": HOSTILE}, PROFILE)
    )
    browser.open(path, 1280, 900)
    assert browser.evaluate("document.title").startswith("simulated")
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
    assert browser.evaluate("document.querySelector('.sentence').textContent") == HOSTILE


def test_no_widget_placeholder_is_left(browser, page):
    browser.open(page, 1280, 900)
    assert "jupyter-widget" not in browser.evaluate("document.documentElement.outerHTML")
