"""What a profiled cycle's time went to: kernels by class, waits and gaps, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from workbench.answers.torch_trace import BETWEEN, CLASSES, CYCLE, STAGES, Trace
from workbench.engine import stages
from workbench.experiment.errors import BadInput


@dataclass(frozen=True)
class Part:
    """One stage's share of the trace, in seconds: seconds by class (nothing counted twice), and the
    gaps in front of its kernels.

    host_gap: the device had nothing to do because the host had not launched the next kernel.
    device_gap: it was launched and did not run yet.
    kernels: how many.
    collectives_s: collective kernels as they ran, hidden beside computation or not.
    """

    rounds: int
    kernels: int
    seconds: dict[str, float]
    collectives_s: float
    host_gap: float
    device_gap: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values()) + self.host_gap + self.device_gap

    def a_round(self, kind: str) -> float:
        """Seconds a round of one class."""
        return self.seconds.get(kind, 0.0) / self.rounds


def decompose(trace: Trace, peers: Sequence[Trace] = ()) -> dict[str, Part]:
    """{stage: its part}; the parts and ``BETWEEN`` (gaps between two stages) add up to the time
    from the first kernel to the last.

    peers: the same cycles on the other ranks of the group. A collective's kernel runs from the
        rank's own arrival, so all but the shortest rank's time is waiting for the last rank
        ("wait"), not communication. Without peers it is all called collective.
    Raises: BadInput when the ranks' traces hold different collectives.
    """
    original, trace = trace, _waits_apart(trace, peers) if peers else trace
    points = np.unique(np.concatenate([trace.begin, trace.end]))
    lengths = np.diff(points) / 1e6
    owner = np.full(len(lengths), -1)
    begins, ends = (np.searchsorted(points, column) for column in (trace.begin, trace.end))
    code = trace.stage * len(CLASSES) + trace.kind
    for number in sorted(np.unique(code), key=lambda c: (c % len(CLASSES), c)):
        chosen = code == number
        running = np.bincount(begins[chosen], minlength=len(points)) - np.bincount(
            ends[chosen], minlength=len(points)
        )
        owner[(owner < 0) & (running.cumsum()[:-1] > 0)] = number
    seconds = np.bincount(
        owner[owner >= 0], lengths[owner >= 0], len(STAGES) * len(CLASSES)
    ).reshape(len(STAGES), len(CLASSES))

    idle = np.flatnonzero(owner < 0)
    following = np.searchsorted(trace.begin, points[idle + 1])
    last = np.maximum.accumulate(np.where(owner < 0, 0, np.arange(len(owner))))[
        idle
    ]  # the busy stretch before each gap
    inside = owner[last] // len(CLASSES) == trace.stage[following]
    by_host = trace.cpu | (trace.first[following] & (trace.launched[following] > points[idle]))
    of_stage = {
        name: inside & (trace.stage[following] == number) for number, name in enumerate(STAGES)
    } | {BETWEEN: ~inside}
    gaps = {
        name: [float(lengths[idle[chosen & (by_host == host)]].sum()) for host in (True, False)]
        for name, chosen in of_stage.items()
    }

    found = {}
    for number, name in enumerate(STAGES):
        if kernels := int((original.stage == number).sum()):
            collective = (original.stage == number) & (original.kind == CLASSES.index("collective"))
            found[name] = Part(
                trace.rounds.get(name, 0),
                kernels,
                dict(zip(CLASSES, map(float, seconds[number]))),
                float((original.end - original.begin)[collective].sum()) / 1e6,
                *gaps[name],
            )
    return found | {BETWEEN: Part(0, 0, dict.fromkeys(CLASSES, 0.0), 0.0, *gaps[BETWEEN])}


def _waits_apart(trace: Trace, peers: Sequence[Trace]) -> Trace:
    """Each collective cut in two: waiting until the last rank has come, and the shortest rank's
    time.
    """
    number = CLASSES.index("collective")
    own = np.flatnonzero(trace.kind == number)
    others = [np.flatnonzero(peer.kind == number) for peer in peers]
    if any(
        len(found) != len(own) or (peer.stage[found] != trace.stage[own]).any()
        for peer, found in zip(peers, others)
    ):
        raise BadInput(
            "trace",
            "of one rank holds other collectives than another's",
            "give the traces of one run, one file a rank",
        )
    shortest = np.min(
        [t.end[found] - t.begin[found] for t, found in zip((trace, *peers), (own, *others))], axis=0
    )
    arrived = trace.end[own] - shortest
    kind, begin = trace.kind.copy(), np.concatenate([trace.begin, arrived])
    kind[own] = CLASSES.index("wait")
    end = trace.end.copy()
    end[own] = arrived
    order = np.argsort(begin, kind="stable")

    def both(column: np.ndarray, more: np.ndarray) -> np.ndarray:
        return np.concatenate([column, more])[order]

    return replace(
        trace,
        begin=begin[order],
        end=both(end, trace.end[own]),
        kind=both(kind, np.full(len(own), number)),
        stage=both(trace.stage, trace.stage[own]),
        launched=both(trace.launched, trace.launched[own]),
        first=both(trace.first, trace.first[own]),
    )


def cycles(parts: dict[str, Part]) -> int:
    """How many cycles (without speculation: steps) a trace holds.

    Raises: BadInput when it holds none: SGLang was profiled while idle, or without its stage spans.
    """
    count = max(
        (parts[stage].rounds for stage in ("verify", "decode") if stage in parts), default=0
    )
    if not count:
        raise BadInput(
            "trace", "holds no verify and no decode step", "profile while a request is running"
        )
    return count


def table(parts: dict[str, Part]) -> pd.DataFrame:
    """One row a stage: milliseconds a cycle by class and in gaps, kernels a cycle."""
    count = cycles(parts)
    rows = [
        {"stage": name.replace("_", "-"), "kernels (per cycle)": part.kernels / count}
        | {f"{kind} (ms/cycle)": 1e3 * part.seconds[kind] / count for kind in CLASSES}
        | {
            "waits for host (ms/cycle)": 1e3 * part.host_gap / count,
            "launched, not running (ms/cycle)": 1e3 * part.device_gap / count,
            "total (ms/cycle)": 1e3 * part.total / count,
        }
        for name, part in parts.items()
    ]
    return pd.DataFrame(rows)


def sentence(parts: dict[str, Part]) -> str:
    """Which explanation the numbers support, communication or launching kernels, in words: the
    two rivals of the field report that started this (Kimi-K2.5, EAGLE-3, TP8 over PCIe).

    One is called the larger cost where it takes half as much again as the other and at least a
    twentieth of the cycle.
    """
    count, inside = cycles(parts), [parts[name] for name in CYCLE if name in parts]
    total, collective, waits, gaps, host = (
        1e3 * sum(map(of, inside)) / count
        for of in (
            lambda p: p.total,
            lambda p: p.seconds["collective"],
            lambda p: p.seconds["wait"],
            lambda p: p.host_gap + p.device_gap,
            lambda p: p.host_gap,
        )
    )
    drafting = [parts[name] for name in stages.DRAFTING if name in parts]
    of_draft = 1e3 * sum(p.seconds["collective"] for p in drafting) / count
    smaller, larger = sorted((collective, gaps))
    name = "communication" if larger == collective else "launching kernels and the host"
    verdict = (
        f"they support {name} as the larger cost"
        if larger >= max(1.5 * smaller, 0.05 * total)
        else "they support neither of the two as the larger cost"
    )
    return (
        f"A cycle of {total:.3g} ms has {collective:.3g} ms of collectives that nothing hides"
        f" ({of_draft:.3g} ms of them the draft's"
        + (f"; {waits:.3g} ms more are waits for another rank" if waits else "")
        + f") and {gaps:.3g} ms in which the device is idle "
        f"({host:.3g} ms of them waiting for the host to launch): {verdict}."
    )
