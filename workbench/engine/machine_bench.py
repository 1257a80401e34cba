"""Measure what the cost model takes as input, one process a rank: copies, matrix products,
launches, collectives by size and group.

``python -m workbench.engine.machine_bench ORDER`` with one JSON value {"engine", "ranks", "custom",
"result"}; rank 0 writes the result file anew after each input, so that one that fails or hangs
costs none of the others.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from workbench.engine.cpu import shared

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

    def of(self, call: Callable[[], object], calls: int | None = None) -> float:
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


# ------------------------------------------------------------------ of one device


def rates(clock: Clock, device: torch.device) -> Iterator[Input]:
    """Bytes and operations a second, and what launching takes. Values are random: the clocks of a
    GPU follow what it multiplies.
    """
    sizes = clock.sizes
    (rows, wide), square, many = sizes.thin, sizes.matrix, 200

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=sizes.dtype, device=device)

    def copy() -> list[float]:
        source, target = (
            torch.zeros(sizes.copy, dtype=torch.uint8, device=device) for _ in range(2)
        )
        return [clock.of(lambda: target.copy_(source), 3)]

    def thin() -> list[float]:
        # Two weights in turn, each larger than the caches: in a cycle other layers' weights come in
        # between.
        x, weights = matrix(rows, wide), [matrix(wide, wide) for _ in range(2)]
        return [clock.of(lambda: [x @ w for w in weights], 5) / 2]

    def dense() -> list[float]:
        a, b = matrix(square, square), matrix(square, square)
        return [clock.of(lambda: a @ b, 3)]

    small = functools.cache(lambda: torch.zeros(1, device=device))

    def launch() -> list[float]:
        small()  # on its own first
        return [clock.of(lambda: small().add_(1), many)]

    def graphs() -> list[float]:
        one, all_ = (_captured(lambda: small().add_(1), calls)[0] for calls in (1, many))
        replay = clock.of(one.replay)
        return [max(0.0, clock.of(all_.replay) - replay) / (many - 1), replay]

    item = torch.tensor([], dtype=sizes.dtype).element_size()
    yield _rates(copy, copy_bytes_per_s=lambda s: 2 * sizes.copy / s)  # a copy reads and writes
    yield _rates(thin, thin_bytes_per_s=lambda s: wide * wide * item / s)
    yield _rates(
        dense, matrix_ops_per_s=lambda s: 2 * square**3 / s
    )  # multiplies and adds n cubed times
    yield _rates(launch, launch_s=lambda s: s)
    if clock.cuda:
        yield _rates(graphs, graph_launch_s=lambda s: s, graph_replay_s=lambda s: s)


def _rates(measure: Callable[[], list[float]], **fields: Callable[[float], float]) -> Input:
    def keep(entry: dict[str, Any], seconds: list[float]) -> None:
        entry["values"] = {name: of(s) for (name, of), s in zip(fields.items(), seconds)}

    return Input({"values": dict.fromkeys(fields), "why": NOT_REACHED}, measure, keep)


def _captured(
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


# ------------------------------------------------------------------ between ranks


class Gloo:
    """Collectives of one group on the CPU: without SGLang's compiled kernels its GroupCoordinator
    calls these (parallel_state.py:698).
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.first, self.world_size = (
            group,
            dist.get_global_rank(group, 0),
            dist.get_world_size(group),
        )

    def all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def all_gather_into_tensor(self, output: torch.Tensor, x: torch.Tensor) -> None:
        dist.all_gather_single(output, x, group=self.group)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> None:
        dist.broadcast(x, self.first + src, group=self.group)


def collectives(clock: Clock, device: torch.device, ranks: int, custom: bool) -> Iterator[Input]:
    """Latency by size for each group size, kind, back end and (on GPUs) with and without a CUDA
    graph. SGLang's own all-reduce comes last:
    it compiles kernels and maps memory of other processes."""
    backends = (
        ("nccl", *(["custom"] if custom else []))
        if clock.cuda
        else ("shared",)
        if shared.usable()
        else ("gloo",)
    )
    for backend in backends:
        for size in (n for n in range(2, ranks + 1) if ranks % n == 0):
            group = _once(
                functools.partial(
                    _communicator,
                    backend,
                    [list(range(first, first + size)) for first in range(0, ranks, size)],
                )
            )
            for kind in (
                ("all_reduce", "all_gather", "broadcast")
                if backend != "custom"
                else ("all_reduce",)
            ):
                for graph in (False, True) if clock.cuda else (False,):
                    entry = {
                        "kind": kind,
                        "backend": backend,
                        "ranks": size,
                        "graph": graph,
                        "points": [],
                        "why": NOT_REACHED,
                    }
                    yield Input(
                        entry,
                        functools.partial(_latencies, clock, device, group, backend, kind, graph),
                        lambda entry, seconds: entry.update(
                            points=[list(point) for point in zip(clock.sizes.messages, seconds)]
                        ),
                    )


