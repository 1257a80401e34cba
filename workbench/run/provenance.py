"""Where a run comes from: versions, machine, GPUs, models and prompts by their hashes. No secret,
no name of a person or host.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import ROOT
from workbench.serving import gpus, server_log

PACKAGES = (
    "sglang",
    "torch",
    "transformers",
    "triton",
    "draft-tp-workbench",
    "numpy",
    "scipy",
    "pandas",
    "papermill",
)


def collect(profile: Profile, command: Sequence[str] = ()) -> dict[str, Any]:
    """The content of provenance.json. Hashes: SHA-256, of a folder's files in the order of their
    names.
    """
    taken = gpus.ours(profile)
    return {
        "schema": 1,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": server_log.clean(shlex.join(command)),
        "engine": profile.engine,
        "versions": (
            {"python": platform.python_version()}
            | {name: found for name in PACKAGES if (found := _version(name))}
        ),
        "workbench_commit": _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "workbench_changed": bool(
            _output(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
        ),
        "workbench_sources": _sources(),
        "machine": {
            "system": platform.system(),
            "kernel": platform.release(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "gpus": gpus.described(taken),
        "topology": gpus.topology(taken),
        "hashes": {
            "target": digest(profile.pair.target),
            "draft": digest(profile.pair.draft),
            "prompts": (
                digest(Path(profile.workload.prompts))
                if profile.workload.prompts != "random"
                else None
            ),
        },
        "nccl": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("NCCL_", "TORCH_NCCL_"))
        },
    }


def sentence(facts: Mapping[str, Any]) -> str:
    """When, where and with what a run was measured, in one sentence."""
    machine, gpus, versions = (facts.get(key) or {} for key in ("machine", "gpus", "versions"))
    named = Counter(f"{gpu.get('name')} (driver {gpu.get('driver_version')})" for gpu in gpus)
    where = (
        ", ".join(f"{count} x {name}" for name, count in named.items())
        or f"{machine.get('processor', 'an unknown processor')},"
        f" {machine.get('cores', 'unknown')} cores"
    )
    commit = str(facts.get("workbench_commit") or "unknown")[:7] + (
        " with changes" if facts.get("workbench_changed") else ""
    )
    when = str(facts.get("time", "an unknown day"))[:16].replace("T", " at ")
    return (
        f"Recorded on {when} UTC on {where}, SGLang {versions.get('sglang', 'unknown')}, workbench"
        f" commit {commit}.{_missing(facts)}"
    )


def _missing(facts: Mapping[str, Any]) -> str:
    """What a stopped run had still to measure, in words."""
    parts = [
        f"{experiment}: {count} of {arm}"
        for experiment, arms in (facts.get("missing") or {}).items()
        for arm, count in arms.items()
    ]
    return (
        " The run was stopped before its end; blocks that it lacks of its plan:"
        f" {', '.join(parts)}."
        if parts
        else ""
    )


def digest(path: Path) -> str | None:
    """SHA-256 of a file, or of the files right in a folder; None when there is none."""
    files = (
        [path]
        if path.is_file()
        else sorted(p for p in path.glob("*") if p.is_file())
        if path.is_dir()
        else []
    )
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode())
        with open(file, "rb") as content:
            while chunk := content.read(1 << 20):
                total.update(chunk)
    return total.hexdigest() if files else None


def _sources() -> str:
    """SHA-256 of this package's own source, which a copy without its repository still has."""
    total = hashlib.sha256()
    for file in sorted((ROOT / "workbench").rglob("*.py")):
        total.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return total.hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
