"""How long the rest of a plan will take, by what the log says that starts and blocks of this run took."""
from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from workbench.plans import Task
from workbench.runlog import Block, Line, Start


def left_s(records: Sequence[Line], tasks: Sequence[Task], starts: int) -> float | None:
    """Seconds for the tasks that are left and so many server starts; None before the first block of the run.

    A block takes as long as those of its requests, tokens and concurrency did, else as its tokens did in all blocks.
    """
    blocks = [r for r in records if isinstance(r, Block)]
    tokens = sum(r.completion_tokens for b in blocks for r in b.requests)
    if not tokens:
        return None
    alike: dict[tuple, list[float]] = {}
    for b in blocks:
        alike.setdefault((len(b.requests), b.concurrency, b.role == "parity"), []).append(b.seconds)
    a_token, start = sum(b.seconds for b in blocks) / tokens, [r.seconds for r in records if isinstance(r, Start)]
    times = [mean(alike.get((len(t.planned.prompts), t.concurrency, t.planned.role == "parity"), [len(t.planned.prompts) * t.max_new_tokens * a_token]))
             for t in tasks]
    return sum(times) + starts * (mean(start) if start else 0.0)


def words(seconds: float | None) -> str:
    """Seconds in words, for a line of progress; "" where they are not known."""
    if seconds is None:
        return ""
    return f", about {max(5, 5 * round(seconds / 5))} s left" if seconds < 100 else f", about {seconds / 60:.0f} min left"
