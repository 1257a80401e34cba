"""What a profiled cycle's time went to: kernels by class, waits and gaps, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from workbench.answers import late_ranks
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
    late: seconds of the waits by the rank that was late and what kept it ("rank 1: host gap").
    """

    rounds: int
    kernels: int
    seconds: dict[str, float]
    collectives_s: float
    host_gap: float
    device_gap: float
    late: dict[str, float] = field(default_factory=dict)

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
        ("wait"), not communication; it is charged to that rank (late_ranks.py). Without peers it
        is all called collective.
    Raises: BadInput when the ranks' traces hold different collectives.
    """
    original, trace = trace, _waits_apart(trace, peers) if peers else trace
    points, owner, idle, inside, by_host = _owners(trace)
    lengths = np.diff(points) / 1e6
    following = np.searchsorted(trace.begin, points[idle + 1])
    seconds = np.bincount(
        owner[owner >= 0], lengths[owner >= 0], len(STAGES) * len(CLASSES)
    ).reshape(len(STAGES), len(CLASSES))
    of_stage = {
        name: inside & (trace.stage[following] == number) for number, name in enumerate(STAGES)
    } | {BETWEEN: ~inside}
    gaps = {
        name: [float(lengths[idle[chosen & (by_host == host)]].sum()) for host in (True, False)]
        for name, chosen in of_stage.items()
    }

    found, late = {}, late_ranks.charged(original, peers, _moments) if peers else {}
    for number, name in enumerate(STAGES):
        if kernels := int((original.stage == number).sum()):
            collective = (original.stage == number) & (original.kind == CLASSES.index("collective"))
            found[name] = Part(
                trace.rounds.get(name, 0),
                kernels,
                dict(zip(CLASSES, map(float, seconds[number]))),
                float((original.end - original.begin)[collective].sum()) / 1e6,
                *gaps[name],
                _visible(late.get(name, {}), float(seconds[number][CLASSES.index("wait")])),
            )
    return found | {BETWEEN: Part(0, 0, dict.fromkeys(CLASSES, 0.0), 0.0, *gaps[BETWEEN])}


def _owners(trace: Trace) -> tuple[np.ndarray, ...]:
    """Who has each moment: the points between moments; each moment's stage and class as one number,
    -1 where nothing ran; and of these idle moments where they are, whether they lie inside a stage
    and whether the host is their reason.
    """
    points = np.unique(np.concatenate([trace.begin, trace.end]))
    owner = np.full(len(points) - 1, -1)
    begins, ends = (np.searchsorted(points, column) for column in (trace.begin, trace.end))
    code = trace.stage * len(CLASSES) + trace.kind
    for number in sorted(np.unique(code), key=lambda c: (c % len(CLASSES), c)):
        chosen = code == number
        running = np.bincount(begins[chosen], minlength=len(points)) - np.bincount(
            ends[chosen], minlength=len(points)
        )
        owner[(owner < 0) & (running.cumsum()[:-1] > 0)] = number
    idle = np.flatnonzero(owner < 0)
    following = np.searchsorted(trace.begin, points[idle + 1])
    last = np.maximum.accumulate(np.where(owner < 0, 0, np.arange(len(owner))))[
        idle
    ]  # the busy stretch before each gap
    inside = owner[last] // len(CLASSES) == trace.stage[following]
    by_host = trace.cpu | (trace.first[following] & (trace.launched[following] > points[idle]))
    return points, owner, idle, inside, by_host


def _moments(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """``late_ranks.Moments`` of a trace."""
    points, owner, idle, _, by_host = _owners(trace)
    kinds = owner % len(CLASSES)
    spent_on = np.where(kinds < CLASSES.index("collective"), kinds, -1)
    causes = [late_ranks.CAUSES.index(name) for name in (late_ranks.DEVICE, late_ranks.HOST)]
    spent_on[idle] = np.where(by_host, causes[1], causes[0])
    return points, spent_on


def _visible(late: dict[str, float], waited_s: float) -> dict[str, float]:
    """The charges of a stage's waits, of what computation does not hide of them alone."""
    whole = sum(late.values())
    return {name: s * waited_s / whole for name, s in late.items()} if whole else {}


def _waits_apart(trace: Trace, peers: Sequence[Trace]) -> Trace:
    """Each collective cut in two: waiting until the last rank has come, and the shortest rank's
    time.
    """
    number = CLASSES.index("collective")
    own, *others = late_ranks.collectives(trace, peers)
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
    twentieth of the cycle. A wait counts as what kept the late rank: its gaps are launching, its
    kernels neither. One that nobody can be charged with must not decide between the two.
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
    late: dict[str, float] = {}
    for part in inside:
        for charge, seconds in part.late.items():
            late[charge] = late.get(charge, 0.0) + 1e3 * seconds / count
    by_gaps = sum(ms for name, ms in late.items() if late_ranks.cause(name) in _GAPS)
    known = sum(ms for name, ms in late.items() if late_ranks.cause(name) != late_ranks.UNKNOWN)
    verdict = _rivals(collective, gaps + by_gaps, max(0.0, waits - known), total)
    return (
        f"A cycle of {total:.3g} ms has {collective:.3g} ms of collectives that nothing hides"
        f" ({of_draft:.3g} ms of them the draft's"
        + (f"; {waits:.3g} ms more are waits for another rank{_by_whom(late)}" if waits else "")
        + f") and {gaps:.3g} ms in which the device is idle "
        f"({host:.3g} ms of them waiting for the host to launch): {verdict}."
    )


_GAPS = (late_ranks.HOST, late_ranks.DEVICE)
_WHOSE = "'s "


def _rivals(collective: float, gaps: float, unknown: float, total: float) -> str:
    """The last words of ``sentence``, from milliseconds a cycle; unknown: waits that nobody can be
    charged with.
    """

    def larger(gaps: float) -> str:
        smaller, larger = sorted((collective, gaps))
        if larger < max(1.5 * smaller, 0.05 * total):
            return "they support neither of the two as the larger cost"
        name = "communication" if larger == collective else "launching kernels and the host"
        return f"they support {name} as the larger cost"

    least, most = larger(gaps), larger(gaps + unknown)
    if least == most:
        return least
    return (
        "which of the two is the larger cost they do not say, since what kept the rank that was"
        " waited for is not known"
    )


def _by_whom(late: dict[str, float]) -> str:
    """The charges that are a tenth of the waits or more, in words."""
    told = [
        f"{ms:.3g} ms for {name.replace(': ', _WHOSE, 1)}"
        for name, ms in sorted(late.items(), key=lambda item: -item[1])
        if ms >= 0.1 * sum(late.values()) and late_ranks.cause(name) != late_ranks.UNKNOWN
    ]
    return f": {', '.join(told)}" if told else ""
