"""What a run leaves for its readers: verdict.json and report.html, from its log alone."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from workbench.answers import budget, cycle_check, steps
from workbench.experiment.errors import BadInput
from workbench.judge.verdict_file import VerdictFile
from workbench.predict.machine import Machine
from workbench.report import report, two_runs
from workbench.run.lab import Run


def publish(lab: Run) -> VerdictFile:
    """Write verdict.json and report.html into the run's folder; returns the verdict."""
    records = lab.records
    judged = lab.verdict.file
    (lab.folder / "verdict.json").write_text(
        json.dumps(judged.to_json(), indent=1, allow_nan=False)
    )
    (lab.folder / "report.html").write_text(
        report.render(
            judged,
            records,
            lab.provenance,
            json.loads(lab.profile.model_dump_json()),
            _cycles(lab, judged),
            _sweep_map(lab),
        )
    )
    return judged


def _cycles(lab: Run, judged: VerdictFile) -> pd.DataFrame | None:
    """Stages measured beside predicted, where the log holds this machine's inputs; a report
    measures nothing.
    """
    if lab.finding("machine", Machine) is None:
        return None
    basis = budget.basis(lab)
    return None if basis.inputs is None else cycle_check.bars(lab, judged, basis)


def _sweep_map(lab: Run) -> pd.DataFrame | None:
    """The candidates of the search over steps; None for a run without a draft."""
    try:
        return steps.sweep_map(lab.profile, lab.records)
    except BadInput:
        return None


def beside(a: Run, b: Run, out: Path) -> str:
    """Write the page that puts two runs side by side; returns what it says in one sentence.

    Raises: BadInput when the page cannot be written.
    """
    runs = [
        two_runs.Side(
            lab.folder.name,
            lab.verdict.file,
            lab.provenance,
            json.loads(lab.profile.model_dump_json()),
        )
        for lab in (a, b)
    ]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(two_runs.render(*runs))
    except OSError as error:
        raise BadInput(
            "out",
            f"{out.name} cannot be written ({error.strerror})",
            "name a file in a writable folder",
        ) from None
    return two_runs.sentence(*runs)
