"""Faults planted in runs of real servers: nothing is left behind, nothing finished is lost, and
what is said can be acted on.

Every kind of process is killed, and every phase of a run is struck, at least once; the rest of the
matrix, and a hundred starts, by -m long. Two runs go on at a time. With FAULTS=FILE in the
environment the measurements are written there, and ``make docs`` makes docs/faults.md from them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from faults import BLOCKS, SHORT, VICTIMS, Ended, Fault, Run, document, measured

from workbench.experiment import profile, runlog
from workbench.experiment.arms import Arm
from workbench.experiment.runlog import Block, Start
from workbench.serving import faults, launch_command, server, supervisor

pytestmark = pytest.mark.engine
OTHERS = (
    "01_probe",
    "02_budget",
    "04_draft_tp",
    "05_steps",
    "06_collectives",
    "07_cycle",
    "08_report",
)
ENDED = "the server (ended|died|does not answer)"
KILLS = [
    Fault(
        "rank 1",
        "start",
        1,
        "the server died while starting",
        "the start fails with its reason",
        tp=2,
    ),
    Fault(
        "replay", "start", -signal.SIGKILL, "", "kernel and server end with it", command="replay"
    ),
    Fault(
        "keeper",
        "warmup",
        1,
        "supervisor .* was ended",
        "the server ends with it, and the block is a failure",
    ),
    Fault(
        "nursery",
        "block",
        1,
        "supervisor .* was ended|" + ENDED,
        "the servers forked from it end with it, and the block is a failure",
    ),
    Fault("detokenizer", "warmup", 1, ENDED, "the server ends, and the block is a failure"),
    Fault("rank 0", "block", 1, ENDED, "the server ends, and the block is a failure", tp=2),
    Fault(
        "kernel",
        "block",
        1,
        "its kernel was ended; what it had measured is kept, and --resume goes on",
        "its server ends, the notebook has failed, `--resume` goes on",
        command="replay",
    ),
    Fault("launcher", "stop", 3, "", "nothing: all was measured"),
]
# A run that loses its fork server, or that is to take it along, has one of its own.
OWNERS = ("nursery", "replay")
STATUS = {"replay": -signal.SIGKILL, "kernel": 1}
# Killed before it has forked a server, a fork server is done without.
SPARED = [
    Fault("nursery", "start", 3, "", "servers are started without it"),
    Fault(
        "keeper of the machine's measurement",
        "start",
        3,
        "there will be no prediction: the machine could not be measured",
        "the blocks are measured, and that there is no prediction is said",
    ),
]
REST = SPARED + [
    Fault(
        victim,
        phase,
        STATUS.get(victim, 3 if phase == "stop" else 1),
        "" if phase == "stop" or victim == "replay" else "ended|died|does not answer",
        command="replay" if victim in ("kernel", "replay") else "measure",
        tp=2 if victim == "rank 1" else 1,
    )
    for victim in VICTIMS
    for phase in ("start", "warmup", "block", "stop")
    if (victim, phase) not in {(fault.victim, fault.phase) for fault in [*KILLS, *SPARED]}
    and "machine" not in victim
]
HANG = Fault(
    "rank 1",
    "block",
    1,
    # Where it comes between two blocks, the server is asked for its counts.
    "hung: no (token for 6 s in request .*|answer to /server_info for 30 s) while the server was",
    "hung, since no token came for 6 s: the stacks of all ranks are kept, the server ends",
    tp=2,
    number=signal.SIGSTOP,
)
DISK = Fault(
    "full disk",
    "block",
    1,
    "runs.jsonl cannot be written \\(No space left on device\\): free space and use --resume",
    "the run ends and says so; run again with room it finishes",
)
PORT = Fault(
    "port taken",
    "start",
    1,
    "port \\d+ was taken by another process: start again, or name a free one",
    "the start fails and names the port",
)


CLOCK = Fault(
    "clock set back an hour",
    "block",
    3,
    "",
    "nothing: durations and deadlines are read from a clock that nobody sets",
)


def arguments(fault: Fault) -> tuple[str, ...]:
    # SGLang itself takes six seconds from a rank's death to its own end: that is no hang.
    hangs = fault.number == signal.SIGSTOP
    patience = [f"token_within_s={6 if hangs else 60}"]
    if hangs:  # in long blocks, so that it comes while tokens are awaited and not between two
        patience.append("workload.requests_per_block=6")
    changes = [word for change in (*SHORT, f"tp={fault.tp}", *patience) for word in ("-p", change)]
    return (
        fault.command,
        "cpu-tiny",
        *changes,
        *(word for name in OTHERS if fault.command == "replay" for word in ("--skip", name)),
    )


def killed(fault: Fault, folder: Path) -> tuple[Run, Ended]:
    # A machine is measured once: where that is struck, a setting that no NCCL knows makes it
    # another one (workbench/predict/machine.py, name_of).
    another = {"NCCL_FAULT_TEST": folder.parent.name} if "machine" in fault.victim else {}
    with Run(folder, arguments(fault), another, imports=fault.victim in OWNERS) as run:
        run.strike(fault)
        return run, run.ended()


def out_of_room(fault: Fault, folder: Path) -> tuple[Run, Ended]:
    """The run's folder is a tmpfs of its own where mounting is allowed, else a limit on the size of
    any file stands for a full disk.
    """
    folder.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], capture_output=True
        ).returncode
        == 0
    )
    try:
        with Run(folder, arguments(fault)) as run:
            run.until(lambda: run.reached("block"))
            if mounted:
                with open(folder / "filler", "wb", buffering=0) as filler:
                    try:
                        while filler.write(b"\0" * 4096):
                            pass
                    except OSError:
                        pass
            else:
                psutil.Process(run.process.pid).rlimit(
                    psutil.RLIMIT_FSIZE, (folder / "runs.jsonl").stat().st_size + 100
                )
            run.struck()
            ended = run.ended()
        (folder / "filler").unlink(missing_ok=True)
        before = run.records
        with Run(folder, arguments(fault)) as again:
            run.resumed = again.ended(150)
        run.after = runlog.read(folder / "runs.jsonl")
        assert run.after[: len(before)] == before
        return run, ended
    finally:
        if mounted:
            kept = folder.with_name(folder.name + "-kept")
            shutil.copytree(folder, kept)
            subprocess.run(["umount", "-l", folder], check=True)
            shutil.copytree(kept, folder, dirs_exist_ok=True)


class Stray(BaseHTTPRequestHandler):
    """A server of somebody else, which answers completions as SGLang does."""

    def do_POST(self) -> None:
        body = (
            b'data: {"output_ids": [1], "meta_info": {"completion_tokens": 1, "finish_reason":'
            b' {"type": "length"}}}\n\n'
        )
        self._answer(body, "text/event-stream")

    def do_GET(self) -> None:
        self._answer(b'{"internal_states": [{}]}', "application/json")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def port_taken(fault: Fault, folder: Path) -> tuple[Run, Ended]:
    """Between the choice of a port and SGLang's bind somebody else listens on it, who takes
    connections and never answers.
    """
    with Run(folder, arguments(fault)) as run, socket.socket() as thief:
        run.until(lambda: run.victim("keeper") and run.addresses)
        thief.bind(("127.0.0.1", int(next(iter(run.addresses)).rpartition(":")[2])))
        thief.listen()
        run.until(
            lambda: (
                "already in use" in "".join(path.read_text() for path in folder.glob("logs/*.log"))
                or run.process.poll() is not None
            )
        )
        run.struck()
        ended = run.ended()
        thief.close()
        return run, Ended(ended.status, ended.told_s, ended.gone_s, ended.left, [])


def clock_set_back(fault: Fault, folder: Path) -> tuple[Run, Ended]:
    """An hour, for the command, the keeper and every process of SGLang: a sitecustomize adds what a
    file says to time.time().
    """
    place = folder.with_name(folder.name + "-clock")
    place.mkdir()
    (place / "sitecustomize.py").write_text(f"""
