"""README's figures are those of the recordings."""
import json
import re

import faults
import pytest

from workbench import footprint, lab, predictions, recording, runlog
from workbench.profile import ROOT

RECORDINGS = ROOT / "fixtures" / "recordings"
README = (ROOT / "README.md").read_text()
ROWS = re.findall(r"^\| `(?P<name>[\w-]+)` \| `(?P<a>[^`]+)` ÷ `(?P<b>[^`]+)` \| (?P<figures>[^|]+) \|", README, re.MULTILINE)


@pytest.mark.parametrize(("name", "a", "b", "figures"), ROWS)
def test_a_ratio_is_the_recorded_one(name, a, b, figures):
    verdict = json.loads((RECORDINGS / name / "verdict.json").read_text())
    found, = [c for c in verdict["comparisons"] if (c["a"], c["b"], c["metric"]) == (a, b, "tokens_per_s")]
    assert found["valid"] and figures == f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def test_the_table_is_there():
    assert len(ROWS) >= 12 and {name for name, *_ in ROWS} == {name for name in recording.names() if name.startswith("h200")}


@pytest.mark.parametrize(("name", "other"), [("h200-x2-tiny", 2), ("h200-x2-tiny-paged", 6)])
def test_on_the_gpus_own_1_answers_as_shared_does_and_both_differ_from_none_as_often_as_said(name, other):
    answers: dict[str, list] = {}
    for block in (r for r in runlog.read(RECORDINGS / name / "runs.jsonl") if r.kind == "block" and r.role == "parity" and r.pair == 0):
        answers.setdefault(block.arm, []).extend((r.prompt, r.output_ids) for r in block.requests)
    none, shared = answers.pop("none"), answers.pop("shared")
    assert len(shared) == 24 and len(answers) >= 2 and all(own == shared for own in answers.values())
    assert sum(a != b for a, b in zip(none, shared, strict=True)) == other and f"{other} of 24" in README


def test_memory_was_predicted_and_given_back_as_said():
    shown = [lab.reopen(RECORDINGS / name) for name in recording.names() if name.startswith("h200")]
    tables = {run.folder.name: footprint.table(run)["off (%)"].dropna().abs() for run in shown}
    assert sum(len(off) > 0 for off in tables.values()) >= 6 and all(off.max() <= 1 for off in tables.values() if len(off))
    assert all(run.finding("memory")["given_back"] for run in shown if tables[run.folder.name].size)


def test_the_table_of_faults_is_what_was_measured():
    found = json.loads((ROOT / "fixtures" / "faults.json").read_text())
    assert faults.table(found) in README and len(found["faults"]) >= 10


def test_the_cycles_are_those_measured_and_predicted_and_those_that_miss_are_named():
    table, said = predictions.recorded()
    shown = table[table["run"].str.startswith("h200") & ~table["run"].str.contains("tiny")]
    for name, rows in shown.groupby("run"):
        cells = [f"{row['measured cycle (ms)']:.2f} → {row['model alone (ms)']:.2f}, {row['off (%)']:+.0f} %" for _, row in rows.iterrows()]
        assert f"| `{name}` | {' | '.join(cells)} |" in README and list(rows["arm"]) == ["none", "shared", "own-1", "own-1+agreement=off"]
    missed = shown[shown["off (%)"].abs() > predictions.ALLOWED]
    assert len(shown) == 20 and "Two of 20 are off by more than 15 %" in README
    assert list(zip(missed["run"], missed["arm"])) == [("h200-x2-hostpath-head-32000", "shared"), ("h200-x2-kimi-mini", "own-1+agreement=off")]
    ordered = [re.search(r"It orders each of the (\d+) pairs of arms", said[name]) for name in set(shown["run"]) - {"h200-x2-kimi-mini"}]
    assert sum(int(found[1]) for found in ordered) == 17 and "all\n17 pairs of arms here" in README


def test_what_the_model_misses_of_shared_is_what_the_notebook_says():
    missed = re.search(r"\(([\d.]+) ms of its drafting and ([\d.]+) ms between the stages\)", README)
    said = predictions.recorded()[1]["h200-x2-hostpath-head-32000"]
    assert f"has +{missed[1]} ms in draft, " in said and f"+{missed[2]} ms in the host against the model" in said


def test_the_reasons_why_own_1_loses_have_the_recorded_figures():
    def arms(name: str) -> dict:
        return json.loads((RECORDINGS / name / "verdict.json").read_text())["arms"]

    def drafting(name: str, arm: str) -> str:
        stages = arms(name)[arm]["stage_ms"]
        return f"{stages['draft'] + stages['draft_extend']:.2f}"

    words = " ".join(README.split())
    full, small = ([drafting(name, arm) for arm in ("own-1", "shared")] for name in ("h200-x2-full-head", "h200-x2-head-32000"))
    assert f"{full[0]} ms a cycle on `own-1` and {full[1]} ms on `shared`" in words and f"{small[0]} against {small[1]} ms" in words
    trace = lab.reopen(RECORDINGS / "h200-x2-full-head").finding("trace shared")["parts"]
    ms = 1e3 * sum(trace[stage]["seconds"].get("collective", 0) / trace[stage]["rounds"] for stage in ("draft", "draft_extend"))
    assert f"the trace of `shared` has {ms:.3f} ms" in words
    assert f"a cycle of {arms('h200-x2-tiny')['shared']['cycle_ms']:.2f} ms all the same" in words
    first, later = (arms(name)["shared"]["cycle_ms"] for name in ("h200-x2-head-32000-first", "h200-x2-head-32000"))
    assert f"took {first:.2f} ms, then {later:.2f}" in words
    for arm in ("shared", "own-1"):
        length = arms("h200-x2-tiny")[arm]["accept"]["length"]
        assert f"{length['value']:.2f} ({length['low']:.2f} to {length['high']:.2f}) on `{arm}`" in words
        assert f"{arms('h200-x2-tiny-paged')[arm]['accept']['length']['value']:.2f}" == "3.59" and "by pages 3.59 and 3.59" in words


def test_what_is_linked_is_there_and_a_picture_is_small():
    linked = [ROOT / path for path in re.findall(r"\]\(([\w./-]+)\)", README)]
    assert len(linked) > 10 and [str(path) for path in linked if not path.exists()] == []
    pictures = [path for path in linked if path.suffix == ".png"]
    assert set(pictures) == set((ROOT / "fixtures" / "pictures").iterdir()) and all(path.stat().st_size < 100_000 for path in pictures)
