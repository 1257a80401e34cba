"""What a collective takes, by SGLang's own communicators and by Gloo."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.bench_clock import NOT_REACHED, Clock, Input, Unused, capture
from workbench.engine.cpu import shared


class Gloo:
    """Collectives of one group on the CPU: without SGLang's compiled kernels its GroupCoordinator
    calls these (parallel_state.py:699 all_reduce).
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

    Raises: Unused where SGLang goes on without custom all-reduce (parallel_state.py:514
        logger.warning), with what it says about that.
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
    (device_communicators/custom_all_reduce_v2.py:415 _pick_config).
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
        return clock.seconds(call) if taken() else None
    with (
        group.graph_capture() as context
    ):  # switches pynccl on, as in SGLang's own graphs (parallel_state.py:660 maybe_pynccl_context)
        call()
        torch.cuda.synchronize()
        captured, took = capture(call, clock.sizes.calls, context.stream, taken)
    return clock.seconds(captured.replay, 3) / clock.sizes.calls if took else None
