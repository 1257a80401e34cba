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
CYCLES = re.findall(r"^\| `([\w-]+)` \| `([^`]+)` \| ([\d.]+) ms \| ([\d.]+) ms \| ([-+]\d+) % \|", README, re.MULTILINE)


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


def test_the_cycles_are_those_measured_and_predicted_within_what_is_allowed_and_in_order():
    table, _ = predictions.recorded()
    for name, arm, measured, predicted, off in CYCLES:
        row, = table[(table["run"] == name) & (table["arm"] == arm)].to_dict("records")
        assert (measured, predicted) == (f"{row['measured cycle (ms)']:.2f}", f"{row['model alone (ms)']:.2f}")
        assert off == f"{row['off (%)']:+.0f}" and abs(row["off (%)"]) <= predictions.ALLOWED
    assert len(CYCLES) >= 4


def test_what_the_model_misses_of_shared_is_what_the_notebook_says():
    missed = re.search(r"Of `shared` it misses ([\d.]+) ms of drafting and ([\d.]+) ms between the stages", README)
    _, said = predictions.recorded()
    assert f"has +{missed[1]} ms in draft, +{missed[2]} ms in the host against the model" in said[CYCLES[0][0]]
    assert "It orders each of the 3 pairs of arms" in said[CYCLES[0][0]]
