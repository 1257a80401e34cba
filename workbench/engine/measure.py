"""Measure what the cost model takes as input, one process a rank: copies, matrix products, launches, collectives by size and group.

``python -m workbench.engine.measure ORDER`` with one JSON value {"engine", "ranks", "result"}; rank 0 writes the result file.
"""
from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How much is measured. copy: bytes copied; matrix: rows of the square product; messages: bytes of one rank's input to a collective;
    calls: calls in a row (and in one CUDA graph) for each reading; repeats: readings, of which the median counts."""

    copy: int
    matrix: int
    dtype: torch.dtype
    messages: tuple[int, ...]
    calls: int
    repeats: int


# Messages around those of a cycle: a token of 7168 values in bf16 has 14 KiB, logits of 6 tokens over 8 ranks 240 KiB.
CPU = Sizes(32 * MIB, 512, torch.float32, (KIB, 128 * KIB), 10, 3)
CUDA = Sizes(512 * MIB, 8192, torch.bfloat16, (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB), 50, 7)


class Clock:
    """Seconds of one call: the median over readings of several calls in a row, all ranks starting together."""

    def __init__(self, sizes: Sizes, cuda: bool):
        self.sizes, self.cuda = sizes, cuda

    def of(self, call: Callable[[], object], calls: int | None = None) -> float:
        """calls: how many calls in a row (default: the plan's); the first ones are a warm-up that no reading has."""
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


def rates(clock: Clock, device: torch.device) -> dict[str, float]:
    """Seconds by name: one copy, one matrix product, one small kernel launched by itself, one more kernel of a CUDA graph, one replay."""
    sizes = clock.sizes
    source, target = (torch.zeros(sizes.copy, dtype=torch.uint8, device=device) for _ in range(2))
    found = {"copy": clock.of(lambda: target.copy_(source), 3)}
    del source, target
    a, b = (torch.ones(sizes.matrix, sizes.matrix, dtype=sizes.dtype, device=device) for _ in range(2))
    found["matrix"] = clock.of(lambda: a @ b, 3)
    del a, b
    small, many = torch.zeros(1, device=device), 200
    found["launch"] = clock.of(lambda: small.add_(1), many)
    if clock.cuda:
        one, all_ = (_captured(lambda: small.add_(1), calls) for calls in (1, many))
        found["replay"] = clock.of(one.replay)
        found["graph_launch"] = max(0.0, clock.of(all_.replay) - found["replay"]) / (many - 1)
    return found


def _captured(call: Callable[[], object], calls: int, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    return graph


class Gloo:
    """Collectives of one group on the CPU: without SGLang's compiled kernels its GroupCoordinator calls these (parallel_state.py:698)."""

    def __init__(self, groups: list[list[int]]):
        made = [dist.new_group(ranks) for ranks in groups]
        mine = next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)
        self.group, self.first, self.world_size = made[mine], groups[mine][0], len(groups[mine])

    def all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def all_gather_into_tensor(self, output: torch.Tensor, x: torch.Tensor) -> None:
        dist.all_gather_single(output, x, group=self.group)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> None:
        dist.broadcast(x, self.first + src, group=self.group)


def collectives(clock: Clock, device: torch.device, ranks: int) -> list[dict]:
    """Latency tables: for each group size, kind, back end and (on GPUs) with and without a CUDA graph, [bytes, seconds] by size."""
    found = []
    for size in (n for n in range(2, ranks + 1) if ranks % n == 0):
        groups = [list(range(first, first + size)) for first in range(0, ranks, size)]
        for backend, group in _communicators(groups, clock.cuda):
            for kind in ("all_reduce", "all_gather", "broadcast") if backend != "custom" else ("all_reduce",):
                for graph in (False, True) if clock.cuda else (False,):
                    points = [[message, _latency(clock, device, group, kind, message, graph)] for message in clock.sizes.messages
                              if backend != "custom" or group.ca_comm.should_custom_ar(_message(clock, device, message))]
                    if points:
                        found.append({"kind": kind, "backend": backend, "ranks": size, "graph": graph, "points": points})
    return found


def _communicators(groups: list[list[int]], cuda: bool) -> list[tuple[str, object]]:
    """The group of this rank by back end, made collectively. On GPUs both are SGLang's own: NCCL alone, and with custom all-reduce."""
    if not cuda:
        return [("gloo", Gloo(groups))]
    from sglang.srt.distributed.parallel_state import init_model_parallel_group

    made = [("nccl", init_model_parallel_group(groups, dist.get_rank(), "nccl", use_custom_allreduce=False, group_name="measure_nccl")),
            ("custom", init_model_parallel_group(groups, dist.get_rank(), "nccl", use_custom_allreduce=True, group_name="measure_custom"))]
    # SGLang goes on without custom all-reduce where it cannot be set up (parallel_state.py:518).
    return [(backend, group) for backend, group in made if backend == "nccl" or group.ca_comm is not None and not group.ca_comm.disabled]


def _message(clock: Clock, device: torch.device, size: int) -> torch.Tensor:
    return torch.zeros(size // clock.sizes.dtype.itemsize, dtype=clock.sizes.dtype, device=device)


def _latency(clock: Clock, device: torch.device, group, kind: str, message: int, graph: bool) -> float:
    x = _message(clock, device, message)
    output = torch.empty(x.numel() * group.world_size, dtype=x.dtype, device=device)
    call = {"all_reduce": lambda: group.all_reduce(x), "all_gather": lambda: group.all_gather_into_tensor(output, x),
            "broadcast": lambda: group.broadcast(x, src=0)}[kind]
    if not graph:
        return clock.of(call)
    with group.graph_capture() as context:          # switches pynccl on, as in SGLang's own graphs (parallel_state.py:636)
        call()
        torch.cuda.synchronize()
        captured = _captured(call, clock.sizes.calls, context.stream)
    return clock.of(captured.replay, 3) / clock.sizes.calls


def slowest(found: dict | list, device: torch.device) -> None:
    """Replace every time by that of the slowest rank, which is what a step waits for."""
    places = [(found, key) for key in found] if isinstance(found, dict) else [(point, 1) for entry in found for point in entry["points"]]
    times = torch.tensor([holder[key] for holder, key in places], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    for (holder, key), seconds in zip(places, times.tolist()):
        holder[key] = seconds


def rank_main(rank: int, order: dict, meeting: str) -> None:
    """One rank's whole measurement."""
    cuda, ranks = order["engine"] == "cuda", order["ranks"]
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)                    # the CPU engine binds each rank to one core
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    clock = Clock(CUDA if cuda else CPU, cuda)
    seconds, latencies = rates(clock, device), collectives(clock, device, ranks)
    slowest(seconds, device)
    if latencies:
        slowest(latencies, device)
    if rank == 0:
        sizes = clock.sizes
        Path(order["result"]).write_text(json.dumps({
            # A copy reads and writes; a square product multiplies and adds n cubed times.
            "copy_bytes_per_s": 2 * sizes.copy / seconds["copy"], "matrix_ops_per_s": 2 * sizes.matrix ** 3 / seconds["matrix"],
            "launch_s": seconds["launch"], "graph_launch_s": seconds.get("graph_launch"), "graph_replay_s": seconds.get("replay"),
            "latencies": latencies, "torch": torch.__version__}))
    dist.barrier()
    # Communicators end with the process: taking NCCL's apart while graphs hold them can hang.


def main() -> None:
    order = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        # Forked, so that torch is imported once; CUDA is not touched before.
        start_processes(rank_main, (order, f"{folder}/meeting"), order["ranks"], start_method="fork")


if __name__ == "__main__":
    main()
