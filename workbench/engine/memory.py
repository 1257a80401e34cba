"""What this rank's memory holds, as sums over storages that are really there: the target, each
draft, both KV pools; nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_DERIVED = (
    "w_kc",
    "w_vc",
)  # MLA's absorbed projections, which are no parameters (models/deepseek_v2.py:2220 w_kc)
_POOLS = ("k_buffer", "v_buffer", "kv_buffer")
COPY = "draft_tp_copy"  # marks what own-N copied of the target's tables


def target(runner) -> dict[str, int]:
    """{"weights", "other", "kv", "rows"}: bytes of the target's weights, of its further tensors
    (rotary tables above all) and of its KV
    pool, and the pool's rows.
    runner: the target's ModelRunner."""
    weights = _storages(_weights(runner.model))
    return {
        "weights": sum(weights.values()),
        "other": _bytes(_others(runner.model), weights),
        **_pool(runner.token_to_kv_pool),
    }


def draft(runner, target_runner) -> dict[str, int]:
    """{"weights", "copied", "other", "kv", "rows"}: what one draft takes beside the target. copied:
    the rows it keeps of the target's
    tables, where it is on a group of its own; a table that is the target's own costs nothing."""
    theirs = _storages(_weights(target_runner.model)) | _storages(_others(target_runner.model))
    copied = _storages(p for p in _weights(runner.model) if getattr(p, COPY, False))
    weights = _storages(_weights(runner.model))
    own = {
        place: size
        for place, size in weights.items()
        if place not in theirs and place not in copied
    }
    return {
        "weights": sum(own.values()),
        "copied": sum(copied.values()),
        "other": _bytes(_others(runner.model), theirs | weights),
        **_pool(runner.token_to_kv_pool),
    }


def device() -> dict[str, int] | None:
    """{"allocated", "reserved", "free"} in bytes, by the CUDA allocator and the driver; None on a
    CPU. What is reserved or taken beside
    the sums above is graphs, communicators, workspaces and the context."""
    if not torch.cuda.is_available():
        return None
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "free": torch.cuda.mem_get_info()[0],
    }


def _weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    for module in model.modules():
        yield from (
            value
            for name in _DERIVED
            if isinstance(value := getattr(module, name, None), torch.Tensor)
        )


def _others(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.buffers()
    for module in model.modules():
        yield from (
            value
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor) and name not in _DERIVED
        )


def _pool(pool) -> dict[str, int]:
    buffers = [buffer for name in _POOLS for buffer in getattr(pool, name, None) or ()]
    return {
        "kv": sum(_storages(buffers).values()),
        "rows": int(buffers[0].shape[0]) if buffers else 0,
    }


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """{address: bytes} of the distinct storages behind tensors; a view counts as all that it keeps
    alive.
    """
    found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta")
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def _bytes(tensors: Iterable[torch.Tensor], counted: dict[int, int]) -> int:
    return sum(size for place, size in _storages(tensors).items() if place not in counted)
