"""SGLang imported once for many CPU servers: the supervisor of each, and the server itself, are
forked from a process that has imported it.

An import takes ten seconds of a core, more than all else that starting a CPU server takes. CUDA
does not survive a fork, so on GPUs each server is a program of its own, as it is here where there
is no fork server. One ends with its owner, and what it forked ends with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from workbench.engine import orders
from workbench.serving import supervisor

VARIABLE = "DRAFT_TP_NURSERY"  # its address, for the processes that its owner starts
# A server's launcher, and what each of its ranks would import by itself: the worker, and every
# model that SGLang knows, which the registry imports to find one.
_IMPORTS = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.models.registry",
)
_FORKED = ("sglang.launch_server", "workbench.answers.probe_sglang")
_NAMELESS = "-" * 12  # as long as a server's identity, which takes its place
# What a server reads when it starts, not when it is imported: orders, a rank's cores
# (srt/utils/numa_utils.py:459 SGLANG_CPU_OMP_THREADS_BIND), and Gloo's own.
_OF_ONE_SERVER, _OF_A_GROUP = (
    {
        orders.VARIABLE,
        orders.SHARED_MEMORY,
        "SGLANG_CPU_OMP_THREADS_BIND",
    },
    "GLOO_",
)
_ROOM = 8192  # characters of a forked process's command line
_MESSAGE = 1 << 18


class Kept:
    """A supervisor forked by the fork server, with what ``subprocess.Popen`` would offer of it."""

    def __init__(self, pid: int, connection: socket.socket, stdin: int, stdout: int):
        self.pid, self.stdin, self.stdout = pid, os.fdopen(stdin, "w"), os.fdopen(stdout)
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            said = self._connection.recv(_MESSAGE)
            # A fork server that has ended told its supervisors to end (PR_SET_PDEATHSIG).
            self.returncode = json.loads(said)["status"] if said else -signal.SIGTERM
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises: subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("workbench.serving.supervisor", timeout)
            time.sleep(0.02)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it said until its end, which is a line or two. Raises: subprocess.TimeoutExpired."""
        self.wait(timeout or 1e9)
        with self.stdout:
            return self.stdout.read(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def owned(environment: Mapping[str, str]) -> Iterator[None]:
    """A fork server for this process and those that it starts; what it imports is imported in the
    background.
    environment: of a CPU server.

    Inside another one's nothing is started: that one serves.
    """
    if os.environ.get(VARIABLE):
        yield
        return
    process = _start(environment)
    try:
        yield
    finally:
        _stop(process)


def keep(command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> Kept | None:
    """Fork a supervisor; None where there is no fork server that could.

    command: of ``python -m workbench.serving.supervisor``.
    environment: what it is to have beside this process's. SGLang reads much of it while it is
        imported, so a fork server that was started with other values refuses.
    """
    if not (name := os.environ.get(VARIABLE)):
        return None
    connection, (stdin, control), (answers, stdout) = (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET),
        os.pipe(),
        os.pipe(),
    )
    asked = {
        "command": list(command),
        "environment": {**os.environ, **environment},
        "names": list(environment),
        "cwd": str(cwd),
    }
    try:
        connection.connect("\0" + name)
        socket.send_fds(connection, [json.dumps(asked).encode()], [stdin, stdout])
        if said := connection.recv(_MESSAGE):  # as soon as it has imported SGLang
            return Kept(json.loads(said)["pid"], connection, control, answers)
    except OSError:
        pass  # it has ended
    finally:
        os.close(stdin)
        os.close(stdout)
    os.close(control)
    os.close(answers)
    connection.close()
    return None


def _start(environment: Mapping[str, str]) -> subprocess.Popen:
    name = f"draft-tp-nursery-{os.getpid()}-{os.urandom(6).hex()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench.serving.forkserver", name, " " * _ROOM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **environment, **supervisor.KEEPS_MARKER, supervisor.MARKER: _NAMELESS},
    )
    process.stdout.readline()  # it listens
    os.environ[VARIABLE] = name
    return process


