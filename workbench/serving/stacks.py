"""The stacks of a server's processes, read by py-spy from outside and kept beside its log: where
each rank of a hung server waits.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import psutil

from workbench.serving import server_log, supervisor

WITHIN_S = 20


def save(server: str, log: Path) -> str:
    """Write the stacks of every live process of the server here into LOG.stacks.txt, or why they
    cannot be read; returns in words where.
    """
    path = log.with_suffix(".stacks.txt")
    with ThreadPoolExecutor() as pool:
        found = list(
            pool.map(_dump, sorted(supervisor.processes(server), key=lambda process: process.pid))
        )
    try:
        path.write_text("\n".join(found))
    except OSError as error:
        return f"{path.name} with the stacks of its processes cannot be written ({error.strerror})"
    return f"stacks of its {len(found)} processes are in {path.name}"


def _dump(process: psutil.Process) -> str:
    try:
        named = (process.cmdline() or [process.name()])[:3]
        stopped = process.status() == psutil.STATUS_STOPPED
        head = (
            f"=== {process.pid}"
            f" {' '.join(word.strip() for word in named)}{' (stopped)' if stopped else ''}"
        )
    except psutil.Error:
        return f"=== {process.pid} ended meanwhile\n"
    if not (program := _py_spy()):
        return f"{head}\nits stacks cannot be read: py-spy is not installed\n"
    # Reading without a pause is safe where nothing moves, and the only way where the process was
    # stopped by somebody else.
    command = [program, "dump", "--pid", str(process.pid), *(["--nonblocking"] if stopped else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{head}\nits stacks cannot be read: {type(error).__name__}\n"
    said = (
        done.stdout
        if done.returncode == 0
        else f"its stacks cannot be read: {' '.join(done.stderr.split())[:300]}\n"
    )
    return f"{head}\n{server_log.without_paths(said)}"


@cache
def _py_spy() -> str | None:
    try:
        # A program in a wheel, which need not be on this interpreter's PATH.
        found = next(
            (file.locate() for file in files("py-spy") or () if file.name == "py-spy"), None
        )
    except PackageNotFoundError:
        found = None
    return str(Path(found).resolve()) if found and Path(found).exists() else shutil.which("py-spy")
