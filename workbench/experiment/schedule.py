"""The schedule of an experiment: which block runs when, on which arm, with which prompts. How an
arm is reached is not its business.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput

T = TypeVar("T")


@dataclass(frozen=True)
class Planned:
    """One block to be run.

    role: measure, warmup, parity, search or trace, as in workbench.experiment.runlog.Block.
    pair: number of the pair of blocks that share these prompts (None for a warm-up).
    position: place in time among the blocks of that pair, from 0.
    prompts: indexes into the prompt set.
    seed: for the server's sampling, equal within a pair.
    start_group: blocks of one number may share one server start, blocks of two numbers must not.
    """

    experiment: str
    role: str
    arm: str
    pair: int | None
    position: int
    prompts: tuple[int, ...]
    seed: int
    start_group: int


def with_control(arms: Sequence[str], of: str | None = None) -> tuple[str, ...]:
    """The arms and a replica of one of them (default: shared where present, else the first), the
    experiment's A/A control.
    """
    of = of or ("shared" if "shared" in arms else arms[0])
    if any(
        (arm := Arm.parse(name)).replica and arm.configuration == Arm.parse(of).configuration
        for name in arms
    ):
        return tuple(arms)
    return (*arms, replace(Arm.parse(of), replica=2).name)


def balanced(pairs: int, arms: int) -> int:
    """The least number of pairs, not below ``pairs``, after which each of so many arms was in each
    position equally often.
    """
    period = arms if arms % 2 == 0 else 2 * arms
    return -(-pairs // period) * period


def paired(
    experiment: str,
    arms: Sequence[str],
    pairs: int,
    prompts_available: int,
    requests_per_block: int,
    warmup_requests: int,
    seed: int,
    *,
    reuse: bool = True,
    first_pair: int = 0,
    leave: int = 0,
) -> list[Planned]:
    """Blocks of all arms, alternating: one warm-up block an arm, then ``pairs`` times one block of
    each arm.

    Two arms run A B B A A B B A ..., more in Williams' order (``_orders``); ``balanced`` says which
    numbers of pairs are balanced exactly. The blocks of a pair have the same prompts; between pairs
    they are fresh while the set lasts. Then it is shuffled anew, unless ``reuse`` is false: the
    blocks of a pair repeat each other's prompts in any case, so caches must be off or flushed
    between blocks, and then a repeat is as good as new. Within a block no prompt comes twice, and
    warm-up prompts are never measured. More pairs of the same seed begin with the same ones.

    first_pair, leave: for a later part of an experiment of the same seed: the number of its first
    pair, and how many of the prompts to measure with (of which a set too small begins again) are
    left to the parts before it.

    Raises: BadInput when arms repeat, a number is below 1, or the prompts do not suffice.
    """
    _check(arms, pairs=pairs, requests_per_block=requests_per_block)
    rng = random.Random(seed)
    warmup, measured = _prompts(
        rng, prompts_available, requests_per_block, warmup_requests, reuse, leave
    )
    plan = _warmups(experiment, arms, warmup, rng, 0)
    for pair, order in zip(range(first_pair, first_pair + pairs), _orders(list(arms), rng)):
        prompts, block_seed = next(measured), rng.randrange(2**31)
        plan += [
            Planned(experiment, "measure", arm, pair, position, prompts, block_seed, 0)
            for position, arm in enumerate(order)
        ]
    return plan


def by_starts(
    experiment: str,
    arms: Sequence[str | Sequence[str]],
    starts: int,
    blocks_per_start: int,
    prompts_available: int,
    requests_per_block: int,
    warmup_requests: int,
    seed: int,
    *,
    reuse: bool = True,
    same_prompts: bool = True,
    leave: int = 0,
    begin: int | None = None,
) -> list[Planned]:
    """Blocks for a comparison that crosses restarts: ``starts`` rounds, each of one server start a
    side, sides alternating.

    arms: the sides; a side that is itself a sequence of arms is one server that holds them all, and
        each of its starts runs ``blocks_per_start`` blocks of every one of them, in balanced order.
        Sides run A B B A A B ... (Williams' order for more). Each start has its own start_group and
        begins with one warm-up block an arm. All sides of a round get the same prompts, block by
        block. With ``same_prompts`` every round does too: starts are compared by their means, where
        easy and hard prompts would pass for fast and slow starts. Without, each round has fresh
        ones. Prompts otherwise, and ``leave``, as in ``paired``.
    begin: the side that comes first, where its server is up already.

    Raises: BadInput as ``paired``.
    """
    sides = [(side,) if isinstance(side, str) else tuple(side) for side in arms]
    _check(
        [arm for side in sides for arm in side],
        starts=starts,
        blocks_per_start=blocks_per_start,
        requests_per_block=requests_per_block,
    )
    rng = random.Random(seed)
    warmup, measured = _prompts(
        rng, prompts_available, requests_per_block, warmup_requests, reuse, leave
    )
    side_orders = _orders(sides, rng, begin)
    arm_orders = {side: _orders(list(side), rng) for side in sides}
    plan: list[Planned] = []
    blocks: list[tuple[tuple[int, ...], int]] = []
    for turn in range(starts):
        if not (blocks and same_prompts):
            blocks = [(next(measured), rng.randrange(2**31)) for _ in range(blocks_per_start)]
        before = 0
        for place, side in enumerate(next(side_orders)):
            group = turn * len(sides) + place
            plan += _warmups(experiment, side, warmup, rng, group)
            for pair, (prompts, block_seed) in enumerate(blocks, turn * blocks_per_start):
                plan += [
                    Planned(
                        experiment,
                        "measure",
                        arm,
                        pair,
                        before + position,
                        prompts,
                        block_seed,
                        group,
                    )
                    for position, arm in enumerate(next(arm_orders[side]))
                ]
            before += len(side)
    return plan


def parity(
    experiment: str, arms: Sequence[str], prompts: Sequence[int], seed: int, repeats: int = 2
) -> list[Planned]:
    """Blocks whose output tokens are compared: every arm ``repeats`` times on the same prompts, so
    that each arm is its own control.

    Each arm has its own start_group; ``pair`` counts the repeats. At which concurrency they run is
    the caller's choice.
    """
    _check(arms, repeats=repeats)
    return [
        Planned(experiment, "parity", arm, repeat, 0, tuple(prompts), seed, group)
        for group, arm in enumerate(arms)
        for repeat in range(repeats)
    ]


def _orders(items: Sequence[T], rng: random.Random, begin: int | None = None) -> Iterator[list[T]]:
    """Endless orders of the items in which each is in each position, and follows each other one,
    equally often.

    Williams, Experimental designs balanced for the estimation of residual effects of treatments,
    Aust. J. Sci. Res. A 2 (1949) 149: rows 0, 1, k-1, 2, k-2, ... shifted by r. Each row is
    followed by its reverse, so that a linear drift cancels within two pairs, as in A B B A.
    Balanced after k rows for even k (whose square holds its own reverses), 2k for odd k.
    """
    k, first, items = (
        len(items),
        None if begin is None else items[begin],
        rng.sample(list(items), len(items)),
    )
    if first is not None:
        items.insert(0, items.pop(items.index(first)))
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(k)]
    while True:
        for shift in range(k if k % 2 else k // 2):
            row = [items[(z + shift) % k] for z in zigzag]
            yield row
            yield row[::-1]


def _prompts(
    rng: random.Random, available: int, per_block: int, warmup: int, reuse: bool, leave: int = 0
) -> tuple[tuple[int, ...], Iterator[tuple[int, ...]]]:
    """The warm-up prompts, and an endless supply of prompts for one pair after another, disjoint
    from them.
    """
    if available < warmup + per_block:
        raise BadInput(
            "workload.prompts",
            f"{available} prompts are fewer than {warmup} to warm up and {per_block} for a block",
            "give more prompts or lower requests_per_block",
        )
    order = rng.sample(range(available), available)
    pool = order[warmup:]
    pool = pool[leave % len(pool) :] + pool[: leave % len(pool)]

    def supply() -> Iterator[tuple[int, ...]]:
        while True:
            for at in range(0, len(pool) - per_block + 1, per_block):
                yield tuple(pool[at : at + per_block])
            if not reuse:
                raise BadInput(
                    "plan.pairs",
                    f"the {len(pool)} prompts to measure with are used up",
                    "give more or plan fewer pairs",
                )
            rng.shuffle(pool)

    return tuple(order[:warmup]), supply()


def _warmups(
    experiment: str, arms: Sequence[str], prompts: tuple[int, ...], rng: random.Random, group: int
) -> list[Planned]:
    return [
        Planned(experiment, "warmup", arm, None, 0, prompts, rng.randrange(2**31), group)
        for arm in arms
        if prompts
    ]


def _check(arms: Sequence[str], **counts: int) -> None:
    names = [Arm.parse(name).name for name in arms]
    if not names or len(set(names)) < len(names):
        raise BadInput(
            "plan.arms",
            f"{', '.join(names) or 'no arm'} cannot be scheduled",
            "name each arm once; the same configuration again is a replica such as shared#2",
        )
    for field, count in counts.items():
        if count < 1:
            raise BadInput(field, f"{count} is below 1", "ask for at least 1")
