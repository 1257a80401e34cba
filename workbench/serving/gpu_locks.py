"""Locks on the GPUs of this machine, which two runs must not share by accident; the system frees
them when their holders end.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from workbench.experiment.errors import BadInput
from workbench.experiment.profile import Profile
from workbench.serving import gpus

# One folder for all users of a machine, whatever their TMPDIR: GPUs are theirs in common.
# Containers that share GPUs and no /tmp do not meet.
FOLDER = Path("/tmp") if os.path.isdir("/tmp") else Path(tempfile.gettempdir())
GIVES_WAY_WITHIN_S = 60


@contextmanager
def held(profile: Profile, run: Path) -> Iterator[tuple[int, ...]]:
    """Hold the profile's GPUs for a run; yields the locks' file descriptors.

    A server's supervisor inherits them: a GPU is free only when the workbench and the supervisors
    of its servers have ended, however that was.
    Raises: BadInput, naming the other run, where one of them is held.
    """
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(_lock(_file(gpu.uuid), run, partial(refusal, gpu.index)))
            for gpu in gpus.ours(profile)
        )


def holders(profile: Profile) -> dict[int, str]:
    """{index of a GPU that the profile would take: the live run that holds it}."""
    found = {}
    for gpu in gpus.ours(profile):
        try:
            file = os.open(_file(gpu.uuid), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue  # never locked
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if not _dying(holder := _told(file)):
                found[gpu.index] = holder
        finally:
            os.close(file)
    return found


def refusal(index: int, holder: str) -> BadInput:
    return BadInput(
        "tp",
        f"GPU {index} is in use by {holder}",
        "wait for it, or name other GPUs in server.environment.CUDA_VISIBLE_DEVICES",
    )


def _file(uuid: str) -> Path:
    return FOLDER / f"draft-tp-workbench-{uuid}.lock"


@contextmanager
def _lock(path: Path, run: Path, refused: Callable[[str], BadInput]) -> Iterator[int]:
    file, end = _open(path), time.monotonic() + GIVES_WAY_WITHIN_S
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A workbench that was killed leaves its lock to its supervisors, which are about to
                # end.
                if not _dying(holder := _told(file)) or time.monotonic() > end:
                    raise refused(holder) from None
                time.sleep(0.2)
        with suppress(OSError):  # another user's file: its name is told for ours
            os.ftruncate(file, 0)
            os.pwrite(file, f"the run in {run} (process {os.getpid()})".encode(), 0)
        yield file
    finally:
        os.close(file)


def _open(path: Path) -> int:
    with suppress(FileNotFoundError):
        with suppress(PermissionError):
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    os.fchmod(
        file, 0o666
    )  # another user's workbench writes its name here after ours; the file holds nothing else
    return file


def _told(file: int) -> str:
    return os.pread(file, 4096, 0).decode(errors="replace") or "another run"


def _dying(holder: str) -> bool:
    found = re.search(r"\(process (\d+)\)$", holder)
    return bool(found) and not psutil.pid_exists(int(found[1]))
