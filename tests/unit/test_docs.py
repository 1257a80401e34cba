"""README.md and docs/*.md are what their sources and the recordings give, and what they say in
words holds in the recordings.
"""

import json
import re
import shutil

import pytest

from workbench import cli, commands, docs
from workbench.answers import figures, negative_control
from workbench.experiment.profile_sections import ROOT
from workbench.run import lab, recording

PAGES = docs.pages()
TINY = ("h200-x2-tiny", "h200-x2-tiny-control", "h200-x2-tiny-paged")


def verdict(name: str) -> dict:
    return json.loads((recording.FOLDER / name / "verdict.json").read_text())


@pytest.fixture(scope="module")
def said() -> docs.Said:
    return docs.Said(recording.FOLDER, docs.FAULTS)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_its_source_and_the_recordings_give(page):
    """A page edited by hand fails: edit its source under docs/src and run make docs."""
    assert PAGES[page].read_text() == docs.render(page)


def test_a_page_that_was_edited_by_hand_is_found_and_made_again(tmp_path, monkeypatch, capsys):
    page = tmp_path / "faults.md"
    page.write_text(docs.render("faults").replace("3.3 s", "3.2 s"))
    monkeypatch.setattr(docs, "pages", lambda: {"faults": page})
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    assert cli.main(["docs", "--check"]) == 1 and "3.2 s" in page.read_text()
    assert "faults.md" in capsys.readouterr().out
    assert cli.main(["docs"]) == 0 and page.read_text() == docs.render("faults")
    assert cli.main(["docs", "--check"]) == 0


def test_another_recording_gives_another_page(tmp_path):
    copied = tmp_path / "recordings"
    shutil.copytree(recording.FOLDER, copied)
    path = copied / "h200-x2-full-head" / "verdict.json"
    told = json.loads(path.read_text())
    for c in told["comparisons"]:
        if (c["a"], c["b"], c["metric"]) == ("own-1", "shared", "cycle_ms"):
            c |= {"ratio": 0.8, "low": 0.7, "high": 0.9}
    path.write_text(json.dumps(told))
    page = docs.render("README", copied)
    assert "| cycle time | 0.800 (0.700 to 0.900) | 97.5 % | 3 / 12 | **faster**" in page
    assert page != docs.render("README")
    told["valid"] = False
    path.write_text(json.dumps(told))
    assert "| yes / no |" in docs.render("README", copied)


def test_every_recording_of_the_gpus_is_in_the_table_of_results():
    text = PAGES["results"].read_text()
    rows = set(re.findall(r"^\| `([\w-]+)`: [^|]+\| `own-1` ÷ `shared`", text, re.M))
    assert rows == {name for name in recording.names() if name.startswith("h200")}


def test_readme_is_short_and_lines_of_prose_are_too():
    lines = PAGES["README"].read_text().splitlines()
    assert len(lines) <= 150
    for page in ("README", "faults", "porting", "glossary"):
        long = [
            line
            for line in PAGES[page].read_text().splitlines()
            if len(line) > 120 and not line.startswith(("|", "!"))
        ]
        assert long == [], page


def test_sources_hold_no_figure_of_a_run():
    """Three decimals, or a number with its unit: of these only limits and settings are typed."""
    typed = {"0.02", "10.0.0.1", "0.5.23", "127.0.0.1"}
    typed |= {"3.11", "3.12", "3.13", "2.34", "1.79"}  # Pythons, glibc; an input as an example
    for source in docs.SOURCES.glob("*.j2"):
        prose = re.sub(r"\{\{.*?\}\}|\{%.*?%\}", "", source.read_text(), flags=re.S)
        assert set(re.findall(r"\d+(?:\.\d+)+", prose)) <= typed, source.name
        assert re.findall(r"\d+ (?:ms|µs)\b", prose) == [], source.name


@pytest.mark.parametrize(
    ("name", "other", "result"),
    [
        ("h200-x2-tiny", 2, "identical"),
        ("h200-x2-tiny-control", 2, "identical"),
        ("h200-x2-tiny-paged", 6, "differs"),
    ],
)
def test_on_the_gpus_own_1_answers_as_shared_does_and_both_differ_from_none_as_often_as_said(
    name, other, result, said
):
    found = figures.answers(recording.FOLDER / name)
    none, shared = found.pop("none"), found.pop("shared")
    assert len(shared) == 24 and len(found) >= 2 and all(own == shared for own in found.values())
    assert sum(none[key] != shared[key] for key in none) == other
    assert {verdict(name)["parity"][arm] for arm in ("shared", *found)} == {result}
    told = said.parity(name)
    assert (told["differ"], told["of"], told["verdict"]) == (other, 24, result)
    assert told["as_shared"] == told["arms"] == len(found) + 1
    assert told["itself"].startswith("0 of ")


