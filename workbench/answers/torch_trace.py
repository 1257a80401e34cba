"""Where a profiled cycle's time goes: one rank's torch profiler trace, read as a stream, by stage
and class of kernel, and its gaps.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ijson
import numpy as np
import pandas as pd

from workbench.experiment.errors import BadInput

# Classes in the order in which they claim a moment that several are running in: communication
# beside computation costs nothing.
CLASSES = ("attention", "matrix", "other", "collective", "wait")
STAGES = ("draft", "verify", "draft_extend", "decode", "prefill", "draft_prefill", "outside")
BETWEEN = "between stages"
CYCLE = ("draft", "verify", "draft_extend", "decode", "outside", BETWEEN)
# By what kernels of CUDA libraries, of SGLang and of torch (on the CPU: its operators) are called.
_NAMES = (
    (
        "collective",
        re.compile(
            r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce|multimem|lamport|^(gloo|shared):|^c10d::",
            re.I,
        ),
    ),
    (
        "attention",
        re.compile(
            r"attn|attention|flash(?!infer)|With(Paged|Ragged)KV|fmha|mla_|_fwd_(grouped_)?kernel|"
            r"softmax_reducev|merge_state",
            re.I,
        ),
    ),
    (
        "matrix",
        re.compile(
            r"gemm|gemv|matmul|cutlass|cublas|nvjet|splitk|xmma|fused_moe|marlin|dot_kernel|aten::(mm|addmm|bmm|linear)$",
            re.I,
        ),
    ),
)


@dataclass(frozen=True)
class Trace:
    """Work of one device, an entry a kernel (on a CPU trace: an operator). begin, end:
    microseconds; kind, stage: indices into CLASSES and STAGES; launched: when the call that
    launched it returned; first: it is the first kernel of that call (a graph has many). rounds:
    how often each stage ran; cpu: nothing is launched, so whatever lies between is the host's.
    """

    begin: np.ndarray
    end: np.ndarray
    kind: np.ndarray
    stage: np.ndarray
    launched: np.ndarray
    first: np.ndarray
    rounds: dict[str, int]
    cpu: bool


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


def read(path: Path | str) -> Trace:
    """One rank's trace (Chrome JSON, gzipped or not), as torch.profiler and SGLang's /start_profile
    write it.

    Memory: tens of bytes for each kernel, operator and launch, never the file or its events. A
    kernel belongs to the stage whose span (SGLang's spec_stage_span and step spans:
    spec_utils.py:852, profile_utils.py:462) was open on the thread that launched it.
    Raises: BadInput for a file that is no such trace, holds several devices, or has no host events
        to tell stages by.
    """
    path = Path(path)
    kernels, operators, launches = _Columns(), _Columns(), _Columns()
    spans: list[tuple[int, float, float, str]] = []
    threads: dict[tuple, int] = {}
    devices = set()
    for event in _events(path):
        category, begin, name = event.get("cat"), event.get("ts"), event.get("name", "")
        if event.get("ph") != "X" or category not in _READ:
            continue
        end, arguments = begin + event.get("dur", 0), event.get("args") or {}
        correlation = arguments.get("correlation", -1)
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            devices.add((event.get("pid"), arguments.get("device")))
            kernels.add(begin, end, _kind(name), correlation, 0)
            continue
        thread = threads.setdefault((event.get("pid"), event.get("tid")), len(threads))
        if category in ("cuda_runtime", "cuda_driver"):
            launches.add(begin, end, 0, correlation, thread)
        elif category == "cpu_op" or name.startswith(("gloo:", "shared:")):
            operators.add(begin, end, _kind(name), -1, thread)
        elif (stage := _stage(name)) is not None:
            spans.append((thread, begin, end, stage))
    if len(devices) > 1:
        raise BadInput(
            "trace",
            f"{path.name} holds the kernels of {len(devices)} devices",
            "give the file of one rank",
        )
    cpu = not len(kernels)
    if cpu and not len(operators):
        raise BadInput(
            "trace",
            f"{path.name} holds no kernel and no operator",
            "give a trace by torch's profiler",
        )
    return _trace(path, operators if cpu else kernels, None if cpu else launches, _periods(spans))


_READ = {
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "cuda_runtime",
    "cuda_driver",
    "cpu_op",
    "user_annotation",
}


class _Columns:
    """Growing columns of numbers, without an object for each."""

    def __init__(self) -> None:
        self.begin, self.end, self.kind, self.correlation, self.thread = (
            array(code) for code in "ddbqi"
        )

    def __len__(self) -> int:
        return len(self.begin)

    def add(self, begin: float, end: float, kind: int, correlation: int, thread: int) -> None:
        for column, value in zip(
            (self.begin, self.end, self.kind, self.correlation, self.thread),
            (begin, end, kind, correlation, thread),
        ):
            column.append(value)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with (gzip.open if packed else open)(path, "rb") as file:
            yield from ijson.items(file, "traceEvents.item", use_float=True)
    except OSError as error:
        raise BadInput(
            "trace",
            f"{path.name} cannot be read ({error.strerror or error})",
            "give the file of a trace",
        ) from None
    except (ijson.JSONError, EOFError, zlib.error, UnicodeDecodeError):
        raise BadInput(
            "trace",
            f"{path.name} is damaged or cut off",
            "profile again, and copy the file when it is complete",
        ) from None


def _kind(name: str) -> int:
    return CLASSES.index(next((kind for kind, pattern in _NAMES if pattern.search(name)), "other"))


def _stage(name: str) -> str | None:
    """The stage that a span opens; None for other spans."""
    if name in ("draft", "verify", "draft_extend"):
        return name
    step = re.match(r"step\[(\w+)", name)
    return (
        {
            "VERIFY": "verify",
            "TARGET_VERIFY": "verify",
            "DECODE": "decode",
            "EXTEND": "prefill",
            "MIXED": "prefill",
            "DRAFT": "draft",
        }.get(step[1])
        if step
        else None
    )


def _periods(spans: Sequence[tuple[int, float, float, str]]) -> list[tuple[int, float, float, int]]:
    """(thread, begin, end, stage) in order, none inside another: the outermost span names the stage
    (a draft runs DRAFT steps).

    SGLang has no span around verify, only around the target's step in it: verify is what lies
    between draft and draft-extend (eagle_worker_v2.py:1478 to :1501). A draft-extend right after a
    prefill is the draft's own prefill (:1593).
    """
    outer: list[list] = []
    for thread, begin, end, stage in sorted(spans, key=lambda s: (s[0], s[1], -s[2])):
        if outer and outer[-1][0] == thread and begin < outer[-1][2]:
            continue
        if (
            stage == "draft_extend"
            and outer
            and outer[-1][0] == thread
            and outer[-1][3] == "prefill"
        ):
            stage = "draft_prefill"
        outer.append([thread, begin, end, stage])
    for before, here, after in zip(outer, outer[1:], outer[2:]):
        if [s[3] for s in (before, here, after)] == ["draft", "verify", "draft_extend"] and before[
            0
        ] == here[0] == after[0]:
            here[1], here[2] = before[2], after[1]
    return [(thread, begin, end, STAGES.index(stage)) for thread, begin, end, stage in outer]


def _trace(
    path: Path,
    work: _Columns,
    launches: _Columns | None,
    periods: list[tuple[int, float, float, int]],
) -> Trace:
    order = np.argsort(np.array(work.begin), kind="stable")
    begin, end, kind = (np.array(column)[order] for column in (work.begin, work.end, work.kind))
    if launches is None:
        called, launched, thread = (
            begin,
            begin,
            None,
        )  # an operator runs where it is called; Gloo's threads serve the stage that waits
        first = np.ones(len(begin), dtype=bool)
    else:
        correlation, ids = np.array(work.correlation)[order], np.array(launches.correlation)
        by_id = np.argsort(ids, kind="stable")
        at = np.searchsorted(ids[by_id], correlation).clip(0, max(0, len(ids) - 1))
        if not len(ids) or not (known := ids[by_id][at] == correlation).any():
            raise BadInput(
                "trace",
                f"{path.name} does not say who launched its kernels",
                "profile CPU and GPU activities together",
            )
        call = by_id[at]
        called, launched = (
            np.where(known, np.array(column)[call], np.nan)
            for column in (launches.begin, launches.end)
        )
        thread = np.array(launches.thread)[call]
        first = np.zeros(len(begin), dtype=bool)
        first[np.unique(correlation, return_index=True)[1]] = True
    stage = np.full(len(begin), STAGES.index("outside"))
    for where in {period[0] for period in periods}:
        opened, closed, numbers = map(
            np.array, zip(*(period[1:] for period in periods if period[0] == where))
        )
        at = np.searchsorted(opened, called, side="right") - 1
        hit = (at >= 0) & (called < closed[at]) & (True if thread is None else thread == where)
        stage[hit] = numbers[at[hit]]
    rounds = {
        name: count
        for number, name in enumerate(STAGES)
        if (count := sum(p[3] == number for p in periods))
    }
    return Trace(begin, end, kind, stage, launched, first, rounds, launches is None)


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
    """Which of the origin's rival explanations the numbers support, communication or launching
    kernels, in words.

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
    drafting = [parts[name] for name in ("draft", "draft_extend") if name in parts]
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
