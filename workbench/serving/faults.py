"""Why a server failed: decided once, where its log or its answer is read, then a type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from workbench.serving.server_log import STAMP, clean

OURS = "draft-tp: "  # begins a sentence by which the engine ends its process
_TRACEBACK = "Traceback (most recent call last):"
# Helper threads trace harmless failures (a warm-up call before the port is open); what ends a rank
# says so (managers/scheduler.py:6372 logger.error).
_ENDS_A_RANK = f"hit an exception: {_TRACEBACK}"
_CHAINED = re.compile(r"exception was the direct cause of|another exception occurred:$")
# Posted to a port that is not open yet where the warm-up is skipped; SGLang goes on
# (entrypoints/http_server.py:2569 freeze_gc).
_HARMLESS = "post-warmup freeze_gc failed"
# Refusals of the engine arrive as an exception of a rank: their sentence is what a person needs.
_REFUSALS = ("workbench.engine.hooks.Refused: ", "workbench.engine.agreement.RanksDisagreed: ")
_DISAGREED = re.compile(r"ranks \[(?P<ranks>[\d, ]+)\] drafted another tree than rank 0")


class Cause(Enum):
    """What a failure is of, as far as it is told apart."""

    DISAGREED = "the ranks drafted different trees"
    OUT_OF_MEMORY = "a device had no memory left"
    OTHER = "anything else"


@dataclass(frozen=True)
class Fault:
    """One failure of a server.

    text: the sentence of ours that it ended by, or the end of its traceback; the rank first where
        it is known.
    ranks: those that drafted another tree than rank 0.
    """

    cause: Cause
    text: str
    ranks: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        """What it came to: its last line."""
        return self.text.splitlines()[-1] if self.text else ""


def told_by(text: str) -> Fault:
    """The fault that a text tells, a log's end or the error of an answer."""
    if disagreed := _DISAGREED.search(text):
        ranks = tuple(int(rank) for rank in disagreed["ranks"].split(","))
        return Fault(Cause.DISAGREED, text, ranks)
    fault = Fault(Cause.OTHER, text)
    if "out of memory" in fault.sentence.lower():
        return Fault(Cause.OUT_OF_MEMORY, text)
    return fault


def first(log: Path) -> Fault | None:
    """The first sentence of ours ("draft-tp: ...") in a server's log, else the first traceback that
    ended a rank, else the first of any; None without.
    """
    if not log.exists():
        return None
    lines = log.read_text(errors="replace").splitlines()
    ours = next((line for line in lines if line.startswith(OURS)), None)
    if ours:
        return told_by(ours.removeprefix(OURS))
    begin = next(
        (
            i
            for words in (_ENDS_A_RANK, _TRACEBACK)
            for i, line in enumerate(lines)
            if words in line and not _passed_over(lines[:i])
        ),
        None,
    )
    text = "" if begin is None else _traced(lines, begin)
    return told_by(text) if text else None


def port_was_taken(log: Path) -> bool:
    """Whether a server's log says that another process held its port."""
    return "address already in use" in log.read_text(errors="replace")


def _traced(lines: Sequence[str], begin: int) -> str:
    """The end of the traceback that begins in this line, or the refusal that it is of."""
    stamp = STAMP.match(lines[begin])
    rank = f"{stamp['rank']}: " if stamp and stamp["rank"] else ""
    end = begin + 1
    while end < len(lines) and (lines[end].startswith((" ", "\t")) or not lines[end]):
        end += 1
    traced = [clean(line) for line in lines[begin + 1 : end + 1] if line.strip()]
    if traced and traced[-1].startswith(_REFUSALS):
        return rank + traced[-1].split(": ", 1)[1]
    return rank + "\n".join(traced[-12:])


def _passed_over(before: Sequence[str]) -> bool:
    """Whether the traceback under these lines is of a failure that its server passed over, or
    belongs to the one above it.
    """
    above = next((line for line in reversed(before) if line.strip()), "")
    return above.endswith(_HARMLESS) or bool(_CHAINED.search(above))
