"""Which replay is at work on a run's folder: a ticket in it, so that no second one starts there and
a reopened notebook finds it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from workbench.experiment.errors import BadInput

T = TypeVar("T", bound="Ticket | Progress | Seen")
TICKET, PROGRESS, LOG, SEEN = "process.json", "progress.json", "replay.log", "watched.json"


@dataclass(frozen=True)
class Ticket:
    """A replay on a folder. started: clock ticks from boot to its start (field 22 of
    /proc/PID/stat), which tell it from a later process of the same number. notebook: at work;
    place, of: its number among how many. ended: exit status, None while it runs.
    """

    pid: int
    started: int
    notebook: str = ""
    place: int = 0
    of: int = 0
    ended: int | None = None

    @property
    def alive(self) -> bool:
        return self.ended is None and _ticks(self.pid) == self.started


@dataclass(frozen=True)
class Progress:
    """How far the measuring of an experiment is, kept by whichever process measures: the block at
    work, of how many, on which arm.

    left_s: seconds that the rest is expected to take; None where that is not known yet.
    """

    experiment: str
    block: int
    of: int
    arm: str
    left_s: float | None = None


@dataclass(frozen=True)
class Seen:
    """Whoever watches was shown an experiment's interval, after so many server starts: he may stop
    the run for what it says, which its level has to pay for (judge/levels.py).
    """

    experiment: str
    starts: int


def of_process(pid: int) -> Ticket:
    """The first ticket of a process that has just been started."""
    return Ticket(pid, _ticks(pid))


def read(folder: Path) -> Ticket | None:
    """The last ticket of a folder, alive or not; None where no replay ever was."""
    return _read(folder / TICKET, Ticket)


def write(folder: Path, ticket: Ticket) -> None:
    """Put a ticket where the last one was; a reader sees either."""
    _write(folder / TICKET, ticket)


def progress(folder: Path) -> Progress | None:
    """How far the folder's last measuring is; None before its first block."""
    return _read(folder / PROGRESS, Progress)


def tell_progress(folder: Path, at: Progress) -> None:
    """Keep how far the measuring is, for whoever watches; a reader sees one whole record."""
    _write(folder / PROGRESS, at)


def seen(folder: Path) -> Seen | None:
    """What interval of the run at work was shown last; None where none was."""
    return _read(folder / SEEN, Seen)


def tell_seen(folder: Path, shown: Seen) -> None:
    """Keep that an interval is shown, for the process that measures, which writes the log."""
    if seen(folder) != shown:
        _write(folder / SEEN, shown)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return kind(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, record: Ticket | Progress | Seen) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(asdict(record)))
    new.replace(path)


def alive(outputs: Path) -> Path | None:
    """The folder under ``outputs`` that a replay is at work on, the newest of several; None where
    there is none.
    """
    found = [
        path.parent
        for path in outputs.glob(f"*/{TICKET}")
        if (ticket := read(path.parent)) and ticket.alive
    ]
    return max(found, key=lambda folder: (folder / TICKET).stat().st_mtime, default=None)


@contextmanager
def one_at_a_time(outputs: Path) -> Iterator[None]:
    """Whoever looks for a replay and starts one where there is none does both under this lock."""
    outputs.mkdir(parents=True, exist_ok=True)
    with open(outputs / ".starting", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Claim:
    """A replay's hold on its folder, a context manager; ``at`` says where it is.

    Raises: BadInput when another replay is at work there.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> Claim:
        with one_at_a_time(self.folder):
            there = read(self.folder)
            if there and there.alive and there.pid != os.getpid():
                raise BadInput(
                    "out",
                    f"{self.folder.name} is being measured by process {there.pid}",
                    "wait for its end, or stop it first",
                )
            self.ticket = of_process(os.getpid())
            (self.folder / PROGRESS).unlink(missing_ok=True)
            write(self.folder, self.ticket)
        return self

    def at(self, notebook: str, place: int, of: int) -> None:
        self.ticket = replace(self.ticket, notebook=notebook, place=place, of=of)
        write(self.folder, self.ticket)

    def ended(self, status: int) -> None:
        self.ticket = replace(self.ticket, ended=status)

    def __exit__(self, *error: object) -> None:
        write(
            self.folder,
            self.ticket if self.ticket.ended is not None else replace(self.ticket, ended=1),
        )


def _ticks(pid: int) -> int:
    """-1 for a process that is not, or is dead and waits for its parent."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if state in "ZX" else int(rest[18])
