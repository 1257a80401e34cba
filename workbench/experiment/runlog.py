"""The run log: every measured fact is one line of runs.jsonl, append-only, synced once a block; the
raw log is the truth.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from workbench.experiment.errors import WorkbenchError
from workbench.experiment.names import load_of

SCHEMA = 1
FREE_WITHIN_S = 5  # a process that was ended a moment ago may still hold the log


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(Record):
    """One finished request. Times in seconds from the block's start; None is unknown, never 0 or 1.

    verify_ct: verify rounds.
    proposed, correct: draft tokens (without the bonus token).
    histogram: rounds by number of correct drafts. These are SGLang's meta_info spec_verify_ct,
        spec_num_proposed_drafts, spec_num_correct_drafts, spec_correct_drafts_histogram.
    """

    prompt: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    sent: float
    first: float | None = None
    end: float
    verify_ct: int | None = None
    proposed: int | None = None
    correct: int | None = None
    histogram: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] = ()


class NodeStart(Record):
    """How a further node's part of a server was started."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]


class Start(Record):
    """A server came up. attestation: the rank reports, what is active there
    (workbench/engine/attest.py).

    arms: every arm this server can serve (one, unless it holds several).
    seconds: from launch to the first token.
    command, environment: of the first node's part, which is the whole where there is one.
    further: those of the others.
    """

    kind: Literal["start"] = "start"
    start: int
    experiment: str
    arms: tuple[str, ...]
    time: str
    seconds: float
    command: tuple[str, ...]
    environment: dict[str, str]
    server: str
    attestation: tuple[dict[str, Any], ...]
    further: tuple[NodeStart, ...] = ()


class Block(Record):
    """A few requests on one arm, back to back.

    role: measure (counts for comparisons), warmup (never counts), parity (tokens are compared,
        times are not), search (says which settings are measured next, and never how much they
        differ), trace (run under SGLang's profiler: never counts).
    pair: number of the pair of blocks that share their prompts.
    position: place in the pair, from 0.
    server: identity the server itself reported after the block.
    arm_in_force: the arm it said it ran.
    attested: every rank said the arm's placement is active.
    seconds: first request sent to last one ended.
    rounds: cycles by stage.
    collectives: {stage: {kind: count}} of rank 0 during this block.
    stage_seconds: {stage: seconds spent} during this block in the rounds that were timed.
    stage_timed: how many these were (one of a few: engine/counting.py), every round of the stage
        where it is not said.
    load: the requests at once at which 05_steps compares; a log that lacks it says it by the name
        of the experiment.
    """

    kind: Literal["block"] = "block"
    block: int
    experiment: str
    role: Literal["measure", "warmup", "parity", "search", "trace"]
    arm: str
    start: int
    pair: int | None = None
    position: int = 0
    seed: int = 0
    concurrency: int = 1
    time: str
    seconds: float
    server: str
    arm_in_force: str | None = None
    attested: bool
    prompts_from: str = "heldout"
    requests: tuple[Request, ...]
    rounds: dict[str, int] = {}
    collectives: dict[str, dict[str, int]] = {}
    stage_seconds: dict[str, float] = {}
    stage_timed: dict[str, int] = {}
    load: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_load(cls, data: Any) -> Any:
        if isinstance(data, dict) and "load" not in data and "experiment" in data:
            return data | {"load": load_of(data["experiment"])}
        return data


class Failure(Record):
    """Something that was to be measured and was not: what, why, and the end of the server's log.

    what: among others "setting", of a sweep that goes on without it, and "stopped", by whoever ran
        it.
    """

    kind: Literal["failure"] = "failure"
    experiment: str
    arm: str
    time: str
    what: Literal["start", "block", "hung", "disagreed", "stopped", "setting"]
    reason: str
    log_tail: tuple[str, ...] = ()


NEGATIVE = "negative control"  # the experiment of its findings


class Finding(Record):
    """A named, computed answer of a notebook (e.g. the probe's), kept so that a report needs no
    notebook output. value: of plain types; workbench/experiment/findings.py makes and reads it.
    """

    kind: Literal["finding"] = "finding"
    experiment: str
    name: str
    time: str
    value: Any


Line = Annotated[Union[Start, Block, Failure, Finding], Field(discriminator="kind")]
_LINE: TypeAdapter[Line] = TypeAdapter(Line)


def parse(data: Any) -> Line:
    """A record from its plain data."""
    return _LINE.validate_python(data)


def now() -> str:
    """The time of a record: UTC, ISO 8601, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class RunLog:
    """Append-only runs.jsonl of one run, which one process writes at a time. A context manager; a
    torn last line is dropped on opening, nothing
    before it. added: what was appended through it."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.added: list[Line] = []

    def __enter__(self) -> RunLog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = open(self.path, "ab", buffering=0)
        except OSError as error:
            raise WorkbenchError(
                f"{self.path.name} cannot be written ({error.strerror}): give a writable folder"
                " with --out."
            ) from None
        self._lock()
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)
        return self

    def _lock(self) -> None:
        """Held until the file is closed, or its process ends."""
        end = time.monotonic() + FREE_WITHIN_S
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > end:
                    self._file.close()
                    raise WorkbenchError(
                        f"{self.path.parent.name} is being measured by another process: wait for"
                        " its end, or stop it."
                    ) from None
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, record: Line) -> None:
        """Write one record and sync it to the disk.

        Raises: WorkbenchError when the disk is full or gone; what was written before stays.
        """
        line, size = (
            record.model_dump_json().encode() + b"\n",
            os.fstat(self._file.fileno()).st_size,
        )
        try:
            while line:  # a disk that fills takes a part first, and refuses the rest
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
            self.added.append(record)
        except OSError as error:
            with suppress(OSError):  # no torn line stays before a later one
                os.ftruncate(self._file.fileno(), size)
            raise WorkbenchError(
                f"{self.path.name} cannot be written ({error.strerror}): free space and use"
                " --resume."
            ) from None


class Reader:
    """The records of a log that grows: each line is read and checked once.

    A log that was cut (a torn last line is dropped when it is opened again) is read anew.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._records: list[Line] = []
        self._read = 0  # bytes of whole lines

    def records(self) -> list[Line]:
        """All records so far, in order; a torn last line is left out.

        Raises: WorkbenchError naming the line when one before the last is damaged.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self._read:
            self._records, self._read = [], 0
        if size > self._read:
            with open(self.path, "rb") as file:
                file.seek(self._read)
                self._take(file.read())
        return list(self._records)

    def _take(self, content: bytes) -> None:
        for line in content.split(b"\n")[:-1]:
            try:
                self._records.append(_LINE.validate_json(line))
            except ValidationError:
                raise WorkbenchError(
                    f"{self.path.name}: line {len(self._records) + 1} is damaged; restore the file"
                    " or drop that line."
                ) from None
            self._read += len(line) + 1


def read(path: Path) -> list[Line]:
    """All records of a run log (``Reader.records``)."""
    return Reader(path).records()
