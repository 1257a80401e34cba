"""Whom a wait in a collective is charged to: the rank that came last, and what it did that kept it.

Two ranks leave a collective together. Where one of them comes later to the next, it did more in
between: its gaps or kernels there are longer than the waiting rank's. The wait is charged to these
by their excess. Durations alone are compared, so the clocks of two traces need not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from workbench.answers.torch_trace import CLASSES, STAGES, Trace
from workbench.experiment.errors import BadInput

HOST, DEVICE, UNKNOWN = "host gap", "device gap", "unknown"
CAUSES = (*CLASSES[:3], HOST, DEVICE)  # in the order of a moment's numbers
# Of one trace: the points between moments (microseconds), and the index into CAUSES of what each
# moment between two points is spent on; -1 for a collective.
Moments = Callable[[Trace], tuple[np.ndarray, np.ndarray]]


def collectives(trace: Trace, peers: Sequence[Trace]) -> list[np.ndarray]:
    """Where each rank's collectives are among its work, the trace's own first.

    Raises: BadInput when the ranks' traces hold different collectives.
    """
    number = CLASSES.index("collective")
    found = [np.flatnonzero(rank.kind == number) for rank in (trace, *peers)]
    if any(
        len(those) != len(found[0]) or (peer.stage[those] != trace.stage[found[0]]).any()
        for peer, those in zip(peers, found[1:])
    ):
        raise BadInput(
            "trace",
            "of one rank holds other collectives than another's",
            "give the traces of one run, one file a rank",
        )
    return found


def charged(trace: Trace, peers: Sequence[Trace], moments: Moments) -> dict[str, dict[str, float]]:
    """{stage: {"rank R: cause": seconds that this trace's rank waited for it there}}, of all waits,
    hidden or not. Ranks are numbered in the order given, this trace's 0.

    What the trace does not show (before its first collective) has the cause ``UNKNOWN``.
    Raises: BadInput as ``collectives``.
    """
    ranks, found = (trace, *peers), collectives(trace, peers)
    took = np.array([rank.end[own] - rank.begin[own] for rank, own in zip(ranks, found)])
    if not took.size:
        return {}
    last, waited = took.argmin(axis=0), took[0] - took.min(axis=0)
    spent = np.array([_between(rank, own, moments) for rank, own in zip(ranks, found)])
    told: dict[str, dict[str, float]] = {}
    for k in np.flatnonzero(waited > 0):
        excess = np.clip(spent[last[k], :, k] - spent[0, :, k], 0, None)
        shares = (
            {name: float(part) for name, part in zip(CAUSES, excess / excess.sum()) if part}
            if excess.sum() > 0
            else {UNKNOWN: 1.0}
        )
        of_stage = told.setdefault(STAGES[trace.stage[found[0][k]]], {})
        for cause, share in shares.items():
            name = f"rank {last[k]}: {cause}"
            of_stage[name] = of_stage.get(name, 0.0) + share * float(waited[k]) / 1e6
    return told


def cause(charge: str) -> str:
    """The cause in a charge ("rank 1: host gap")."""
    return charge.split(": ", 1)[1]


def _between(rank: Trace, own: np.ndarray, moments: Moments) -> np.ndarray:
    """Microseconds by cause (rows) that the rank spent before each of its collectives (columns),
    since the one before it; nothing before the first.
    """
    points, spent_on = moments(rank)
    since = np.concatenate([rank.begin[own[:1]], rank.end[own[:-1]]])
    until = np.maximum(rank.begin[own], since)
    rows = []
    for number in range(len(CAUSES)):
        lengths = np.where(spent_on == number, np.diff(points), 0.0)
        so_far = np.concatenate([[0.0], lengths.cumsum()])
        rows.append(np.interp(until, points, so_far) - np.interp(since, points, so_far))
    return np.array(rows)
