"""A machine's inputs given by hand, over those of one that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from workbench.experiment.errors import BadInput
from workbench.predict import more_ranks
from workbench.predict.machine import Latency, Machine

# What can be given, its unit, and what it stands for.
INPUTS = {
    "memory_bandwidth": "bytes/s that a product reads its weights at, on one GPU",
    "collective_latency": "seconds of one small collective, in groups of any size",
    "matrix_rate": "operations/s of a large product",
    "kernel_in_graph": "seconds of one more kernel in a CUDA graph",
}
_KINDS = ("all_reduce", "all_gather", "broadcast")


def machine(measured: Machine | None, ranks: int, given: Mapping[str, float]) -> Machine:
    """The measured machine with ``ranks`` ranks and the given inputs in place of its own.

    A latency that is given is taken for every size, group and kind of collective; those measured
    with fewer ranks are taken for more as they are. Without a measured machine what is not given
    takes no time, so the prediction is a lower bound.
    Raises: BadInput for an unknown name or a value that is no number above 0.
    """
    for name, value in given.items():
        if name not in INPUTS:
            raise BadInput("-p", f"{name} is no input of a machine", f"use {', '.join(INPUTS)}")
        if value <= 0:
            raise BadInput(name, f"is {value}", f"give the {INPUTS[name]}")
    start = measured or Machine(
        "by hand", "cuda", ranks, None, None, float("inf"), 0.0, 0.0, 0.0, ()
    )
    if not measured and (lacking := [n for n in list(INPUTS)[:2] if n not in given]):
        raise BadInput(lacking[0], "is not given", "give it by -p, or name a run that measured it")
    changed = more_ranks.widened(start, ranks, by_steps=False) if start.ranks < ranks else start
    if rate := given.get("memory_bandwidth"):
        changed = replace(changed, copy_bytes_per_s=float(rate), thin_bytes_per_s=float(rate))
    if rate := given.get("matrix_rate"):
        changed = replace(changed, matrix_ops_per_s=float(rate))
    if seconds := given.get("kernel_in_graph"):
        changed = replace(changed, graph_launch_s=float(seconds))
    if seconds := given.get("collective_latency"):
        groups = [n for n in range(2, ranks + 1) if ranks % n == 0]
        changed = replace(
            changed,
            latencies=tuple(
                Latency(kind, "by hand", n, True, ((1, float(seconds)),))
                for kind in _KINDS
                for n in groups
            ),
        )
    return changed