def _once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Made at the first call; what failed once fails again with the same reason, since making a
    group is collective.
    """
    made: list[tuple[Any, Exception | None]] = []

    def get() -> Any:
        if not made:
            try:
                made.append((make(), None))
            except Exception as error:
                made.append((None, error))
        if made[0][1]:
            raise made[0][1]
        return made[0][0]

    return get


def _communicator(backend: str, groups: list[list[int]]) -> Any:
    """The group of this rank, made collectively. On GPUs it is SGLang's own: NCCL alone, or with
    its custom all-reduce.

    Raises: Unused where SGLang goes on without custom all-reduce (parallel_state.py:515), with what
        it says about that.
    """
    if backend in ("gloo", "shared"):
        made = [dist.new_group(ranks) for ranks in groups]
        mine = next(group for group, ranks in zip(made, groups) if dist.get_rank() in ranks)
        return Gloo(mine) if backend == "gloo" else shared.Ranks(mine)
    from sglang.srt.distributed import parallel_state

    said = _Warnings()
    logging.getLogger("sglang.srt.distributed").addHandler(said)
    try:
        made = parallel_state.init_model_parallel_group(
            groups,
            dist.get_rank(),
            "nccl",
            use_custom_allreduce=backend == "custom",
            group_name=f"measure_{backend}",
        )
    finally:
        logging.getLogger("sglang.srt.distributed").removeHandler(said)
    if backend == "custom" and (made.ca_comm is None or made.ca_comm.disabled):
        raise Unused(
            said.lines[-1]
            if said.lines
            else "SGLang sets up no custom all-reduce for this group and does not say why"
        )
    return made


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().splitlines()[0])


def _latencies(
    clock: Clock,
    device: torch.device,
    made: Callable[[], Any],
    backend: str,
    kind: str,
    graph: bool,
) -> list[float]:
    """Seconds by message; as far as SGLang's custom all-reduce takes them, which differs in a graph
    (custom_all_reduce_v2.py:415).
    """
    group, found = made(), []
    for message in clock.sizes.messages:
        seconds = _latency(clock, device, group, backend, kind, message, graph)
        if seconds is None:
            break
        found.append(seconds)
    if not found:
        raise Unused(f"SGLang leaves even {clock.sizes.messages[0]} bytes to NCCL")
    return found


def _latency(
    clock: Clock,
    device: torch.device,
    group: Any,
    backend: str,
    kind: str,
    message: int,
    graph: bool,
) -> float | None:
    x = torch.zeros(message // clock.sizes.dtype.itemsize, dtype=clock.sizes.dtype, device=device)
    output = torch.empty(x.numel() * group.world_size, dtype=x.dtype, device=device)
    call = {
        "all_reduce": lambda: group.all_reduce(x),
        "all_gather": lambda: group.all_gather_into_tensor(output, x),
        "broadcast": lambda: group.broadcast(x, src=0),
    }[kind]

    def taken() -> bool:
        return backend != "custom" or group.ca_comm.should_custom_ar(x)

    if not graph:
        return clock.of(call) if taken() else None
    with (
        group.graph_capture() as context
    ):  # switches pynccl on, as in SGLang's own graphs (parallel_state.py:636)
        call()
        torch.cuda.synchronize()
        captured, took = _captured(call, clock.sizes.calls, context.stream, taken)
    return clock.of(captured.replay, 3) / clock.sizes.calls if took else None


# ------------------------------------------------------------------ a rank


def agreed(
    ranks: int, everyone: Any, measure: Callable[[], list[float]]
) -> tuple[list[float], str, bool]:
    """The slowest rank's seconds, which are what a step waits for; or why one rank has none, and
    whether SGLang does without it here.
    """
    seconds, why, unused = [], "", False
    try:
        seconds = measure()
    except Unused as reason:
        why, unused = str(reason), True
    except Exception as error:  # whatever it is, the other inputs are still to be measured
        why = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    said: list[Any] = [None] * ranks
    dist.all_gather_object(said, (seconds, why, unused), group=everyone)
    failed = [(rank, why) for rank, (_, why, unused) in enumerate(said) if why and not unused]
    if failed:
        return [], f"{failed[0][1]} (rank {failed[0][0]})", False
    reasons = [why for _, why, _ in said if why]
    return (
        ([], reasons[0], True)
        if reasons
        else ([max(column) for column in zip(*(seconds for seconds, _, _ in said))], "", False)
    )


def rank_main(rank: int, order: dict, meeting: str) -> None:
    """One rank's whole measurement."""
    cuda, ranks = order["engine"] == "cuda", order["ranks"]
    if cuda:
        from sglang.srt.distributed import parallel_state

        torch.cuda.set_device(rank)
        # SGLang's, not torch's alone: its custom all-reduce asks for the world group
        # (custom_all_reduce_utils.py:284).
        parallel_state.init_distributed_environment(ranks, rank, f"file://{meeting}", rank, "nccl")
    else:
        torch.set_num_threads(1)  # the CPU engine binds each rank to one core
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks
        )
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    everyone, clock = dist.new_group(backend="gloo"), Clock(CUDA if cuda else CPU, cuda)
    singles, between = (
        list(rates(clock, device)),
        list(collectives(clock, device, ranks, order["custom"])),
    )
    for thing in [None, *singles, *between]:
        if thing is not None:
            seconds, why, unused = agreed(ranks, everyone, thing.measure)
            thing.entry["why"] = why
            if unused:
                thing.entry["unused"] = True
            if seconds:
                thing.keep(thing.entry, seconds)
        if rank == 0:
            _write(
                Path(order["result"]), [i.entry for i in singles], [i.entry for i in between], cuda
            )
    dist.barrier(group=everyone)
    # Communicators end with the process: taking NCCL's apart while graphs hold them can hang.


def _write(path: Path, singles: list[dict], latencies: list[dict], cuda: bool) -> None:
    values = {name: value for entry in singles for name, value in entry["values"].items()}
    unknown = {name: entry["why"] for entry in singles for name in entry["values"] if entry["why"]}
    versions = {"torch": torch.__version__} | (
        {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if cuda else {}
    )
    part = path.with_suffix(".part")
    part.write_text(
        json.dumps({**values, "unknown": unknown, "latencies": latencies, "versions": versions})
    )
    part.replace(path)


def main() -> None:
    order = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        # Forked, so that torch is imported once; CUDA is not touched before.
        start_processes(
            rank_main, (order, f"{folder}/meeting"), order["ranks"], start_method="fork"
        )


if __name__ == "__main__":
    main()
