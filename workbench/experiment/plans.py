"""What each notebook's experiment runs: blocks of the schedule, each with its concurrency and
length. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import mean

from workbench.experiment import schedule
from workbench.experiment.arms import Arm
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Failure, Line, Start
from workbench.experiment.schedule import Planned

PARITY_CONCURRENCY = (1, 4)  # one by one, and several at once
TRACE_TOKENS = 24  # some six to twenty cycles under the profiler
WARMUP_REQUESTS = 2  # enough to reach every shape of the workload once; never measured


@dataclass(frozen=True)
class Task:
    """A planned block, with how many requests are sent at once and how many tokens each is asked
    for.

    family: experiments of one family share the servers of equal start groups (its own experiment
        where empty).
    optional: where the server of its arm does not start, the plan goes on without that arm.
    load: the requests at once at which 05_steps compares; None for what it does not compare so.
    """

    planned: Planned
    concurrency: int
    max_new_tokens: int
    family: str = ""
    optional: bool = False
    load: int | None = None

    @property
    def group(self) -> tuple[str, int]:
        """Tasks of one group may share a start, tasks of two must not."""
        return self.family or self.planned.experiment, self.planned.start_group


def numbered(tasks: Iterable[Task]) -> list[tuple[int, Task]]:
    """Each task with its number in its experiment, by which the log knows its block."""
    numbers: Counter[str] = Counter()
    found = []
    for task in tasks:
        found.append((numbers[task.planned.experiment], task))
        numbers[task.planned.experiment] += 1
    return found


def left(
    profile: Profile, records: Sequence[Line], tasks: Iterable[Task]
) -> list[tuple[int, Task]]:
    """The tasks that are not in the log, each with its number; without those of arms that the run
    goes on without.
    """
    done = {(r.experiment, r.block) for r in records if isinstance(r, Block)}
    out = {
        (r.experiment, r.arm)
        for r in records
        if isinstance(r, Failure) and _goes_on_without(profile, r)
    }
    return [
        (number, task)
        for number, task in numbered(tasks)
        if (task.planned.experiment, number) not in done
        and (task.planned.experiment, task.planned.arm) not in out
    ]


def _goes_on_without(profile: Profile, failure: Failure) -> bool:
    """Whether the run goes on without the arm that failed."""
    if failure.what == "setting":
        return True
    return profile.plan.on_failure == "go_on" and failure.what != "stopped"


def arms_of(tasks: Iterable[Task]) -> tuple[str, ...]:
    """The arms of the tasks, each once, in their order."""
    return tuple(dict.fromkeys(task.planned.arm for task in tasks))


def baseline(profile: Profile, prompts: int) -> list[Task]:
    """03_baseline: the plain server against itself, alternating in each start: its throughput and
    the noise of a difference.
    """
    plan = schedule.by_starts(
        "baseline",
        [schedule.with_control(("none",))],
        profile.plan.starts,
        each_start(profile),
        prompts,
        profile.workload.requests_per_block,
        WARMUP_REQUESTS,
        profile.plan.seed,
    )
    return [_measured(profile, planned) for planned in plan]


def each_start(profile: Profile) -> int:
    """Pairs of blocks in each server start that holds what is compared."""
    plan = profile.plan
    return max(plan.blocks_per_start, math.ceil(plan.pairs / plan.starts))


def balanced_pairs(profile: Profile) -> tuple[int, int]:
    """Pairs of blocks of the plan's hot arms, and the least number from there on after which each
    arm followed each arm equally often (``schedule.balanced``); equal where every arm has starts of
    its own, which follow nothing.
    """
    arms = [Arm.parse(name) for name in schedule.with_control(profile.plan.arms)]
    pairs = profile.plan.starts * each_start(profile)
    held = max(map(len, servers(profile, arms)))
    return pairs, schedule.balanced(pairs, held) if held > 1 else pairs


def draft_tp(profile: Profile, prompts: int) -> list[Task]:
    """04_draft_tp: every arm of the profile and a control, in alternating starts, and their answers
    compared token by token.

    The speculating arms of a start share its server and are compared in it by pairs of blocks, of
    which each start gives one mean; none has starts of its own, so what it is compared with crosses
    restarts. With ``plan.restart`` every arm has starts of its own. The first start that can hold
    an arm also answers the parity prompts with it, one by one and several at once; so do trees and
    own-N without agreement, whose speed is not compared. Where SGLang holds the accept length its
    answers are made up, and none are compared. With ``plan.traces`` the first start of an arm ends
    with a request under SGLang's profiler.
    """
    arms = [Arm.parse(name) for name in schedule.with_control(profile.plan.arms)]
    sides = [[arm.name for arm in served] for served in servers(profile, arms)]
    wanted = profile.plan.blocks_per_start if profile.plan.restart else each_start(profile)
    plan = schedule.by_starts(
        "draft_tp",
        sides,
        profile.plan.starts,
        wanted,
        prompts,
        profile.workload.requests_per_block,
        WARMUP_REQUESTS,
        profile.plan.seed,
    )
    checked = tuple(range(min(profile.plan.parity_prompts, prompts)))
    asked = (
        []
        if profile.acceptance_simulated
        else list(
            dict.fromkeys([a for a in profile.arms if not a.replica] + variants(profile.arms))
        )
    )
    traced = [arm for arm in profile.arms if not arm.replica] if profile.plan.traces else []
    tasks: list[Task] = []
    for group, blocks in groupby(plan, key=lambda planned: planned.start_group):
        blocks = list(blocks)
        tasks += [_measured(profile, planned) for planned in blocks]
        held = [Arm.parse(planned.arm) for planned in blocks]
        for arm in [arm for arm in asked if len(servers(profile, [*held, arm])) == 1]:
            asked.remove(arm)
            tasks += _parity(profile, arm, checked, group)
        for arm in [arm for arm in traced if arm in held]:
            traced.remove(arm)
            tasks.append(
                Task(
                    Planned(
                        "draft_tp",
                        "trace",
                        arm.name,
                        None,
                        0,
                        checked[:1],
                        profile.plan.seed,
                        group,
                    ),
                    1,
                    TRACE_TOKENS,
                )
            )
    for later, served in enumerate(servers(profile, asked), group + 1):
        for arm in served:
            tasks += _parity(profile, arm, checked, later)
    return tasks


def servers(profile: Profile, arms: Iterable[Arm]) -> list[tuple[Arm, ...]]:
    """The arms by the servers of a plan: as few as can hold them, or one an arm with
    ``plan.restart``.
    """
    return (
        [(arm,) for arm in dict.fromkeys(arms)] if profile.plan.restart else together(profile, arms)
    )


def together(profile: Profile, arms: Iterable[Arm]) -> list[tuple[Arm, ...]]:
    """The arms by the servers that can hold them at once, in their own order.

    Arms without a draft are one plain server, since even a draft of 0 steps makes the target
    verify. Drafts share a server where they
    share topk: SGLang keeps one topk for buffers that outlive a switch
    (managers/overlap_utils.py:373 _maybe_init_forward_bufs, speculative/eagle_worker_v2.py:1317
    topk). A setting of the communication layer is a server's, from its start on.
    """
    kinds: dict[tuple, dict[Arm, None]] = {}
    for arm in arms:
        kinds.setdefault(_kind(profile, arm), {})[arm] = None
    return [tuple(kind) for kind in kinds.values()]


def kind(profile: Profile, task: Task) -> tuple:
    """Tasks of one group and kind can share a server."""
    arm = Arm.parse(task.planned.arm)
    return (task.planned.arm,) if profile.plan.restart else _kind(profile, arm)


def _kind(profile: Profile, arm: Arm) -> tuple:
    return arm.served_as, profile.speculation.of(arm).topk if arm.speculates else 0


def variants(arms: Iterable[Arm]) -> list[Arm]:
    """Settings of the speculating arms whose tokens are compared but not their speed: a tree, and
    (own-N) no agreement.

    No tree of an arm with a step count of its own, which may not fill one: 05_steps measures those
    that can be.
    """
    speculating = [arm for arm in arms if arm.speculates and not arm.replica and not arm.audits]
    trees = [
        replace(arm, topk=2, draft_tokens=6)
        for arm in speculating
        if arm.topk in (None, 1) and arm.steps is None
    ]
    return trees + [
        replace(arm, agreement="off")
        for arm in speculating
        if arm.placement == "own" and arm.agreement is None
    ]


def _measured(profile: Profile, planned: Planned) -> Task:
    return Task(planned, profile.workload.concurrency, profile.workload.max_new_tokens)


def _parity(profile: Profile, arm: Arm, prompts: tuple[int, ...], group: int) -> list[Task]:
    # The plain server runs twice. How far it differs from itself is the control: greedy text can
    # differ with speculation for reasons that are none of its own.
    repeats = 1 if arm.speculates else 2
    return [
        Task(
            Planned("draft_tp", "parity", arm.name, repeat, 0, prompts, profile.plan.seed, group),
            concurrency,
            profile.plan.parity_tokens,
        )
        for repeat in range(repeats)
        for concurrency in PARITY_CONCURRENCY
    ]


def left_s(records: Sequence[Line], tasks: Sequence[Task], starts: int) -> float | None:
    """Seconds for the tasks that are left and so many server starts; None before the first block of
    the run.

    A block takes as long as those of its requests, tokens and concurrency did, else as its tokens
    did in all blocks.
    """
    blocks = [r for r in records if isinstance(r, Block)]
    tokens = sum(r.completion_tokens for b in blocks for r in b.requests)
    if not tokens:
        return None
    alike: dict[tuple, list[float]] = {}
    for b in blocks:
        alike.setdefault((len(b.requests), b.concurrency, b.role == "parity"), []).append(b.seconds)
    a_token, start = (
        sum(b.seconds for b in blocks) / tokens,
        [r.seconds for r in records if isinstance(r, Start)],
    )
    times = [
        mean(
            alike.get(
                (len(t.planned.prompts), t.concurrency, t.planned.role == "parity"),
                [len(t.planned.prompts) * t.max_new_tokens * a_token],
            )
        )
        for t in tasks
    ]
    return sum(times) + starts * (mean(start) if start else 0.0)


def left_words(seconds: float | None) -> str:
    """Seconds in words, for a line of progress; "" where they are not known."""
    if seconds is None:
        return ""
    return (
        f", about {max(5, 5 * round(seconds / 5))} s left"
        if seconds < 100
        else f", about {seconds / 60:.0f} min left"
    )
