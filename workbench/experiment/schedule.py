"""The schedule of an experiment: which block runs when, on which arm, with which prompts. How an
arm is reached is not its business.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
    position, and followed each arm (itself included), equally often: a multiple of 2 for two arms,
    6 for three, 8 for four, 10 for five, 12 for six.
    """
    period = len(_rows(arms))
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

    Two arms run A B B A A B B A ..., more in the order of ``_orders``; ``balanced`` says which
    numbers of pairs are balanced exactly. The arm that is measured first is warmed up last, so that
    the first block follows its own arm's as well. The blocks of a pair have the same prompts;
    between pairs they are fresh while the set lasts. Then it is shuffled anew, unless ``reuse`` is
    false: the blocks of a pair repeat each other's prompts in any case, so caches must be off or
    flushed between blocks, and then a repeat is as good as new. Within a block no prompt comes
    twice, and warm-up prompts are never measured. More pairs of the same seed begin with the same
    ones.

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
    warm_seeds = [rng.randrange(2**31) for _ in arms]
    orders = list(islice(_orders(list(arms), rng), pairs))
    plan = _warmups(experiment, _last(arms, orders[0][0]), warmup, warm_seeds, 0)
    for pair, order in enumerate(orders, first_pair):
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
        each of its starts runs ``blocks_per_start`` blocks of every one of them, in an order that
        goes on from start to start (``_orders``). Sides run A B B A A B ..., more as arms do. Each
        start has its own start_group and begins with one warm-up block an arm. All sides of a round
        get the same prompts, block by block. With ``same_prompts`` every round does too: starts are
        compared by their means, where easy and hard prompts would pass for fast and slow starts.
        Without, each round has fresh ones. Prompts otherwise, and ``leave``, as in ``paired``.
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
            warm_seeds = [rng.randrange(2**31) for _ in side]
            orders = list(islice(arm_orders[side], blocks_per_start))
            plan += _warmups(experiment, _last(side, orders[0][0]), warmup, warm_seeds, group)
            for pair, ((prompts, block_seed), order) in enumerate(
                zip(blocks, orders), turn * blocks_per_start
            ):
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
                    for position, arm in enumerate(order)
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
    """Endless orders of the items in which each is in each position equally often, and each block
    follows one of each item, its own included, equally often: within an order every other item,
    and from one order to the next the item itself.

    The orders are rows of Williams' squares (``_rows``); a row is followed by one that begins with
    the item it ended with. Rows as arrows from their first to their last item have as many coming
    to an item as going from it, so that one walk takes each row once and ends where it began
    (Euler's circuit, by Hierholzer's way). For two items this is A B B A.
    """
    first = None if begin is None else items[begin]
    items = rng.sample(list(items), len(items))
    if first is not None:
        items.insert(0, items.pop(items.index(first)))
    circle = _circle(_rows(len(items)))
    while True:
        for row in circle:
            yield [items[place] for place in row]


def _rows(k: int) -> list[tuple[int, ...]]:
    """Orders of k items in which each is in each position, and follows each other one, equally
    often.

    Williams, Experimental designs balanced for the estimation of residual effects of treatments,
    Aust. J. Sci. Res. A 2 (1949) 149: rows 0, 1, k-1, 2, k-2, ... shifted. One square does for even
    k, for odd k it takes the reverse as well. A row of an even square ends k/2 from where it
    begins, so that its rows fall into k/2 circles of two; from four items on the same square under
    other names links them.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(k)]
    square = [tuple((z + shift) % k for z in zigzag) for shift in range(k)]
    if k < 3:
        return square
    if k % 2:
        return square + [row[::-1] for row in square]
    half = k // 2
    other = {i: half + i for i in range(half)} | {half + i: (i + 1) % half for i in range(half)}
    return square + [tuple(other[place] for place in row) for row in square]


def _circle(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The rows in an order in which each begins with what the one before ended with, the first one
    after the last too; from item 0.
    """
    going: dict[int, list[tuple[int, ...]]] = {}
    for row in rows:
        going.setdefault(row[0], []).append(row)
    path: list[tuple[int, ...] | None] = [None]
    found: list[tuple[int, ...]] = []
    while path:
        at = path[-1][-1] if path[-1] else 0
        if going.get(at):
            path.append(going[at].pop())
        elif (row := path.pop()) is not None:
            found.append(row)
    return found[::-1]


def _last(arms: Sequence[str], arm: str) -> list[str]:
    """The arms with this one last."""
    return [*(a for a in arms if a != arm), arm]


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
    experiment: str,
    arms: Sequence[str],
    prompts: tuple[int, ...],
    seeds: Sequence[int],
    group: int,
) -> list[Planned]:
    return [
        Planned(experiment, "warmup", arm, None, 0, prompts, seed, group)
        for arm, seed in zip(arms, seeds)
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
