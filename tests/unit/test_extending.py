"""docs/extending.md, done: a setting, a refusal, a stage and a notebook, each added to a copy of
the code by the entry that the page names, and seen in the checks, the verdict and the report.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from workbench.experiment.profile_sections import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()
SEEN = """
import json
from simulated_runs import profile, sound
from workbench.answers import cycle
from workbench.answers.experiments import EXPERIMENTS
from workbench.experiment import plans
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.runlog import Block
from workbench.judge.verdict import judge
from workbench.predict import preflight
from workbench.replay import NOTEBOOKS
from workbench.report import report

setting = profile()
red = Arm.parse("own-1+colour=red")
try:
    Arm.parse("own-1+colour=green")
except BadInput as error:
    refused = str(error)
spoken = preflight.check(setting, [Arm.parse("own-1"), red])

def rested(r):
    if not (isinstance(r, Block) and r.stage_seconds):
        return r
    seconds, rounds = r.stage_seconds | {"rest": 0.1}, r.rounds | {"rest": 10}
    return r.model_copy(update={"stage_seconds": seconds, "rounds": rounds})

records = list(map(rested, sound()))
verdict = judge(setting, records).file
page = report.render(verdict, records, {}, json.loads(setting.model_dump_json()))
print(json.dumps({
    "name": red.name,
    "servers": len(plans.together(setting, [Arm.parse("own-1"), red])),
    "refused": refused,
    "checked": any("own-1+colour=red" in c.name + c.detail for c in spoken),
    "keys": sorted({r.key for r in verdict.reasons}),
    "page": "was measured under a blue moon" in page,
    "stage": "rest" in cycle.STAGES,
    "stage_ms": verdict.arms["own-1"].stage_ms.get("rest"),
    "drawn": page.count(">rest<"),
    "notebooks": [(n.name, n.measures) for n in NOTEBOOKS],
    "planned": len(EXPERIMENTS["again"].notebook),
}))
"""


def entries() -> list[tuple[str, str, str]]:
    """(file, the line before which to write, what to write) of each example on the page."""
    found = re.findall(
        r"<!-- (?P<file>[\w/.]+) before: (?P<before>.+?) -->\n```python\n(?P<text>.*?)```",
        PAGE,
        re.DOTALL,
    )
    assert len(found) >= 5
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    copy = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "workbench", copy / "workbench")
    shutil.copytree(ROOT / "notebooks", copy / "notebooks")
    os.symlink(ROOT / "fixtures", copy / "fixtures")
    shutil.copy(copy / "notebooks" / "03_baseline.ipynb", copy / "notebooks" / "07_again.ipynb")
    for file, before, text in entries():
        source = (copy / file).read_text()
        assert source.count(before) == 1, f"{file} has {before!r} {source.count(before)} times"
        (copy / file).write_text(source.replace(before, text + before))
    path = os.pathsep.join(map(str, (copy, ROOT / "tests" / "unit", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", SEEN],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_setting_is_one_line_of_the_arm(seen):
    assert seen["name"] == "own-1+colour=red" and seen["servers"] == 2
    assert "colour with one of red, blue" in seen["refused"] and seen["checked"]


def test_a_refusal_is_one_entry_and_its_check(seen):
    assert seen["keys"] == ["blue_moon"] and seen["page"]


def test_a_stage_is_one_entry(seen):
    assert seen["stage"] and seen["stage_ms"] == pytest.approx(10.0) and seen["drawn"] > 0


def test_a_notebook_is_a_file_and_one_entry(seen):
    assert ["07_again", "again"] in seen["notebooks"] and seen["notebooks"][-1][0] == "08_report"
