"""The report: one file that loads nothing, says what a reader must know first, escapes everything
and holds its raw data.
"""

import base64
import copy
import json
import re
from html.parser import HTMLParser

import pytest
from simulated_runs import DEFECTS, FIXTURES
from simulated_runs import profile as sound_profile

from tests.simulated import ABOUT, PROFILE, PROVENANCE, VERDICT, block, failure, records, refused
from workbench.experiment import profile, profile_sections, runlog
from workbench.experiment.runlog import Finding
from workbench.judge.verdict import judge
from workbench.judge.verdict_file import VerdictFile
from workbench.report import figures, report, tables

read = VerdictFile.read
HOSTILE = """<script>alert(1)</script><img src=x onerror="alert(2)">"""
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, and the text outside style."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self._open = [], "", []
        self.feed(text)
        assert self._open == [], "an element was left open"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def undrawn(verdict):
    """The verdict without what charts are drawn from, for tests that look at words only."""
    drawn = ("collectives_per_round", "stage_ms", "accept")
    arms = {
        name: {key: value for key, value in facts.items() if key not in drawn}
        for name, facts in verdict["arms"].items()
    }
    return verdict | {"arms": arms, "comparisons": []}


def render(verdict=undrawn(VERDICT), log=(), provenance=PROVENANCE, setting=PROFILE):
    return report.render(read(verdict), log, provenance, setting)


def files(page):
    return {
        a["download"]: base64.b64decode(a["href"].partition("base64,")[2])
        for a in page.all("a")
        if "download" in a
    }


@pytest.fixture(scope="module")
def log():
    return [*records(), failure()]


