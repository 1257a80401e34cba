"""Run a replay as a person does, by the command line, and keep what it said."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from workbench.experiment.profile_sections import ROOT

# Blocks of one short request, and short answers to compare; tests/engine compares long ones.
SHORT = tuple(
    word
    for change in (
        "workload.requests_per_block=1",
        "workload.max_new_tokens=16",
        "parity_tokens=8",
    )
    for word in ("-p", change)
)


@dataclass(frozen=True)
class Replayed:
    folder: Path
    status: int
    said: str

    @property
    def verdict(self) -> dict:
        return json.loads((self.folder / "verdict.json").read_text())


def replay(out: Path, *arguments: str, profile: str = "cpu-tiny") -> Replayed:
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", "replay", profile, "--out", str(out), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    return Replayed(out, done.returncode, done.stdout + done.stderr)