def _stop(process: subprocess.Popen) -> None:
    os.environ.pop(VARIABLE, None)
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def main() -> None:
    """``python -m workbench.serving.forkserver NAME ROOM``: forks a supervisor for whoever of this
    user asks, until standard input ends.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind("\0" + sys.argv[1])
        listening.listen(64)
        print(flush=True)
        for name in _IMPORTS:
            import_module(name)
        # It notes at its first use where the command line lies, which it could not find in a fork
        # that shows another.
        import_module("setproctitle").getproctitle()
        _appear([sys.executable, "-m", "workbench.serving.forkserver", sys.argv[1]])
        gc.collect()
        gc.freeze()  # what every fork shares is not touched by its collector
        _serve(listening)


def _serve(listening: socket.socket) -> None:
    asking: dict[int, socket.socket] = {}  # by supervisor
    while True:
        readable, _, _ = select.select([sys.stdin, listening], [], [], 0.05)
        if sys.stdin in readable and not os.read(0, 1):
            return
        if listening in readable:
            connection, _ = listening.accept()
            said, descriptors, *_ = (
                socket.recv_fds(connection, _MESSAGE, 2) if _same_user(connection) else (b"", [])
            )
            if said and _imported_for(asked := json.loads(said)):
                pid = os.fork()
                if not pid:
                    _end_with(lambda: _keeper(asked, *descriptors))
                asking[pid] = connection
                connection.send(json.dumps({"pid": pid}).encode())
            else:
                connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
        while asking and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with suppress(OSError), asking.pop(ended[0]) as connection:
                connection.send(
                    json.dumps({"status": os.waitstatus_to_exitcode(ended[1])}).encode()
                )


def _imported_for(asked: Mapping[str, Any]) -> bool:
    """Whether SGLang was imported here under the values that are asked for."""
    named = {
        name
        for name in {
            *asked["names"],
            *(name for name in {*os.environ, *asked["environment"]} if name.startswith("SGLANG_")),
        }
        if name not in _OF_ONE_SERVER and not name.startswith(_OF_A_GROUP)
    }
    return all(os.environ.get(name) == asked["environment"].get(name) for name in named)


def _same_user(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return user == os.getuid()


def _keeper(asked: Mapping[str, Any], stdin: int, stdout: int) -> int:
    """Be the supervisor that was asked for; returns its exit status."""
    os.setsid()
    ctypes.CDLL(None).prctl(supervisor.PR_SET_PDEATHSIG, signal.SIGTERM)
    _streams(stdin, stdout, os.open(os.devnull, os.O_WRONLY))
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(
        {key: value for key, value in asked["environment"].items() if key != VARIABLE}
    )
    _appear(asked["command"])
    return supervisor.main(asked["command"][3:], _fork)


@dataclass
class _Forked:
    """A server's launcher, with what a supervisor wants of ``subprocess.Popen``."""

    pid: int
    status: int | None = None

    def poll(self) -> int | None:
        if self.status is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.status = os.waitstatus_to_exitcode(ended[1])
        return self.status


def _fork(
    command: Sequence[str], server: str, output: int, before: Callable[[], Any]
) -> _Forked | subprocess.Popen:
    """Start a command that imports SGLang as ``supervisor.popen`` does, without its imports."""
    if command[1] != "-m" or command[2] not in _FORKED or len(server) != len(_NAMELESS):
        return supervisor.popen(command, server, output, before)
    pid = os.fork()
    if pid:
        return _Forked(pid)

    def run() -> int:
        os.setsid()
        before()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        _streams(os.open(os.devnull, os.O_RDONLY), output, output)
        os.environ.update({**supervisor.KEEPS_MARKER, supervisor.MARKER: server})
        _appear(command, server)
        random.seed()  # else every server draws the same ports
        sys.argv = list(command[2:])
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        return 0

    _end_with(run)


def _end_with(run: Callable[[], int]) -> NoReturn:
    """Run a forked process to its end, never back into what it was forked from."""
    status = 1
    try:
        status = run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(
            end.code, int
        ):  # a sentence, which Python itself would print
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _streams(*descriptors: int) -> None:
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False),
        open(1, "w", buffering=1, closefd=False),
        open(2, "w", buffering=1, closefd=False),
    )


def _appear(command: Sequence[str], server: str = "") -> None:
    """Show this process's own command line and server to whoever looks at /proc, which tells those
    that the fork server was started with.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, end, environment, environment_end = map(
        int, fields[45:49]
    )  # proc(5): arg_start, arg_end, env_start, env_end
    words = b"\0".join(word.encode() for word in command)[: end - arguments - 1]
    ctypes.memmove(arguments, words.ljust(end - arguments, b"\0"), end - arguments)
    if server:
        mark = f"{supervisor.MARKER}={_NAMELESS}".encode()
        place = ctypes.string_at(environment, environment_end - environment).index(mark)
        ctypes.memmove(environment + place, f"{supervisor.MARKER}={server}".encode(), len(mark))


if __name__ == "__main__":
    _end_with(lambda: main() or 0)  # Python's own end takes seconds over so many modules