@pytest.fixture(scope="module")
def html(log):
    return render(VERDICT, log)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_nothing_is_loaded_and_nothing_runs(html, page):
    assert {"script", "iframe", "object", "embed", "img", "image", "base", "form"}.isdisjoint(
        name for name, _ in page.elements
    )
    for name, attributes in page.elements:
        assert not any(key.startswith("on") for key in attributes), name
        for key in {"src", "href", "xlink:href", "srcset", "action", "data"} & set(attributes):
            assert attributes[key].startswith("data:"), (name, key)
    assert not re.search(r"@import|@font-face|url\(", html)
    policy = next(
        m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'") and "http" not in policy


def test_the_first_things_said_are_question_verdict_validity_and_arms(html):
    order = (
        report.QUESTION + "</h1>",
        VERDICT["sentence"],
        "<strong>Valid.</strong>",
        'aria-label="Arms"',
        ">Comparisons</h2>",
        "<svg",
        ">Refusals and failures</h2>",
        ">Repeat it</h2>",
        ">Raw data</h2>",
        ">Provenance</h2>",
    )
    places = [html.index(text) for text in order]
    assert places == sorted(places)


def test_every_chart_is_there_for_a_page_and_for_a_phone(html, page):
    titles = [
        "Ratio of throughput, within server starts",
        "Ratio of throughput, across server starts",
        "Ratio of cycle time, within server starts",
        "Throughput by pair of blocks: draft_tp",
        "Throughput by server start: baseline",
        "Accepted drafts by position",
        "Collectives a cycle",
        "Where a cycle’s time goes",
    ]
    assert [t for t in titles if t not in page.text] == []
    assert len(page.all("figure")) == 8 and len(page.all("svg")) == 16
    assert html.count('<div class="wide"><svg') == html.count('<div class="narrow"><svg') == 8


def test_no_two_elements_share_an_id(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "engine, source, about, said, unsaid",
    [
        (
            "cpu",
            "live",
            "",
            ["CPU engine: proves function, never speed", "live run"],
            ["simulated", "stand-in", "recorded"],
        ),
        ("cuda", "recorded", "", ["GPU", "recorded: simulated"], ["proves function", "live run"]),
        (
            "cuda",
            "live",
            "Host path: a Stand-in for PCIe.",
            ["stand-in", "Host path: a Stand-in for PCIe."],
            ["simulated,"],
        ),
        ("cpu", "live", ABOUT, ["simulated", ABOUT], ["stand-in"]),
    ],
)
def test_labels_say_what_the_numbers_are(engine, source, about, said, unsaid):
    name = "recorded:simulated" if source == "recorded" else "p"
    verdict = undrawn(VERDICT) | {
        "engine": engine,
        "source": source,
        "sentence": "A sentence.",
        "profile": name,
    }
    text = Page(render(verdict, setting=PROFILE | {"about": about, "name": "p"})).text
    assert [w for w in said if w not in text] == [] and [
        w for w in unsaid if w in report.labels(read(verdict), {}, {"about": about})
    ] == []


def test_what_a_verdict_does_not_say_is_not_guessed():
    assert report.labels(read({}), {}, {}) == ["engine unknown", "live or recorded unknown"]


def test_a_recordings_own_name_is_its_label():
    assert "recorded: two cards" in report.labels(
        read({"source": "recorded", "profile": "x"}), {"recording": "two cards"}, {}
    )


def test_refusals_stand_beside_the_verdict_with_their_reasons():
    html = render(refused())
    top = html[: html.index('aria-label="Arms"')]
    assert "<strong>Not valid.</strong>" in top and "<strong>Valid.</strong>" not in html
    for sentence in (
        "3 measured requests were answered",
        "own-1 was not attested on rank 1",
        "The control differs from itself.",
    ):
        assert sentence in top
    assert html.count(">refused</td>") == 3
    assert (
        "1.057" not in html and "1.200" not in html
    )  # neither a refused comparison nor a refused control shows a number


@pytest.mark.parametrize("name", DEFECTS)
def test_every_kind_of_refusal_is_said_at_the_top_in_its_own_words(name, monkeypatch):
    # The words are looked at here, and charts take their time.
    monkeypatch.setattr(report, "figures", lambda *_: [])
    log, setting = runlog.read(FIXTURES / f"{name}.jsonl"), sound_profile()
    verdict = judge(setting, log).file
    top = Page(report.render(verdict, log, {}, setting.model_dump())).text.partition("Comparisons")[
        0
    ]
    assert "Not valid." in top and verdict.sentence in top
    assert [r.sentence for r in verdict.reasons[:5] if r.sentence not in top] == []


def test_a_sound_run_is_valid_with_each_ratio_as_it_was_judged():
    log, setting = runlog.read(FIXTURES / "sound.jsonl"), sound_profile()
    verdict = judge(setting, log).file
    html = report.render(verdict, log, {}, setting.model_dump())
    assert "<strong>Valid.</strong>" in html
    for c in [*verdict.comparisons, *verdict.controls]:
        ratio, low, high = (f"{end:.3f}" for end in (c.ratio, c.low, c.high))
        assert f"{low} to {high}" in html and f"{ratio} [{low}, {high}]" in html
        if c.beside:
            assert f"{c.beside.low:.3f} to {c.beside.high:.3f}" in html


def test_only_five_reasons_stand_at_the_top_and_the_rest_are_a_link_away():
    reasons = [{"key": "k", "sentence": f"Reason number {n}."} for n in range(8)]
    html = render(undrawn(VERDICT) | {"valid": False, "reasons": reasons})
    top, _, rest = html.partition('aria-label="Arms"')
    assert top.count("Reason number") == 5 and "3 more" in top and rest.count("Reason number") == 8


def test_a_wished_resolution_says_what_it_costs():
    log, setting = runlog.read(FIXTURES / "sound.jsonl"), sound_profile()
    verdict = judge(setting, log, wished=0.002).file
    wish = {"plan": {"resolution": 0.002}}
    comparison = next(
        c
        for c in verdict.comparisons
        if (c.a, c.b, c.metric) == ("own-1", "shared", "tokens_per_s")
    )
    said = report.costs(tables.comparisons(verdict), wish)
    assert (
        f"own-1 ÷ shared, throughput: a resolution of 0.2 % takes {comparison.wanted} starts"
        f" in all, {comparison.wanted_seconds:.0f} s more than this run." in said
    )
    assert any("starts a side in all" in sentence for sentence in said)
    assert said[0] in Page(report.render(verdict, (), {}, PROFILE | wish)).text
    assert report.costs(tables.comparisons(read(VERDICT)), PROFILE) == []


def test_notes_and_simulated_acceptance_are_said_at_the_top():
    verdict = undrawn(VERDICT) | {"notes": ["own-1 failed once."]}
    verdict["arms"]["own-1"]["accept_simulated"] = True
    top = render(verdict).partition('aria-label="Arms"')[0]
    assert "own-1 failed once." in top and "accept length simulated" in top


def test_unknown_is_written_unknown():
    verdict = undrawn(VERDICT) | {
        "arms": {"own-1": {"tokens_per_s": None}},
        "parity": {},
    }
    row = re.search(r"own-1</th>(.*?)</tr>", render(verdict), re.S)[1]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
    assert cells == [
        "1",
        "unknown",
        "unknown",
        "unknown",
        "unknown",
        "unknown",
        "chain of 3 steps",
        "not checked",
        "unknown",
    ]


def test_tables_carry_units(page):
    for unit in ("tokens/s", "ms", "tokens/cycle", "per cycle", "%", "ranks"):
        assert unit in page.text
    assert len([a for name, a in page.elements if a.get("class") == "unit"]) >= 8


def test_the_setting_stands_beside_the_speed(page):
    for fact in (
        "fixtures/tiny/target",
        "fixtures/tiny/draft",
        "2 ranks",
        "chain of 3 steps",
        "at most 64",
        "heldout",
        "54 in 7 server starts",
    ):
        assert fact in page.text


def test_everything_from_outside_is_text():
    verdict = copy.deepcopy(VERDICT) | {
        "profile": HOSTILE,
        "sentence": HOSTILE,
        "reasons": [{"key": HOSTILE, "sentence": HOSTILE}],
        "source": "recorded",
        "parity": {HOSTILE: HOSTILE},
    }
    verdict["arms"][HOSTILE] = {
        "stage_ms": {HOSTILE: 1},
        "collectives_per_round": {HOSTILE: 1},
        "collectives_by_kind": {HOSTILE: {HOSTILE: 1}},
    }
    verdict["comparisons"].append(
        verdict["comparisons"][0]
        | {
            "a": HOSTILE,
            "metric": HOSTILE,
            "method": HOSTILE,
            "experiment": HOSTILE,
        }
    )
    bad = block(1, "own-1", 0, 0, experiment=HOSTILE)
    bad = bad.model_copy(
        update={
            "arm": HOSTILE,
            "prompts_from": HOSTILE,
            "requests": (bad.requests[0].model_copy(update={"prompt": HOSTILE, "error": HOSTILE}),),
        }
    )
    hung = failure(HOSTILE).model_copy(update={"log_tail": (HOSTILE,)})
    found = Finding(experiment=HOSTILE, name=HOSTILE, time="t", value={HOSTILE: HOSTILE})
    setting = PROFILE | {
        "about": HOSTILE,
        "name": HOSTILE,
        "pair": {"target": HOSTILE, "draft": HOSTILE},
    }
    html = render(verdict, [bad, hung, found], {HOSTILE: HOSTILE, "command": HOSTILE}, setting)
    page = Page(html)
    assert "<script" not in html.lower() and "<img" not in html.lower()
    assert not page.all("script") and not page.all("img")
    assert page.text.count(HOSTILE) > 15


def test_the_raw_data_in_the_page_is_the_runs_own(log, page, tmp_path):
    held = files(page)
    (tmp_path / "runs.jsonl").write_bytes(held["runs.jsonl"])
    assert runlog.read(tmp_path / "runs.jsonl") == log
    assert (
        read(json.loads(held["verdict.json"])) == read(VERDICT)
        and json.loads(held["provenance.json"]) == PROVENANCE
    )


def test_the_profile_in_the_page_replays_the_same_setting(tmp_path):
    setting = profile.Profile(**PROFILE)
    (tmp_path / "simulated.yaml").write_bytes(
        files(Page(render(setting=setting.model_dump())))["profile.yaml"]
    )
    text = (tmp_path / "simulated.yaml").read_text()
    assert "target: fixtures/tiny/target" in text and str(profile_sections.ROOT) not in text
    assert profile.load(tmp_path / "simulated.yaml") == setting


def test_commands_are_exact(log):
    own = {"command": ["workbench", "replay", "cpu tiny", "-p", "pairs=12"]}
    (_, made), (_, again), (served, server) = report.commands(log, own)
    assert (made, again) == (
        "workbench replay 'cpu tiny' -p pairs=12",
        "workbench replay profile.yaml",
    )
    assert (
        server
        == "SGLANG_PLUGINS=draft_tp python -m sglang.launch_server --tp 2 --served-model-name 'tiny"
        " pair'"
    )
    assert served == "Server of shared, own-1 (draft_tp); none (baseline); shared (baseline)"
    assert (
        report.commands([], {"recording": "two-cards"})[0][1]
        == "workbench replay recorded:two-cards"
    )


def test_commands_are_in_the_page(log, page):
    assert all(command in page.text for _, command in report.commands(log, PROVENANCE))


def test_a_log_too_large_for_a_page_loses_its_tokens_and_says_so(log, monkeypatch):
    log = [r for r in log if r.kind != "finding"][:6]
    monkeypatch.setattr(
        report, "DATA_LIMIT", int(len(files(Page(render(log=log)))["runs.jsonl"]) * 0.95)
    )
    html = render(log=log)
    lines = [json.loads(line) for line in files(Page(html))["runs.jsonl"].splitlines()]
    requests = [r for line in lines if line["kind"] == "block" for r in line["requests"]]
    assert "output_ids) are left out" in html
    assert len(lines) == len(log) and len(requests) == 4 * sum(r.kind == "block" for r in log)
    assert not any(r["output_ids"] for r in requests) and all(
        r["completion_tokens"] == 64 for r in requests
    )


def test_a_log_too_large_even_so_stays_in_its_folder_and_the_page_says_so(log, monkeypatch):
    monkeypatch.setattr(report, "DATA_LIMIT", 100)
    held, left_out = report.downloads(read(VERDICT), log, {}, {})
    assert [f.name for f in held] == ["verdict.json", "provenance.json", "profile.yaml"]
    assert "take runs.jsonl from the run’s folder" in left_out


def test_a_run_that_measured_nothing_still_has_a_report():
    page = Page(report.render(read({}), [], {}, {}))
    for said in (
        "No verdict was stated.",
        "Not valid.",
        "No comparison was made.",
        "Nothing was measured that could be drawn.",
    ):
        assert said in page.text


def test_keys_that_the_schema_does_not_know_do_no_harm():
    verdict = undrawn(copy.deepcopy(VERDICT)) | {
        "later": 1,
        "comparisons": copy.deepcopy(VERDICT["comparisons"]),
    }
    verdict["arms"]["own-1"]["later"] = verdict["comparisons"][0]["later"] = verdict["control"][
        "later"
    ] = {"x": [1]}
    assert VERDICT["sentence"] in Page(render(verdict)).text


def test_a_control_outside_its_noise_is_drawn_as_the_evidence_it_is():
    log, setting = runlog.read(FIXTURES / "control.jsonl"), sound_profile()
    verdict = judge(setting, log).file
    drawn = list(figures.figures(verdict.model_copy(update={"arms": {}}), []))
    control = verdict.control
    (first,) = [f for f in drawn if f.title == "Ratio of cycle time, within server starts"]
    assert (
        "refused" in first.wide
        and f"{control.ratio:.3f} [{control.low:.3f}, {control.high:.3f}]" in first.wide
    )


def test_blocks_of_one_experiment_are_charted_by_the_unit_they_are_compared_by(log):
    def titles(arms_by_start):
        blocks = [
            block(n, arm, n // 2, start)
            for start, arms in arms_by_start.items()
            for n, arm in enumerate(arms)
        ]
        return [
            f.title.partition(":")[0]
            for f in figures.figures(read({}), blocks)
            if f.title.startswith("Throughput")
        ]

    assert titles({0: ["shared", "own-1"]}) == ["Throughput by pair of blocks"]
    assert titles({0: ["shared"], 1: ["own-1"]}) == ["Throughput by server start"]
    assert titles({0: ["shared", "own-1"], 1: ["none"]}) == [
        "Throughput by pair of blocks",
        "Throughput by server start",
    ]
