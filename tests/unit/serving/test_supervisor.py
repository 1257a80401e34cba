"""The keeper with a stand-in for a server: a tree of small processes that does whatever makes
SGLang's workers outlive their parents.

Real servers, and faults in every phase of a run: tests/engine/test_faults.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from workbench.experiment.profile_sections import ROOT, Node
from workbench.serving import launch_command, server, supervisor

# A server is found by its name, so that it is another's in each process of these tests, which go
# side by side.
NAME = f"stand-in-{os.getpid()}"
# A launcher with workers that rename themselves, leave the session, ignore SIGTERM, lose their
# parent and their environment, or stand still.
REST = "import time; time.sleep(600)     # a worker at rest"
WORKERS = {
    "renamed": "import setproctitle; setproctitle.setproctitle('sglang::scheduler_TP1')",
    "own session": "os.setsid()",
    "deaf": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT,"
        " signal.SIG_IGN)"
    ),
    "orphan": "os.fork() and os._exit(0); os.setsid()",
    "unmarked orphan": (
        "os.fork() and os._exit(0); os.setsid(); os.execve(sys.executable, [sys.executable, '-c',"
        " rest], {})"
    ),
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}
TREE = """
import os, signal, subprocess, sys, time
rest, *codes = sys.argv[1:]
for code in codes:
    head = "import os, signal, sys; rest = " + repr(rest) + "\\n"
    subprocess.Popen([sys.executable, "-c", head + code + "\\nexec(rest)"])
time.sleep(0.1)
print("up", flush=True)
time.sleep(600)
"""


def tree(folder: Path, name: str = NAME, without: str = "") -> tuple[subprocess.Popen, Path]:
    """A keeper over the stand-in, once all of it is there."""
    log, codes = (
        folder / "server.log",
        [code for worker, code in WORKERS.items() if worker != without],
    )
    kept_by = server._keep(
        name,
        launch_command.Part(
            Node(name="here"),
            (sys.executable, "-c", TREE, REST, *codes),
            {},
            launch_command.free_port(),
        ),
        log,
    )
    until(lambda: settled(kept_by.pid, len(codes)))
    return kept_by, log


def settled(pid: int, workers: int = len(WORKERS)) -> bool:
    """The launcher and each worker are there and have done to themselves what they do."""
    try:
        told = [(p.status(), [*p.cmdline(), ""], os.getsid(p.pid) == p.pid) for p in family(pid)]
    except (psutil.Error, OSError):
        return False
    states, words, leaders = zip(*told) if told else ((), (), ())
    return (
        len(told) == 1 + workers
        and states.count(psutil.STATUS_STOPPED) == 1
        and sum(line[-2:] == [REST, ""] for line in words) == 1
        and sum(line[0].startswith("sglang::") for line in words) == 1
        and sum(leaders) == 4
    )


def family(pid: int) -> list[psutil.Process]:
    return [
        p
        for p in psutil.Process(pid).children(recursive=True)
        if p.status() != psutil.STATUS_ZOMBIE
    ]


def until(holds, within_s: float = 30):
    end = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_every_process_ends_whatever_it_did_to_itself_and_the_account_is_in_the_log(tmp_path):
    kept_by, log = tree(tmp_path)
    there = family(kept_by.pid)
    assert len(supervisor.processes(NAME)) >= len(
        WORKERS
    )  # the renamed one too; the one without environment is not among them
    said, _ = kept_by.communicate(timeout=30)
    assert gone(there) and kept_by.returncode == 0
    told = supervisor.account(said)
    assert told == supervisor.account(log.read_text())
    assert (told["why"], told["status"], told["left"], told["port_free"]) == (
        "released",
        -signal.SIGTERM,
        [],
        True,
    )
    assert {p.pid for p in there} <= set(told["ended"]) and 0 < told["seconds"] < 20


def test_a_starter_that_is_killed_takes_its_server_along(tmp_path):
    """kill -9 of whoever holds the pipe, as of a notebook's kernel."""
    code = (
        "import sys, time; sys.path.insert(0, 'tests/unit/serving'); from pathlib import Path;"
        f" import test_supervisor as t; kept_by, _ = t.tree(Path({str(tmp_path)!r}));"
        " print(kept_by.pid, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    pid = int(starter.stdout.readline())
    there = [psutil.Process(pid), *family(pid)]
    starter.kill()
    starter.communicate()
    until(lambda: gone(there))
    assert supervisor.account((tmp_path / "server.log").read_text())["why"] == "released"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_keeper_that_is_told_to_end_ends_its_server_first(number, tmp_path):
    kept_by, _ = tree(tmp_path)
    there = family(kept_by.pid)
    kept_by.send_signal(number)
    said = kept_by.stdout.read()
    assert kept_by.wait(30) == 0 and gone(there) and supervisor.account(said)["why"] == "signalled"


def test_a_keeper_that_is_killed_takes_the_launcher_along_and_the_rest_is_ended_by_its_starter(
    tmp_path, caplog
):
    kept_by, log = tree(tmp_path)
    there, marked, launcher = (
        family(kept_by.pid),
        supervisor.processes(NAME),
        psutil.Process(kept_by.pid).children()[0],
    )
    kept_by.kill()
    kept_by.wait()
    until(lambda: gone([launcher]))
    server._release([kept_by], launch_command.Launch(NAME, 1, (), None))
    assert gone(marked) and supervisor.account(log.read_text()) is None
    assert "was ended before its server" in caplog.text
    for unmarked in set(there) - set(
        marked
    ):  # without its environment and without a keeper nobody knows whose it was
        if unmarked.is_running():
            unmarked.kill()


def test_a_server_that_dies_by_itself_is_told(tmp_path):
    kept_by = server._keep(
        NAME,
        launch_command.Part(Node(name="here"), (sys.executable, "-c", "raise SystemExit(7)"), {}),
        tmp_path / "log",
    )
    kept_by.wait(30)
    said = kept_by.stdout.read()
    assert {
        k: v for k, v in supervisor.account(said).items() if k in ("why", "status", "left")
    } == {"why": "died", "status": 7, "left": []}


def test_a_port_that_somebody_else_holds_is_told(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        kept_by = server._keep(
            NAME,
            launch_command.Part(Node(name="here"), (sys.executable, "-c", ""), {}, port),
            tmp_path / "log",
        )
        said, _ = kept_by.communicate(timeout=30)
    assert supervisor.account(said)["port_free"] is False


def test_a_full_disk_does_not_keep_a_keeper_from_its_work(tmp_path):
    kept_by = server._keep(
        NAME,
        launch_command.Part(
            Node(name="here"), (sys.executable, "-c", "import time; time.sleep(600)"), {}
        ),
        Path("/dev/full"),
    )
    until(lambda: supervisor.processes(NAME))
    said, _ = kept_by.communicate(timeout=30)
    assert supervisor.account(said)["left"] == [] and supervisor.processes(NAME) == []


def test_an_account_is_the_last_of_its_kind():
    lines = ["x", 'keeper: {"why": "died"}', 'keeper: {"why": "released"}', "y"]
    assert (
        supervisor.account("\n".join(lines))["why"] == "released"
        and supervisor.account("x") is None
    )
