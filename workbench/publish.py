"""What a run leaves for its readers: verdict.json and report.html, from its log alone."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import budget, predictions, report, versus
from workbench.errors import BadInput
from workbench.lab import Lab


def publish(lab: Lab) -> dict[str, Any]:
    """Write verdict.json and report.html into the run's folder; returns the verdict's content."""
    records = lab.records
    judged = lab.verdict.to_json()
    (lab.folder / "verdict.json").write_text(json.dumps(judged, indent=1, allow_nan=False))
    (lab.folder / "report.html").write_text(report.render(judged, records, lab.provenance, json.loads(lab.profile.model_dump_json()),
                                                          _cycles(lab, judged)))
    return judged


def _cycles(lab: Lab, judged: dict[str, Any]) -> pd.DataFrame | None:
    """Stages measured beside predicted, where the log holds this machine's inputs; a report measures nothing."""
    if lab.finding("machine") is None:
        return None
    basis = budget.basis(lab)
    return None if basis.inputs is None else predictions.bars(lab, judged, basis)


def beside(a: Lab, b: Lab, out: Path) -> str:
    """Write the page that puts two runs side by side; returns what it says in one sentence.

    Raises: BadInput when the page cannot be written.
    """
    runs = [versus.Run(lab.folder.name, lab.verdict.to_json(), lab.provenance, json.loads(lab.profile.model_dump_json())) for lab in (a, b)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(versus.render(*runs))
    except OSError as error:
        raise BadInput("out", f"{out.name} cannot be written ({error.strerror})", "name a file in a writable folder") from None
    return versus.sentence(*runs)
