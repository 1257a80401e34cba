"""README's figures are those of the recordings."""
import json
import re

import faults
import pytest

from workbench import predictions
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
    assert len(ROWS) >= 3


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
