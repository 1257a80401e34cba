"""What a server leaves in /dev/shm is removed with it, and nothing else is."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench.experiment.profile_sections import Node
from workbench.serving import launch_command, server, shared_memory, supervisor

NAME = f"shared-memory-{os.getpid()}"
MAPS = """
import mmap, os, sys, time
for name in sys.argv[2:]:
    file = os.open("/dev/shm/" + name, os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(file, 4096)
    globals()["m" + name.replace("-", "_")] = mmap.mmap(file, 4096)
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def until(holds, within_s: float = 30):
    end = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.fixture
def names():
    """Names of this test in /dev/shm, removed after it."""
    found = [f"sglang_loads_{NAME}-{n}.shm" for n in range(3)]
    yield found
    for name in found:
        (shared_memory.FOLDER / name).unlink(missing_ok=True)


def kept(folder: Path, *names: str, code: str = MAPS) -> subprocess.Popen:
    """A supervisor of a stand-in that has mapped these names."""
    kept_by = server._keep(
        NAME,
        launch_command.Part(
            Node(name="here"), (sys.executable, "-c", code, str(folder / "up"), *names), {}
        ),
        folder / "log",
    )
    until((folder / "up").exists)
    return kept_by


def there(names) -> list[bool]:
    return [(shared_memory.FOLDER / name).exists() for name in names]


def seen_by_supervisor(kept_by: subprocess.Popen) -> None:
    """Its looks are 0.2 s apart; it is asked nothing."""
    del kept_by
    time.sleep(0.8)


def test_what_a_server_leaves_is_removed_and_told(tmp_path, names):
    kept_by = kept(tmp_path, *names[:2])
    seen_by_supervisor(kept_by)
    said, _ = kept_by.communicate(timeout=30)
    assert there(names[:2]) == [False, False]
    assert supervisor.account(said)["removed"] == sorted(names[:2])


def test_what_a_start_that_fails_leaves_is_removed(tmp_path, names):
    """The launcher dies; its worker, which had mapped the memory, is ended after it."""
    code = MAPS.replace("time.sleep(600)", "os.fork() and (time.sleep(0.8) or os._exit(1))")
    kept_by = kept(tmp_path, *names[:2], code=code + "time.sleep(600)")
    said = kept_by.stdout.read()
    assert supervisor.account(said)["why"] == "died" and there(names[:2]) == [False, False]


def test_what_was_there_before_and_what_others_use_stays(tmp_path, names):
    before, shared, own = names
    (shared_memory.FOLDER / before).write_bytes(b"\0" * 4096)
    kept_by = kept(tmp_path, *names)
    seen_by_supervisor(kept_by)
    with open(shared_memory.FOLDER / shared, "r+b") as file:
        other = mmap.mmap(file.fileno(), 4096)  # this process uses it too
    said, _ = kept_by.communicate(timeout=30)
    assert there(names) == [True, True, False]
    assert supervisor.account(said)["removed"] == [own]
    other.close()


def test_a_server_that_makes_nothing_removes_nothing(tmp_path, names):
    kept_by = kept(tmp_path)
    (shared_memory.FOLDER / names[0]).write_bytes(b"another's")
    seen_by_supervisor(kept_by)
    said, _ = kept_by.communicate(timeout=30)
    assert supervisor.account(said)["removed"] == [] and there(names[:1]) == [True]
