"""The plan of 06: the best named setting by halving, then that against none. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from workbench.experiment import halving, schedule
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.metrics import tokens_per_s
from workbench.experiment.names import COLLECTIVES
from workbench.experiment.plans import Task
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Failure, Line
from workbench.experiment.sweeps import Plan, task, warmups


def settings_arms(profile: Profile) -> tuple[str, ...]:
    """The arms that every setting of the communication layer is tried with: the profile's, else
    shared and the first own-N of the plan.
    """
    if profile.sweep.settings_arms:
        return profile.sweep.settings_arms
    arms = [arm for arm in profile.arms if arm == Arm(arm.placement, arm.group) and arm.speculates]
    first = {arm.placement: arm.name for arm in reversed(arms)}
    if not first:
        raise BadInput("plan.arms", "no speculating arm is in it", "name shared or own-N")
    return tuple(first[placement] for placement in ("shared", "own") if placement in first)


def collectives(profile: Profile, prompts: int, settings: Sequence[str]) -> Plan:
    """06_collectives: the best of the named settings, by halving over rounds of server starts;
    then, by fresh starts, that against none.

    A setting is a server's own, so the start is the unit. A setting whose server does not start is
    left out, as the log says.
    """
    return partial(_collectives, profile, prompts, tuple(settings))


def _collectives(
    profile: Profile, prompts: int, settings: tuple[str, ...], records: Sequence[Line]
) -> list[Task]:
    tasks: list[Task] = []
    plain, left, turn, group = settings_arms(profile), settings, 0, 0
    while len(left) > 1:
        tasks += [
            _searching(task, turn, group, profile.plan.blocks_per_start)
            for task in _starts(profile, prompts, [_with(plain, name) for name in left], 1, turn)
        ]
        turn, group = turn + 1, group + len(left)
        logs = {
            name: round_speeds(records, _with(plain, name), turn, profile.plan.blocks_per_start)
            for name in left
        }
        # A setting that failed is out from the round on that it has no figures of: what was decided
        # before stays decided.
        logs = {
            name: rounds
            for name, rounds in logs.items()
            if rounds is not None or name not in failed(records)
        }
        if None in logs.values():
            return tasks
        left = tuple(name for name in left if name in halving.better_half(logs)) if logs else ()
    sides = [schedule.with_control(plain, plain[0]), *(_with(plain, name) for name in left)]
    return (
        tasks
        + [
            _in_group(task, group + task.planned.start_group)
            for task in _starts(profile, prompts, sides, profile.plan.starts, turn)
        ]
        if left
        else tasks
    )


def _starts(
    profile: Profile, prompts: int, sides: Sequence[Sequence[str]], starts: int, turn: int
) -> list[Task]:
    plan = schedule.by_starts(
        COLLECTIVES,
        sides,
        starts,
        profile.plan.blocks_per_start,
        prompts,
        profile.workload.requests_per_block,
        warmups(profile),
        profile.plan.seed + turn,
    )
    return [task(profile, p, COLLECTIVES) for p in plan]


def _searching(task: Task, turn: int, group: int, each: int) -> Task:
    """A task of one round of starts, as a part of the search."""
    p = task.planned
    measured = {} if p.role == "warmup" else {"role": "search", "pair": p.pair + turn * each}
    return replace(task, planned=replace(p, start_group=group + p.start_group, **measured))


def _in_group(task: Task, group: int) -> Task:
    return replace(task, planned=replace(task.planned, start_group=group))


def _with(arms: Iterable[str], setting: str) -> tuple[str, ...]:
    return tuple(replace(Arm.parse(name), comm=setting).name for name in arms)


def failed(records: Sequence[Line]) -> dict[str, str]:
    """{setting: why its server did not start}."""
    found = {}
    for r in records:
        if isinstance(r, Failure) and r.what == "setting" and (comm := Arm.parse(r.arm).comm):
            found.setdefault(comm, r.reason)
    return found


def round_speeds(
    records: Sequence[Line], arms: Sequence[str], rounds: int, each: int
) -> dict[int, float] | None:
    """The log of tokens/s in each of the search's first rounds of starts, over the arms of one
    setting and their ``each`` blocks a start; None
    while one is not measured."""
    logs = {
        (b.arm, b.pair): math.log(speed)
        for b in records
        if isinstance(b, Block)
        and (b.experiment, b.role) == (COLLECTIVES, "search")
        and b.arm in arms
        and b.pair < rounds * each
        and (speed := tokens_per_s([b]))
    }
    if len(logs) < rounds * each * len(arms):
        return None
    return {
        turn: (
            sum(log for (_, pair), log in logs.items() if pair // each == turn) / (each * len(arms))
        )
        for turn in range(rounds)
    }
