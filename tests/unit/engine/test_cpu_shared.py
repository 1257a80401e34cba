"""Collectives through shared memory against gloo's, in processes of their own: one a rank, forked,
so that torch is imported once.
"""

import os
import random
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from workbench.engine.cpu import shared
from workbench.engine.hooks import Refused

pytestmark = pytest.mark.skipif(
    not shared.usable({}), reason="ranks share memory where stores are seen in order: on x86-64"
)


def on_ranks(world: int, body, folder: Path) -> None:
    """Run ``body(rank)`` on so many ranks that have met by gloo; what fails on one of them is
    raised here.
    """
    start_processes(_rank, (world, str(folder / "meeting"), body), world, start_method="fork")


def _rank(rank: int, world: int, meeting: str, body) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # of this rank alone: it is a process of its own
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    body(rank)


def values(rank: int, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return (torch.rand(shape, generator=generator) * 100).to(dtype)


@pytest.mark.parametrize("world", [2, 3])
def test_they_give_what_gloo_gives(world, tmp_path):
    def body(rank):
        ranks = shared.Ranks(dist.group.WORLD)
        for call, (shape, dtype) in enumerate(
            [
                ((3, 8), torch.float32),
                ((1,), torch.int64),
                ((2, 3, 5), torch.bfloat16),
                ((1 << 18,), torch.float32),
            ]
        ):
            mine = values(rank, call, shape, dtype)
            everyone = [values(other, call, shape, dtype) for other in range(world)]
            expected = mine.clone()
            dist.all_reduce(expected)
            summed = mine.clone()
            assert ranks.all_reduce(summed) is summed
            assert (
                torch.equal(summed, expected)
                if world == 2
                else torch.allclose(summed.float(), expected.float(), rtol=0.01)
            )
            for dim in range(-1, len(shape)):
                assert torch.equal(ranks.all_gather(mine, dim), torch.cat(everyone, dim))
            for source in range(world):
                assert torch.equal(ranks.broadcast(mine.clone(), source), everyone[source])
            flat = torch.empty(world * mine.numel(), dtype=dtype)
            ranks.all_gather_into_tensor(flat, mine)
            assert torch.equal(flat, torch.cat(everyone).view(-1))
        crossed = values(
            rank, 9, (4, 6), torch.float32
        ).T  # rows that do not lie one after the other
        assert torch.equal(
            ranks.all_reduce(crossed.clone()),
            sum(values(other, 9, (4, 6), torch.float32).T for other in range(world)),
        )

    on_ranks(world, body, tmp_path)


def test_no_rank_reads_a_message_too_early_or_too_late(tmp_path):
    """Ranks that are late by turns, calls of other kinds and sizes in between: each sees each
    call's own values.
    """

    def body(rank):
        ranks, late = shared.Ranks(dist.group.WORLD), random.Random(rank)
        for call in range(2000):
            if late.random() < 0.02:
                time.sleep(late.random() * 0.003)
            x = torch.full((1 + call % 7,), float(call * 3 + rank))
            assert ranks.all_gather(x, 0).view(3, -1)[:, 0].tolist() == [
                float(call * 3 + other) for other in range(3)
            ]
            assert (
                call % 3
                or ranks.broadcast(torch.tensor([call if rank == 1 else -1]), 1).item() == call
            )

    on_ranks(3, body, tmp_path)


def test_groups_have_memory_of_their_own_and_leave_no_file(tmp_path):
    before = set(os.listdir("/dev/shm"))

    def body(rank):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine, everyone = shared.Ranks(halves[rank // 2]), shared.Ranks(dist.group.WORLD)
        for _ in range(20):
            assert mine.all_reduce(torch.tensor([rank])).item() == (1 if rank < 2 else 5)
            assert everyone.all_reduce(torch.tensor([rank])).item() == 6

    on_ranks(4, body, tmp_path)
    assert set(os.listdir("/dev/shm")) <= before


def test_ranks_that_have_come_apart_are_told(tmp_path):
    def body(rank):
        ranks = shared.Ranks(dist.group.WORLD)
        with pytest.raises(
            RuntimeError,
            match=(
                r"rank 1 calls all_gather of 8 bytes where rank 0 calls all_reduce of 16"
                if rank == 0
                else "rank 0 calls all_reduce of 16 bytes where rank 1 calls all_gather of 8"
            ),
        ):
            ranks.all_reduce(torch.zeros(4)) if rank == 0 else ranks.all_gather(torch.zeros(2))

    on_ranks(2, body, tmp_path)


def test_memory_that_may_not_be_opened_is_one_sentence(tmp_path):
    def body(rank):
        with (
            mock.patch.object(shared.os, "getpid", lambda: 1 << 30),
            pytest.raises(RuntimeError) as raised,
        ):
            shared.Ranks(dist.group.WORLD)
        assert rank == 0 or isinstance(raised.value, Refused)
        assert (
            rank == 0
            or str(raised.value)
            == "the ranks cannot share memory (No such file or directory): set"
            " DRAFT_TP_SHARED_MEMORY=off"
        )

    on_ranks(2, body, tmp_path)


def test_what_does_not_fit_goes_another_way():
    assert (
        shared.Ranks.fits(torch.zeros(1 << 18))
        and not shared.Ranks.fits(torch.zeros((1 << 18) + 1))
        and not shared.Ranks.fits(torch.zeros(0))
    )
    assert shared.usable({}) and not shared.usable({"DRAFT_TP_SHARED_MEMORY": "off"})
