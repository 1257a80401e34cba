"""What each notebook's experiment runs: blocks of the schedule, each with its concurrency and length. Pure."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from workbench import schedule
from workbench.arms import Arm
from workbench.profile import Profile
from workbench.schedule import Planned

WARMUP_REQUESTS = 2          # enough to reach every shape of the workload once; never measured


@dataclass(frozen=True)
class Task:
    """A planned block, with how many requests are sent at once and how many tokens each is asked for."""

    planned: Planned
    concurrency: int
    max_new_tokens: int


def baseline(profile: Profile, prompts: int) -> list[Task]:
    """03_baseline: the plain server against itself, alternating in one start: its throughput and the noise between blocks."""
    arms = schedule.with_control(("none",))
    plan = schedule.paired("baseline", arms, schedule.balanced(profile.plan.pairs, len(arms)), prompts,
                           profile.workload.requests_per_block, WARMUP_REQUESTS, profile.plan.seed)
    return [_measured(profile, planned) for planned in plan]


def draft_tp(profile: Profile, prompts: int) -> list[Task]:
    """04_draft_tp: every arm of the profile and a control across alternating starts, and their answers compared token by token.

    The comparison crosses restarts, so the start is its unit. Each arm's first start also answers the parity prompts, one by one and
    several at once; further servers answer them as a tree and without agreement, to compare tokens and count collectives.
    """
    sides = schedule.with_control(profile.plan.arms)
    plan = schedule.by_starts("draft_tp", sides, profile.plan.starts, profile.plan.blocks_per_start, prompts,
                              profile.workload.requests_per_block, WARMUP_REQUESTS, profile.plan.seed)
    checked = tuple(range(min(profile.plan.parity_prompts, prompts)))
    tasks: list[Task] = []
    compared: set[str] = set()
    for _, blocks in groupby(plan, key=lambda planned: planned.start_group):
        blocks = list(blocks)
        tasks += [_measured(profile, planned) for planned in blocks]
        arm = Arm.parse(blocks[0].arm)
        if not arm.replica and arm.name not in compared:
            compared.add(arm.name)
            tasks += _parity(profile, arm, checked, blocks[0].start_group)
    group = plan[-1].start_group
    for group, arm in enumerate(variants(profile.arms), group + 1):
        tasks += _parity(profile, arm, checked, group)
    return tasks


def variants(arms: Iterable[Arm]) -> list[Arm]:
    """Settings of the speculating arms whose tokens are compared but not their speed: a tree, and (own-N) no agreement."""
    speculating = [arm for arm in arms if arm.speculates and not arm.replica]
    trees = [replace(arm, topk=2, draft_tokens=6) for arm in speculating if arm.topk in (None, 1)]
    return trees + [replace(arm, agreement="off") for arm in speculating if arm.placement == "own" and arm.agreement is None]


def _measured(profile: Profile, planned: Planned) -> Task:
    return Task(planned, profile.workload.concurrency, profile.workload.max_new_tokens)


def _parity(profile: Profile, arm: Arm, prompts: tuple[int, ...], group: int) -> list[Task]:
    # The plain server runs twice: how far it differs from itself is the control (field report F29).
    repeats = 1 if arm.speculates else 2
    return [Task(Planned("draft_tp", "parity", arm.name, repeat, 0, prompts, profile.plan.seed, group), concurrency,
                 profile.plan.parity_tokens)
            for repeat in range(repeats) for concurrency in (1, 4)]
