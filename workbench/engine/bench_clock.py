"""How an input of the machine is measured: sizes, clocks, and what one input says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

KIB, MIB = 1 << 10, 1 << 20


NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Sizes:
    """How much is measured. copy: bytes copied; thin: rows, and rows and columns of the weights
    they are multiplied by; matrix: rows of the square product; messages: bytes of one rank's
    input to a collective; calls: calls in a row (and in one CUDA graph) for each reading;
    repeats: readings, of which the median counts."""

    copy: int
    thin: tuple[int, int]
    matrix: int
    dtype: torch.dtype
    messages: tuple[int, ...]
    calls: int
    repeats: int


# Messages around those of a cycle: a token of 7168 values in bf16 has 14 KiB, logits of 6 tokens
# over 8 ranks 240 KiB.
CPU = Sizes(32 * MIB, (4, 2048), 512, torch.float32, (KIB, 128 * KIB), 10, 3)


CUDA = Sizes(
    512 * MIB,
    (4, 7168),
    8192,
    torch.bfloat16,
    (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB),
    50,
    7,
)


class Unused(Exception):
    """SGLang itself does not use this here."""


@dataclass(frozen=True)
class Input:
    """One thing to measure. measure: seconds on this rank, one number or several; keep: writes the
    slowest rank's into ``entry``, whose
    "why" says why it is not known."""

    entry: dict[str, Any]
    measure: Callable[[], list[float]]
    keep: Callable[[dict[str, Any], list[float]], None]


class Clock:
    """Seconds of one call: the median over readings of several calls in a row, all ranks starting
    together.
    """

    def __init__(self, sizes: Sizes, cuda: bool):
        self.sizes, self.cuda = sizes, cuda

    def seconds(self, call: Callable[[], object], calls: int | None = None) -> float:
        """calls: how many calls in a row (default: the plan's); the first ones are a warm-up that
        no reading has.
        """
        calls = calls or self.sizes.calls
        for _ in range(min(calls, 5)):
            call()
        readings = []
        for _ in range(self.sizes.repeats):
            self.wait()
            dist.barrier()
            self.wait()
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            self.wait()
            readings.append((time.perf_counter() - begun) / calls)
        return statistics.median(readings)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def capture(
    call: Callable[[], object],
    calls: int,
    stream: torch.cuda.Stream | None = None,
    ask: Callable[[], bool] = lambda: True,
) -> tuple[torch.cuda.CUDAGraph, bool]:
    """A graph of so many calls, and what ``ask`` said during the capture."""
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL's own query events meanwhile, which a capture of every thread's calls forbids.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        said = ask()
        for _ in range(calls):
            call()
    return graph, said
