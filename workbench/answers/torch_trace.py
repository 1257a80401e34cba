"""Where a profiled cycle's time goes: one rank's torch profiler trace, read as a stream, by stage
and class of kernel, and its gaps.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ijson
import numpy as np

from workbench.engine import stages
from workbench.experiment.errors import BadInput

# Classes in the order in which they claim a moment that several are running in: communication
# beside computation costs nothing.
CLASSES = ("attention", "matrix", "other", "collective", "wait")
STAGES = (*stages.NAMES, "outside")
BETWEEN = "between stages"
CYCLE = (*stages.CYCLE, "outside", BETWEEN)
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


def read(path: Path | str) -> Trace:
    """One rank's trace (Chrome JSON, gzipped or not), as torch.profiler and SGLang's /start_profile
    write it.

    Memory: tens of bytes for each kernel, operator and launch, never the file or its events. A
    kernel belongs to the stage whose span (SGLang's spec_stage_span and step spans:
    spec_utils.py:852 spec_stage_span, profile_utils.py:462 build_step_span_name) was open on the
    thread that launched it.
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
    if name in stages.SPECULATION:
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
    between draft and draft-extend (eagle_worker_v2.py:1478 spec_stage_span to
    eagle_worker_v2.py:1501 spec_stage_span). A draft-extend right after a prefill is the draft's
    own prefill (eagle_worker_v2.py:1593 spec_stage_span).
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
