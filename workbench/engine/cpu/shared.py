"""Collectives of one machine's ranks through memory they share, which SGLang leaves to its compiled
kernels and, without them, to gloo's sockets.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache, partial, reduce
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from workbench.engine.hooks import Hook, Refused
from workbench.engine.orders import SHARED_MEMORY

_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator."
_ROOM = 1 << 20  # bytes of one rank's message; a larger one goes through gloo
_LINE = 64  # bytes: each rank writes to a cache line of its own
_KINDS = ("all_reduce", "all_gather", "broadcast")
# A rank that waits gives its core away, and after so many times sleeps, the longer the longer it
# has waited.
_YIELDS, _PAUSE_S, _LONGEST_PAUSE_S = 150, 1e-4, 2e-3


def usable(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks of one machine share memory: unless turned off, where a core's stores are seen
    in the order in which it makes them.
    """
    return environment.get(SHARED_MEMORY) != "off" and platform.machine() == "x86_64"


class Ranks:
    """One group's ranks, all on this machine. Each of them makes the same calls in the same order,
    as of any communicator.

    A call posts this rank's message, waits until every rank has posted its own, and reads them. A
    rank has two places by turns: whoever writes to one again has seen all ranks post the message in
    between, so they have read the one before.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Collective. Raises: Refused where a rank may not open the first one's memory."""
        self.rank, self.world_size, self._number = (
            dist.get_rank(group),
            dist.get_world_size(group),
            0,
        )
        lines = self.world_size * _LINE
        length, where = 3 * lines + 2 * self.world_size * _ROOM, [None]
        if self.rank == 0:  # a file without a name: however the ranks end, nothing is left
            file = os.memfd_create("draft-tp")
            os.ftruncate(file, length)
            where = [f"/proc/{os.getpid()}/fd/{file}"]
        dist.broadcast_object_list(where, dist.get_global_rank(group, 0), group)
        try:
            file = file if self.rank == 0 else os.open(where[0], os.O_RDWR)
        except OSError as error:
            raise Refused(
                f"the ranks cannot share memory ({error.strerror}): set {SHARED_MEMORY}=off"
            ) from None
        memory = mmap.mmap(file, length)
        dist.barrier(group)  # the first rank's is open until all have it
        os.close(file)
        numbers = memoryview(memory)[: 3 * lines].cast("q")
        self._posted, self._said = (
            numbers[: lines // 8],
            (
                numbers[lines // 8 : lines // 4],
                numbers[lines // 4 :],
            ),
        )
        places = torch.frombuffer(memory, dtype=torch.uint8, offset=3 * lines).view(
            2, self.world_size, _ROOM
        )
        # A decode step has few shapes, and making views takes as long as exchanging what is in
        # them.
        self._messages = lru_cache(256)(
            lambda turn, size, dtype, shape: [
                place[:size].view(dtype).view(shape) for place in places[turn]
            ]
        )

    @staticmethod
    def fits(x: torch.Tensor) -> bool:
        return 0 < x.numel() * x.element_size() <= _ROOM

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks in ``x``, added in their order, so that it is the same on each."""
        return x.copy_(reduce(torch.add, self._exchange("all_reduce", x)))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's ``x``, one after the other along a dimension."""
        return torch.cat(self._exchange("all_gather", x), dim)

    def all_gather_into_tensor(self, output: torch.Tensor, x: torch.Tensor) -> None:
        output.view(-1).copy_(self.all_gather(x.reshape(-1)))

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """The ``x`` of one rank of the group in that of each."""
        return x.copy_(self._exchange("broadcast", x, brings=self.rank == src)[src])

    def _exchange(self, kind: str, x: torch.Tensor, brings: bool = True) -> list[torch.Tensor]:
        """What each rank brings, in shared memory: to be read before the next call.

        Raises: RuntimeError when another rank makes another call: they have come apart.
        """
        size, turn = x.numel() * x.element_size(), self._number % 2
        mine, said = size * len(_KINDS) + _KINDS.index(kind), self._said[turn]
        messages = self._messages(turn, size, x.dtype, x.shape)
        if brings:
            messages[self.rank].copy_(x)
        self._number += 1
        said[self.rank * _LINE // 8] = mine
        self._posted[self.rank * _LINE // 8] = self._number
        for rank in range(self.world_size):
            self._wait(rank)
            if (theirs := said[rank * _LINE // 8]) != mine:
                raise RuntimeError(
                    f"rank {rank} calls {_KINDS[theirs % len(_KINDS)]} of {theirs // len(_KINDS)}"
                    f" bytes where rank {self.rank} calls {kind} of {size}"
                )
        return messages

    def _wait(self, rank: int) -> None:
        tries, pause = 0, _PAUSE_S
        while self._posted[rank * _LINE // 8] < self._number:
            tries += 1
            if tries < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(1.1 * pause, _LONGEST_PAUSE_S)


_of: WeakKeyDictionary[object, Ranks | None] = WeakKeyDictionary()


def ranks_of(group) -> Ranks | None:
    """The ranks of a GroupCoordinator, None where they do not share memory. The first call is
    collective.
    """
    from sglang.srt.runtime_context import get_server_args

    if group not in _of:
        _of[group] = (
            Ranks(group.device_group)
            if group.world_size > 1 and get_server_args().nnodes == 1 and usable()
            else None
        )
    return _of[group]


def hooks() -> list[Hook]:
    """Around what SGLang's compiled kernels would do themselves for all-reduce and all-gather
    (parallel_state.py:697 shm_allreduce, parallel_state.py:1427 shm_allgather), and broadcast.

    Those kernels know one group a process, the target's; here each group has memory of its own.
    """

    def in_memory(kind: str, original, group, input_, *args, **kwargs):
        listed = len(args) > 1 or kwargs.get("output_tensor_list") is not None
        ranks = ranks_of(group) if input_.is_cpu and Ranks.fits(input_) and not listed else None
        if ranks is None:
            return original(group, input_, *args, **kwargs)
        # A trace shows where the time went; without a profiler there is nothing to tell.
        with (
            torch.profiler.record_function(f"shared:{kind}")
            if torch.autograd._profiler_enabled()
            else nullcontext()
        ):
            return getattr(ranks, kind)(input_, *args, **kwargs)

    parameters = {
        "all_reduce": ("self", "input_"),
        "all_gather": ("self", "input_", "dim", "output_tensor_list"),
        "broadcast": ("self", "input_", "src"),
    }
    return [
        Hook(_GROUP + kind, partial(in_memory, kind), names) for kind, names in parameters.items()
    ]
