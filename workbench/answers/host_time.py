"""The host's own time for a cycle, from a recorded run of the same machine whose pair leaves the
device idle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from workbench.experiment.arms import Arm
from workbench.experiment.errors import WorkbenchError
from workbench.experiment.profile import Profile
from workbench.predict import cycle_time, model_shape
from workbench.predict.machine import Machine
from workbench.report.cells import number
from workbench.run import recording
from workbench.run.lab import Run

IDLE = 0.25  # of a measured cycle: a device with no more work than this waits for the host


def from_recordings(run: Run, inputs: Machine) -> tuple[str, dict[str, float]]:
    """The recording that tells, and {arm: seconds a cycle that the host needs}; "" and {} where
    none does, and on a CPU.

    A recording tells where machine, GPUs, SGLang and requests at once are the run's, and the model
    expects a device that is idle for more than three quarters of the measured cycle; of several the
    nearest in time. A run never tells of itself.
    """
    found: list[tuple[float, str, dict[str, float]]] = []
    if run.profile.engine == "cuda":
        for name in recording.names():
            folder = recording.FOLDER / name
            facts = json.loads((folder / "provenance.json").read_text())
            if (
                name not in (run.recording, run.folder.name)
                and _place(facts) == _place(run.provenance)
                and (told := _idle(folder, run, inputs))
            ):
                found.append((abs(_time(facts) - _time(run.provenance)), name, told))
    return min(found)[1:] if found else ("", {})


def _place(facts: Mapping[str, Any]) -> tuple:
    return facts.get("machine"), facts.get("gpus"), (facts.get("versions") or {}).get("sglang")


def _time(facts: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(facts["time"]).timestamp()


def _idle(folder: Path, run: Run, inputs: Machine) -> dict[str, float]:
    profile = Profile.model_validate_json((folder / "profile.json").read_text())
    told = {
        name: cycle / 1e3
        for name, facts in recording.stored_verdict(folder.name).arms.items()
        if (cycle := number(facts.cycle_ms)) > 0
    }
    if (
        profile.workload.concurrency != run.profile.workload.concurrency
        or profile.tp != run.profile.tp
        or "shared" not in told
    ):
        return {}
    try:
        target, draft = (
            model_shape.read(getattr(profile.pair, side), f"pair.{side}")
            for side in ("target", "draft")
        )
        device = cycle_time.predict(profile, target, draft, Arm("shared"), inputs).cycle_s
    except WorkbenchError:
        return {}
    return told if device < IDLE * told["shared"] else {}
