"""The supervisor of one server: holds a pipe to whoever started it and ends every process of that
server when the pipe closes.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import psutil

from workbench.serving.server_log import SUPERVISOR
from workbench.serving.shared_memory import SharedMemory

MARKER = "DRAFT_TP_SERVER"
# setproctitle, with which SGLang names its processes, writes over the environment that /proc shows
# unless this is set.
KEEPS_MARKER = {"SPT_NOENV": "1"}
PORT_FREE_WITHIN_S, GPUS_FREE_WITHIN_S = 2.0, 30.0
PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def processes(server: str) -> list[psutil.Process]:
    """Every live process whose environment carries the server's marker: workers outlive their
    parents and change their session.
    """
    found, mark = [], f"{MARKER}={server}".encode()
    for pid in psutil.pids():
        try:
            # Read afresh: psutil.process_iter keeps processes from call to call and takes one for
            # another when the clock is set.
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(
                b"\0"
            ):
                found.append(psutil.Process(pid))
        except (psutil.Error, OSError):
            continue  # gone, or another user's
    return found


def end(
    server: str,
    patience_s: float = 1.0,
    deadline_s: float = 30.0,
    *,
    launcher: subprocess.Popen | None = None,
) -> tuple[list[int], list[int]]:
    """End every process of a server, first politely, then for certain; returns the pids it ended
    and those still alive at the deadline.

    launcher: given by its supervisor, which has inherited the orphans: whatever descends from this
        process then, marked or not.
    """
    begun, ended = time.monotonic(), set()
    while (alive := _alive(server, launcher)) and time.monotonic() - begun < deadline_s:
        polite = time.monotonic() - begun < patience_s
        for process in alive:
            ended.add(process.pid)
            try:
                # A stopped process takes SIGKILL alone.
                process.send_signal(
                    signal.SIGTERM
                    if polite and process.status() != psutil.STATUS_STOPPED
                    else signal.SIGKILL
                )
            except psutil.Error:
                continue
        # Not by psutil's own wait, which takes the launcher's exit status.
        _until(lambda: not any(map(_runs, alive)), patience_s if polite else 1.0)
    left = [p.pid for p in alive]
    return sorted(ended - set(left)), left


def _alive(server: str, launcher: subprocess.Popen | None) -> list[psutil.Process]:
    found = {p.pid: p for p in processes(server)}
    for process in psutil.Process().children(recursive=True) if launcher else ():
        try:
            if _runs(process):
                found[process.pid] = process
            elif (
                process.pid != launcher.pid
            ):  # an inherited orphan, which nobody else takes off the list
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.Error, OSError):
            continue
    return list(found.values())


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the server does: a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):
            return False
    return True


def account(text: str) -> dict[str, Any] | None:
    """The supervisor's account in its output or in a server's log; None where it did not live to
    write one.

    server; why: "released" (the pipe closed), "signalled", or "died" (the launcher did); status:
    the launcher's exit status, negative for a signal; ended, left: pids; port_free, gpus_free: None
    where there is none; removed: names of shared memory that it left; seconds: from the order to
    end until all this was known.
    """
    said = [line for line in text.splitlines() if line.startswith(SUPERVISOR)]
    return json.loads(said[-1].removeprefix(SUPERVISOR)) if said else None


def popen(
    command: Sequence[str], server: str, output: int, before: Callable[[], Any]
) -> subprocess.Popen:
    """Start a server's launcher in a session of its own, marked as the server's. output: the log;
    before: called in it first of all.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **KEEPS_MARKER, MARKER: server},
        preexec_fn=before,
    )


def main(arguments: Sequence[str], start: Callable[..., subprocess.Popen] = popen) -> int:
    """``python -m workbench.serving.supervisor SERVER LOG ADDRESS COMMAND...`` with the pipe as
    standard input.

    ADDRESS: host:port that the server listens on, - for none. When all has ended its account is the
    last line of its output and of the log.
    start: how the command is started, as ``popen`` does.
    """
    server, log, address, *command = arguments
    host, _, port = address.rpartition(":")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.stdin.close())
    prctl = ctypes.CDLL(None).prctl
    prctl(
        _PR_SET_CHILD_SUBREAPER, 1
    )  # orphans of the server become its own children, whatever they did to their environment
    memory = SharedMemory(lambda: _alive(server, child))
    with open(log, "ab") as output:
        # Where the supervisor itself is killed, the kernel ends the launcher, and SGLang's workers
        # die with that (srt/utils/common.py:3432 kill_itself_when_parent_died).
        child = start(
            command, server, output.fileno(), lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        )
    os.environ.pop(MARKER, None)
    why = _wait(child, memory.look)
    memory.look()  # of a launcher that died before its workers
    begun = time.monotonic()
    ended, left = end(server, launcher=child)
    port_free = _until(lambda: port_is_free(int(port), host), PORT_FREE_WITHIN_S) if host else None
    line = SUPERVISOR + json.dumps(
        {
            "server": server,
            "why": why,
            "status": child.poll(),
            "ended": ended,
            "left": left,
            "port_free": port_free,
            "gpus_free": _gpus_free({*ended, child.pid}),
            "removed": memory.remove(),
            "seconds": round(time.monotonic() - begun, 2),
        }
    )
    try:
        with open(log, "ab") as output:
            output.write(f"\n{line}\n".encode())
    except OSError:
        pass  # a full disk: whoever listens still hears it
    print(line, flush=True)
    return 1 if left else 0


def _wait(child: subprocess.Popen, meanwhile: Callable[[], None]) -> str:
    """Until the server's launcher has ended, which it does after a worker's death too, or the pipe
    has been closed at its other end. meanwhile: called some five times a second.
    """
    while child.poll() is None:
        meanwhile()
        try:
            readable, _, _ = select.select([sys.stdin], [], [], 0.2)
            if readable and not os.read(sys.stdin.fileno(), 1):
                return "released"
        except (OSError, ValueError):
            return "signalled"
    return "died"


def _until(holds, within_s: float) -> bool:
    end_ = time.monotonic() + within_s
    while not (held := holds()) and time.monotonic() < end_:
        time.sleep(0.05)
    return held


def _gpus_free(pids: Collection[int]) -> bool | None:
    """Whether the driver has let go of processes that have ended, for which it takes a moment; None
    where no GPU is in use.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not shutil.which("nvidia-smi"):
        return None

    def free() -> bool:
        try:
            said = subprocess.run(
                ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=20,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return not {int(line) for line in said.stdout.split() if line.isdigit()} & set(pids)

    return _until(free, GPUS_FREE_WITHIN_S)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        sys.exit(0)