import time
read = time.time
def told():
    with open({str(place / "offset")!r}) as file:
        return read() + float(file.read() or 0)
time.time = told
""")
    (place / "offset").write_text("0")
    with Run(folder, arguments(fault), {"PYTHONPATH": str(place)}, imports=True) as run:
        run.until(lambda: run.reached("block"))
        (place / "offset").write_text("-3600")
        run.struck()
        return run, run.ended()


PLANTED = {
    **{fault: killed for fault in [*KILLS, *REST, HANG]},
    DISK: out_of_room,
    PORT: port_taken,
    CLOCK: clock_set_back,
}


@pytest.fixture(scope="module")
def happened(request, tmp_path_factory):
    """What became of each fault that a chosen test asks for: planted two at a time."""
    wanted = [
        item.callspec.params["fault"]
        for item in request.session.items
        if item.module is request.module
        and "fault" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    with ThreadPoolExecutor(2) as pool:
        found: dict[Fault, Future] = {
            fault: pool.submit(
                PLANTED[fault],
                fault,
                tmp_path_factory.mktemp("faults") / fault.name.replace(" ", "-"),
            )
            for fault in wanted
        }
        yield lambda fault: found[fault].result()
    told = [
        measured(fault, *future.result())
        for fault, future in found.items()
        if not future.exception()
    ]
    for path in (tmp_path_factory.getbasetemp() / "faults.json", os.environ.get("FAULTS")):
        if path:
            Path(path).write_text(json.dumps(document(told), indent=1) + "\n")


def nothing_left_and_nothing_lost(fault: Fault, run: Run, ended: Ended) -> None:
    assert ended.left == [] and ended.ports_taken == []
    assert ended.status == fault.status, run.said[-3000:]
    blocks = [r for r in runlog.read(run.folder / "runs.jsonl") if isinstance(r, Block)]
    assert [b.block for b in blocks] == list(range(len(blocks))) and len(blocks) >= run.kept
    assert fault.words == "" or re.search(fault.words, run.said), run.said[-3000:]
    assert "Traceback" not in run.said, run.said[-3000:]


@pytest.mark.parametrize("fault", KILLS, ids=lambda fault: fault.name)
def test_kill_9(fault, happened):
    run, ended = happened(fault)
    nothing_left_and_nothing_lost(fault, run, ended)
    assert ended.gone_s < 40
    assert fault.phase != "stop" or len(run.blocks()) == BLOCKS[fault.command]


@pytest.mark.long
@pytest.mark.parametrize("fault", REST, ids=lambda fault: fault.name)
def test_kill_9_of_any_process_in_any_phase(fault, happened):
    run, ended = happened(fault)
    nothing_left_and_nothing_lost(fault, run, ended)


@pytest.mark.parametrize("fault", [HANG], ids=lambda fault: fault.name)
def test_a_rank_that_stands_still_is_a_hang_and_the_stacks_of_all_ranks_are_kept(fault, happened):
    run, ended = happened(fault)
    nothing_left_and_nothing_lost(fault, run, ended)
    assert [f.what for f in run.failures] == ["hung"] and ".stacks.txt" in run.failures[0].reason
    text = next(run.folder.glob("logs/*.stacks.txt")).read_text()
    for rank in (0, 1):
        [stack] = [
            part
            for part in text.split("=== ")[1:]
            if f"sglang::scheduler_TP{rank}" in part.splitlines()[0]
        ]
        assert "event_loop" in stack and ("(stopped)" in stack) == (rank == 1), stack


@pytest.mark.parametrize("fault", [DISK], ids=lambda fault: fault.name)
def test_a_full_disk_keeps_what_was_measured_and_the_run_goes_on_from_there(fault, happened):
    run, ended = happened(fault)
    assert run.resumed.status == 3 and run.resumed.left == []
    blocks = [r.block for r in run.after if isinstance(r, Block)]
    assert sorted(set(blocks)) == list(range(BLOCKS[fault.command]))
    assert len([r for r in run.after if isinstance(r, Start)]) == 2


@pytest.mark.parametrize("fault", [PORT], ids=lambda fault: fault.name)
def test_a_port_that_is_taken_between_its_choice_and_its_use_is_told(fault, happened):
    run, ended = happened(fault)
    assert (ended.status, ended.left) == (1, []) and ended.told_s < 40
    assert re.search(fault.words, run.said), run.said[-3000:]
    assert [f.what for f in run.failures] == ["start"] and run.blocks() == []


@pytest.mark.parametrize("fault", [CLOCK], ids=lambda fault: fault.name)
def test_a_clock_that_is_set_moves_no_duration_and_no_deadline(fault, happened):
    run, ended = happened(fault)
    nothing_left_and_nothing_lost(fault, run, ended)
    assert len(run.blocks()) == BLOCKS["measure"] and run.failures == []
    assert all(
        0 < block.seconds < 60 and all(0 <= r.sent < r.end < 60 for r in block.requests)
        for block in run.blocks()
    )


def test_a_stray_server_on_the_named_port_is_refused_before_anything_starts(tmp_path):
    with socket.socket() as stray:
        stray.bind(("127.0.0.1", 0))
        stray.listen()
        port = stray.getsockname()[1]
        flags = json.dumps(profile.load("cpu-tiny").server.flags | {"port": port})
        with Run(
            tmp_path / "run",
            ("measure", "cpu-tiny", "-p", "at_once=1", "-p", f"server.flags={flags}"),
        ) as run:
            ended = run.ended(60)
    assert (
        ended.status == 2
        and f"server.flags.port: {port} is in use" in run.said
        and run.said.count("\n") == 1
    )
    assert not (tmp_path / "run").exists()


def test_a_stray_server_that_answers_like_ours_is_never_measured(tmp_path, monkeypatch):
    """It came between the check and the start; what is launched here never listens."""
    stray = ThreadingHTTPServer(("127.0.0.1", 0), Stray)
    threading.Thread(target=stray.serve_forever, daemon=True).start()
    launch = launch_command.plan(
        profile.load("cpu-tiny"), Arm.parse("none"), port=stray.server_port, server="ours"
    )
    waits = launch_command.Part(launch.parts[0].node, ("sleep", "600"), {}, stray.server_port)
    monkeypatch.setattr(
        server,
        "plan",
        lambda *_, **__: launch_command.Launch("ours", stray.server_port, (waits,), launch.orders),
    )
    with pytest.raises(
        server.ServerFailed,
        match=f"another server answered on port {stray.server_port}: stop it, or free the port",
    ):
        with server.serve(profile.load("cpu-tiny"), Arm.parse("none"), tmp_path / "log"):
            pass
    assert (
        supervisor.processes("ours") == []
        and supervisor.account((tmp_path / "log").read_text())["port_free"] is False
    )
    stray.shutdown()
    stray.server_close()


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.long)])
def test_starts_and_stops_of_real_servers_leave_counts_as_they_were(times, tmp_path):
    tiny, seen, own = profile.load("cpu-tiny", {"tp": 1}), [], psutil.Process()
    for number in range(times):
        with server.serve(tiny, Arm.parse("none"), tmp_path / f"{number}.log") as up:
            name = up.launch.server
        told = supervisor.account((tmp_path / f"{number}.log").read_text())
        assert told["left"] == [] and told["port_free"] and supervisor.processes(name) == []
        seen.append(
            (
                len(own.children(recursive=True)),
                threading.active_count(),
                own.num_fds(),
                own.memory_info().rss >> 20,
            )
        )
    assert {s[:3] for s in seen[1:]} == {seen[1][:3]} and seen[-1][3] - seen[1][3] < 16, seen
    assert faults.first(tmp_path / f"{times - 1}.log") is None
