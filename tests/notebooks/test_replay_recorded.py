"""A recording renders the notebooks and the report of its run, from the command line, and nothing
is measured.
"""

import json

import nbformat

from workbench.judge.verdict_file import VerdictFile
from workbench.replay import NOTEBOOKS
from workbench.run import provenance, recording

NAME = "cpu-tiny"


def test_a_recording_renders_the_whole_investigation(rendered):
    assert rendered.status == 0, rendered.said[-3000:]
    judged = VerdictFile.read(rendered.verdict)
    assert list(recording.differences(recording.stored_verdict(NAME), judged)) == []
    assert (rendered.folder / "runs.jsonl").read_bytes() == (
        recording.FOLDER / NAME / "runs.jsonl"
    ).read_bytes()
    recorded = json.loads((recording.FOLDER / NAME / "provenance.json").read_text())
    for notebook in (
        n for n in NOTEBOOKS if n.measures is None or n.measures in recorded["blocks"]
    ):
        cells = nbformat.read(
            rendered.folder / "notebooks" / f"{notebook.name}.ipynb", as_version=4
        ).cells
        said = json.dumps([cell.get("outputs") for cell in cells])
        assert provenance.sentence(recorded) in said and "Nothing is measured here" in said, (
            notebook.name
        )
    assert rendered.verdict["sentence"] in said  # the last one prints the answer
    assert "recorded: cpu-tiny" in (rendered.folder / "report.html").read_text()
