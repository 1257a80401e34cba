"""What a run leaves for its readers: verdict.json and report.html, from its log alone."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench import report
from workbench.errors import BadInput
from workbench.lab import Lab
from workbench.profile import Profile


def publish(lab: Lab) -> dict[str, Any]:
    """Write verdict.json and report.html into the run's folder; returns the verdict's content."""
    records = lab.records
    judged = lab.verdict.to_json()
    (lab.folder / "verdict.json").write_text(json.dumps(judged, indent=1, allow_nan=False))
    (lab.folder / "report.html").write_text(report.render(judged, records, lab.provenance, json.loads(lab.profile.model_dump_json())))
    return judged


def reopen(folder: Path) -> Lab:
    """The lab of a finished or interrupted run.

    Raises: BadInput when the folder holds no run.
    """
    kept = Path(folder) / "profile.json"
    if not kept.exists():
        raise BadInput("DIR", f"{Path(folder).name} holds no run", "give the folder of a replay, e.g. one under outputs/")
    return Lab(Profile.model_validate_json(kept.read_text()), Path(folder))


