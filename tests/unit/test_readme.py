"""README's figures are those of the recordings."""
import json
import re

import faults
import pytest

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
    assert len(ROWS) >= 3


def test_the_table_of_faults_is_what_was_measured():
    found = json.loads((ROOT / "fixtures" / "faults.json").read_text())
    assert faults.table(found) in README and len(found["faults"]) >= 10
