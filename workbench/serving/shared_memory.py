"""Named shared memory (/dev/shm) of one server: what its processes were seen to use, and what of it
outlives them.

SGLang ends its processes by SIGKILL, and then nothing takes its names away: each scheduler's load
file (managers/load_snapshot.py:299 shm_path_for) and, after a start that failed, its broadcasters'
segments of 25 MB (distributed/device_communicators/shm_broadcast.py:103 shared_memory).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")


class SharedMemory:
    """The names that a server's processes have mapped.

    processes: the server's processes that are alive. They are asked only when a name appeared,
    since they are many to ask; listing the folder takes microseconds.
    """

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self._processes, self._before = processes, _names()
        self._seen, self._ours, self._again = self._before, set(), False

    def look(self) -> None:
        """To be called often while the server runs."""
        now = _names()
        appeared = bool(now - self._seen)
        # Twice: a name is there a moment before it is mapped.
        if appeared or self._again:
            self._ours |= _mapped(process.pid for process in self._processes()) & now
        self._seen, self._again = now, appeared

    def remove(self) -> list[str]:
        """Once its processes have ended: remove what they leave; returns the names.

        What was there before the server was started, what is another user's and what another
        process has mapped stays.
        """
        left = (self._ours - self._before) & _names()
        left -= _mapped(psutil.pids()) if left else set()
        return sorted(name for name in left if _removed(FOLDER / name))


def _names() -> set[str]:
    try:
        return set(os.listdir(FOLDER))
    except OSError:
        return set()


def _mapped(pids: Iterable[int]) -> set[str]:
    found: set[str] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue  # gone, or another user's
        places = (line.split(maxsplit=5)[-1] for line in lines if f" {FOLDER}/" in line)
        found |= {place.removeprefix(f"{FOLDER}/") for place in places}
    return found


def _removed(path: Path) -> bool:
    try:
        if path.lstat().st_uid != os.getuid():
            return False
        path.unlink()
    except OSError:
        return False
    return True
