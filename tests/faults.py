"""Plant a fault in a run that goes on as a person started it, and see what became of its processes,
its port, its log and its words.

``FAULTS=fixtures/faults.json make test ARGS=tests/engine/test_faults.py`` measures; ``make
docs`` makes the table in docs/faults.md from it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from workbench.experiment import profile, runlog
from workbench.experiment.profile_sections import ROOT
from workbench.experiment.runlog import Block, Failure, Line, Start
from workbench.run import provenance
from workbench.serving import forkserver, supervisor

MARKER = "DRAFT_TP_FAULT_TEST"
# One short experiment of plain servers: twice 2 blocks of one request after 2 warm-ups, and for
# measure 4 single answers that are compared.
SHORT = (
    "workload.requests_per_block=1",
    "starts=1",
    "pairs=1",
    "blocks_per_start=2",
    "parity_prompts=1",
    "arms=[none]",
    "at_once=1",
)
BLOCKS = {"measure": 10, "replay": 6}
VICTIMS: dict[str, Callable[[list[str]], bool]] = {
    "kernel": lambda words: "ipykernel_launcher" in words,
    "keeper": (
        lambda words: "workbench.serving.supervisor" in words and "sglang.launch_server" in words
    ),
    "keeper of the machine's measurement": (
        lambda words: (
            "workbench.serving.supervisor" in words and "workbench.engine.machine_bench" in words
        )
    ),
    "launcher": (
        lambda words: (
            "sglang.launch_server" in words and "workbench.serving.supervisor" not in words
        )
    ),  # it is the tokenizer and HTTP process too
    "nursery": lambda words: "workbench.serving.forkserver" in words,
    "detokenizer": lambda words: words[0].startswith("sglang::detokenizer"),
    "replay": lambda words: "workbench.cli" in words,
    "rank 0": lambda words: words[0].startswith("sglang::scheduler") and "TP1" not in words[0],
    "rank 1": lambda words: words[0].startswith("sglang::scheduler_TP1"),
}


@dataclass(frozen=True)
class Fault:
    """A fault in a phase of a run: the signal that a process gets, or what the name says.

    status, words: what the command ends with, a regular expression.
    happens: the same in words, for docs/faults.md.
    """

    victim: str
    phase: str
    status: int
    words: str
    happens: str = ""
    command: str = "measure"
    tp: int = 1
    number: int = signal.SIGKILL

    @property
    def name(self) -> str:
        verb = (
            {signal.SIGKILL: "kill -9 of the ", signal.SIGSTOP: "SIGSTOP of the "}.get(
                self.number, ""
            )
            if self.victim in VICTIMS
            else ""
        )
        return f"{verb}{self.victim} in {self.phase}".replace("the rank", "rank")


@dataclass
class Run:
    """A command of the workbench under watch. seen: every process that was ever found to belong to
    it.
    """

    folder: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    addresses: set[str] = field(default_factory=set)
    at: float | None = None
    kept: int = 0  # blocks in the log when it was struck
    # Whether the run imports SGLang for itself, as a person's does, rather than be served by the
    # fork server of the tests (workbench/serving/forkserver.py).
    imports: bool = False

    def __enter__(self) -> Run:
        self.mark, self.out = uuid.uuid4().hex, self.folder.with_suffix(".said")
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not (self.imports and key == forkserver.VARIABLE)
        }
        command = [
            sys.executable,
            "-m",
            "workbench.cli",
            *self.arguments,
            "--out",
            str(self.folder),
        ]
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=inherited | {**self.environment, MARKER: self.mark},
            )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.mine():  # a test that fails leaves nothing either
            process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        return self.out.read_text()

    @property
    def records(self) -> list[Line]:
        return runlog.read(self.folder / "runs.jsonl")

    def blocks(self, *roles: str) -> list[Block]:
        return [r for r in self.records if isinstance(r, Block) and (not roles or r.role in roles)]

    @property
    def failures(self) -> list[Failure]:
        return [r for r in self.records if isinstance(r, Failure)]

    def mine(self) -> list[psutil.Process]:
        """The live processes of the run: those marked, supervisors whose log is in its folder,
        those that descend from them, and those that once did.

        What a fork server forked shows the environment that this one was started with, so the mark
        is not on it, and descends from it.
        """
        mark, parents = f"{MARKER}={self.mark}".encode(), {}
        for pid in psutil.pids():  # read once a look: psutil's own children() reads all for each
            place = Path(f"/proc/{pid}")
            try:
                parents[pid] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                words = (place / "cmdline").read_bytes().split(b"\0")
                supervises = b"workbench.serving.supervisor" in words
                if supervises:
                    _, log, address, *_ = words[words.index(b"workbench.serving.supervisor") + 1 :]
                    if Path(log.decode()).is_relative_to(self.folder.resolve()):
                        self.addresses.add(address.decode())
                        self._see(pid)
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    self._see(pid)
            except (OSError, ValueError):
                continue
        found = len(self.seen) - 1
        while found < (found := len(self.seen)):
            for pid, parent in parents.items():
                if parent in self.seen and pid not in self.seen and _alive(self.seen[parent]):
                    self._see(pid)
        return [process for process in self.seen.values() if _alive(process)]

    def _see(self, pid: int) -> None:
        if pid not in self.seen and (process := _process(pid)):
            self.seen[pid] = process

    def victim(self, name: str) -> psutil.Process | None:
        for process in self.mine():
            try:
                if (words := process.cmdline()) and VICTIMS[name](words):
                    return process
            except psutil.Error:
                continue
        return None

    def reached(self, phase: str) -> bool:
        """start: a server is being started; warmup: it is up; block: a block that counts is in the
        log; stop: all blocks are.
        """
        if phase == "start":
            return True
        if phase == "warmup":
            return any(isinstance(r, Start) for r in self.records)
        return (
            len(self.blocks("measure")) >= 1
            if phase == "block"
            else len(self.blocks()) >= BLOCKS[self.arguments[0]]
        )

    def until(self, holds: Callable[[], object], within_s: float = 120, each_s: float = 0.1):
        end = time.monotonic() + within_s
        while not (found := holds()):
            assert time.monotonic() < end and self.process.poll() is None, (
                f"this did not come in {within_s:g} s:\n{self.said[-3000:]}"
            )
            time.sleep(each_s)
        return found

    def strike(self, fault: Fault) -> None:
        """Send a process its signal as soon as it is there and the phase is reached; where it is
        the command itself, once a server starts.
        """
        self.until(lambda: self.victim("launcher" if fault.victim == "replay" else fault.victim))
        if (
            fault.phase == "stop"
            # a server is gone within a second of its last block, and it takes a tenth to look for a
            # process
        ):
            self.until(lambda: len(self.blocks()) >= BLOCKS[self.arguments[0]] - 1)
            victim = self.until(lambda: self.victim(fault.victim))
            self.until(lambda: self.reached("stop"), each_s=0.005)
        else:
            self.until(lambda: self.reached(fault.phase))
            victim = self.until(lambda: self.victim(fault.victim))
        victim.send_signal(fault.number)
        self.struck()

    def struck(self) -> None:
        self.at, self.kept = time.monotonic(), len(self.blocks())

    def ended(self, within_s: float = 90) -> Ended:
        """Wait until the command and then every process of the run has ended."""
        end, looked = time.monotonic() + within_s, 0.0
        while self.process.poll() is None and time.monotonic() < end:
            if time.monotonic() - looked > 0.3:  # each look reads all of /proc
                self.mine()
                looked = time.monotonic()
            time.sleep(0.02)
        told = time.monotonic()
        while (left := self.mine()) and time.monotonic() < end:
            time.sleep(0.05)
        gone, at = time.monotonic(), self.at or told
        ports = [
            (host, int(port))
            for host, _, port in (address.rpartition(":") for address in self.addresses)
            if host
        ]
        return Ended(
            self.process.poll(),
            round(told - at, 1),
            round(gone - at, 1),
            [" ".join(p.cmdline())[:80] for p in left],
            [port for host, port in ports if not supervisor.port_is_free(port, host)],
        )


@dataclass(frozen=True)
class Ended:
    """How a run ended. told_s, gone_s: seconds from the fault to the end of the command, and of the
    last process of the run.
    """

    status: int | None
    told_s: float
    gone_s: float
    left: list[str]
    ports_taken: list[int]


def measured(fault: Fault, run: Run, ended: Ended) -> dict[str, Any]:
    """What became of one fault. kept: blocks in the log at the fault, all of which it holds
    afterwards (the tests see to that).
    """
    return {
        "fault": fault.name,
        "happens": fault.happens,
        "status": ended.status,
        "told_s": ended.told_s,
        "gone_s": ended.gone_s,
        "kept": run.kept,
        "of": BLOCKS[fault.command],
    }


def document(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The measurements with where they come from."""
    facts = provenance.collect(profile.load("cpu-tiny"))
    return {
        "about": (
            "Measured by tests/engine/test_faults.py on servers of the CPU engine, two runs at a"
            " time."
        ),
        **{key: facts[key] for key in ("time", "machine", "workbench_sources")},
        "sglang": facts["versions"].get("sglang"),
        "faults": list(told),
    }


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