def test_answers_part_from_none_where_two_tokens_are_equal_to_bfloat16():
    apart, best, step = figures.parted([recording.FOLDER / name for name in TINY])
    assert len(apart) == 10 and max(apart) < step == 0.0625 and 8 <= min(best) <= max(best) < 16


def test_a_corrupted_rank_was_caught_on_the_gpus_in_both_ways():
    found = negative_control.known(lab.reopen(recording.FOLDER / "h200-x2-tiny-control"))
    assert list(found) == ["own-1+agreement=check", "own-1+agreement=off"] and all(
        value.detected for value in found.values()
    )
    assert "ranks [1] drafted another tree than rank 0" in found["own-1+agreement=check"].sentence


def test_what_timing_costs_was_not_resolved_as_said():
    (found,) = [
        c
        for c in verdict("h200-x2-timing")["comparisons"]
        if (c["a"], c["b"], c["metric"]) == ("shared", "shared+timing=off", "tokens_per_s")
    ]
    assert found["low"] < 1 < found["high"]
    assert "What that costs was not resolved" in PAGES["model"].read_text()


def test_what_eight_simulated_ranks_did():
    found, arms = figures.answers(recording.FOLDER / "cpu-tp8"), verdict("cpu-tp8")["arms"]
    assert verdict("cpu-tp8")["valid"] is False and verdict("cpu-tp8")["engine"] == "cpu"
    assert len(found) == 12 and all(tokens == found["none"] for tokens in found.values())
    assert all(facts["attested"] for facts in arms.values())
    assert [
        arms[arm]["collectives_per_round"]["draft"] for arm in ("shared", "own-1", "own-2", "own-4")
    ] == [16, 1, 17, 17]


def test_memory_was_predicted_as_said(said):
    assert float(said.memory_within().split()[0]) <= 1


def test_the_faults_are_those_measured_by_their_names_of_today():
    found = json.loads(docs.FAULTS.read_text())
    text = PAGES["faults"].read_text()
    assert len(found["faults"]) >= 10 and "keeper" not in text and "nursery" not in text
    for row in found["faults"]:
        assert f"| {row['told_s']:.1f} s | {row['gone_s']:.1f} s |" in text


def test_the_cycles_that_miss_are_named_and_pairs_are_in_order(said):
    missed = said.cycles_missed()
    assert (missed["of"], missed["ordered"], missed["not_ordered"]) == (30, 24, 0)
    assert missed["where"] == [
        ("h200-x2-hostpath-head-32000", "shared"),
        ("h200-x2-kimi-mini-fused", "own-1+agreement=off"),
    ]
    text = PAGES["model"].read_text()
    assert all(f"`{arm}` of `{name}`" in text for name, arm in missed["where"])


def test_the_reasons_why_own_1_loses_hold(said):
    """The words around the figures: which is larger."""
    for name in ("h200-x2-full-head", "h200-x2-head-32000"):
        own, shared = (
            float(said.stage(name, arm, "draft", "draft_extend")) for arm in ("own-1", "shared")
        )
        assert own > shared
    saved = float(said.traced("h200-x2-full-head", "shared", "collective", "draft", "draft_extend"))
    assert saved < 0.1 < own - shared
    first, later, timing, full = (
        float(said.cycle(f"h200-x2-{name}", "shared"))
        for name in ("head-32000-first", "head-32000", "timing", "full-head")
    )
    assert first > later and timing > full


def test_what_is_linked_is_there_and_a_picture_is_small():
    linked = [
        (page.parent / path).resolve()
        for page in PAGES.values()
        for path in re.findall(r"\]\(([\w./-]+)\)", page.read_text())
    ]
    missing = {str(path) for path in linked if not path.exists()}
    assert len(linked) > 20 and missing == set()
    pictures = {path for path in linked if path.suffix == ".png"}
    assert pictures == set((ROOT / "fixtures" / "pictures").iterdir())
    assert all(path.stat().st_size < 100_000 for path in pictures)
