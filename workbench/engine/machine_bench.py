"""Measure what the cost model takes as input, one process a rank: copies, matrix products,
launches, collectives by size and group.

``python -m workbench.engine.machine_bench ORDER`` with one JSON value {"engine", "ranks", "custom",
"result"}; rank 0 writes the result file anew after each input, so that one that fails or hangs
costs none of the others.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from workbench.engine.bench_clock import CPU, CUDA, NOT_REACHED, Clock, Input, Unused, capture
from workbench.engine.collective_bench import collectives

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
        return [clock.seconds(lambda: target.copy_(source), 3)]

    def thin() -> list[float]:
        # Two weights in turn, each larger than the caches: in a cycle other layers' weights come in
        # between.
        x, weights = matrix(rows, wide), [matrix(wide, wide) for _ in range(2)]
        return [clock.seconds(lambda: [x @ w for w in weights], 5) / 2]

    def dense() -> list[float]:
        a, b = matrix(square, square), matrix(square, square)
        return [clock.seconds(lambda: a @ b, 3)]

    small = functools.cache(lambda: torch.zeros(1, device=device))

    def launch() -> list[float]:
        small()  # on its own first
        return [clock.seconds(lambda: small().add_(1), many)]

    def graphs() -> list[float]:
        one, all_ = (capture(lambda: small().add_(1), calls)[0] for calls in (1, many))
        replay = clock.seconds(one.replay)
        return [max(0.0, clock.seconds(all_.replay) - replay) / (many - 1), replay]

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


# ------------------------------------------------------------------ between ranks


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
        # (custom_all_reduce_utils.py:284 get_world_group).
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
