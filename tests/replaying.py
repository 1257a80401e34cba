"""Run a replay as a person does, by the command line, and keep what it said."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from workbench.experiment.profile_sections import ROOT

SHORT = ("-p", "workload.requests_per_block=1")  # blocks of one request


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
