"""The keeper of one server: holds a pipe to whoever started it and ends every process of that server when the pipe closes."""
from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

MARKER = "DRAFT_TP_SERVER"


def processes(server: str) -> list[psutil.Process]:
    """Every live process whose environment carries the server's marker: workers outlive their parents and change their session."""
    found, mark = [], f"{MARKER}={server}".encode()
    for pid in psutil.pids():
        try:
            # Read afresh: psutil.process_iter keeps processes from call to call and takes one for another when the clock is set.
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(pid))
        except (psutil.Error, OSError):
            continue        # gone, or another user's
    return found


def end(server: str, patience_s: float = 1.0, deadline_s: float = 30.0) -> list[int]:
    """End every process of a server, first politely, then for certain; returns the pids that are still alive at the deadline."""
    begun = time.monotonic()
    while (alive := processes(server)) and time.monotonic() - begun < deadline_s:
        polite = time.monotonic() - begun < patience_s
        for process in alive:
            try:
                # A stopped process takes SIGKILL alone.
                process.send_signal(signal.SIGTERM if polite and process.status() != psutil.STATUS_STOPPED else signal.SIGKILL)
            except psutil.Error:
                continue
        psutil.wait_procs(alive, timeout=patience_s if polite else 1.0)
    return [p.pid for p in processes(server)]


def main() -> int:
    """``python -m workbench.keeper SERVER LOG COMMAND...`` with the pipe as standard input; writes one JSON line when all has ended."""
    server, log, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.stdin.close())
    with open(log, "ab") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                 env={**os.environ, MARKER: server})
    os.environ.pop(MARKER, None)
    why = _wait(child)
    begun = time.monotonic()
    left = end(server)
    child.poll()
    print(json.dumps({"server": server, "why": why, "status": child.returncode, "left": left, "seconds": round(time.monotonic() - begun, 2)}),
          flush=True)
    return 1 if left else 0


def _wait(child: subprocess.Popen) -> str:
    """Until the server's launcher has ended or the pipe has been closed at its other end."""
    while child.poll() is None:
        try:
            readable, _, _ = select.select([sys.stdin], [], [], 0.2)
            if readable and not os.read(sys.stdin.fileno(), 1):
                return "released"
        except (OSError, ValueError):
            return "signalled"
    return "died"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        sys.exit(0)
