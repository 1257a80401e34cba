"""The plans of 05_steps and 06_collectives: a search by successive halving, then the best compared
afresh. Pure functions of the log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from workbench.experiment import halving, schedule
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.halving import Logs
from workbench.experiment.metrics import tokens_per_s
from workbench.experiment.names import STEPS, at_load
from workbench.experiment.plans import WARMUP_REQUESTS, Task, each_start, together
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Line
from workbench.experiment.schedule import Planned

Plan = Callable[
    [Sequence[Line]], list[Task]
]  # all tasks that the log has decided on so far, those that it holds included


# ------------------------------------------------------------------ 05_steps


@dataclass(frozen=True)
class Candidates:
    """The candidates of one server, which shares topk: {placement: arms of every step count and
    tree that it can draft}.
    """

    topk: int
    arms: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for names in self.arms.values() for name in names)


def candidates(profile: Profile) -> tuple[Candidates, ...]:
    """The candidates of 05_steps, chains last. A tree that its steps cannot fill is none; the
    profile's own setting goes by its bare name.
    """
    placements = dict.fromkeys(
        Arm(arm.placement, arm.group) for arm in profile.arms if arm.speculates
    )
    found = []
    for topk in sorted(profile.sweep.topks, reverse=True):
        shapes = [
            (steps, tokens)
            for steps in profile.sweep.step_counts
            for tokens in ((steps + 1,) if topk == 1 else profile.sweep.tree_tokens)
        ]
        arms = {
            p.name: tuple(
                dict.fromkeys(
                    _named(profile, arm)
                    for steps, tokens in shapes
                    if profile.speculation.of(arm := _arm(profile, p, steps, topk, tokens)).fills
                )
            )
            for p in placements
        }
        if any(arms.values()):
            found.append(
                Candidates(topk, {placement: names for placement, names in arms.items() if names})
            )
    if not found:
        raise BadInput(
            "plan.arms",
            "no speculating arm can be drafted with any of sweep.step_counts, topks and"
            " tree_tokens",
            "name shared or own-N, or other numbers",
        )
    return tuple(found)


def _arm(profile: Profile, placement: Arm, steps: int, topk: int, tokens: int) -> Arm:
    own = profile.speculation
    return replace(
        placement,
        steps=None if steps == own.steps else steps,
        topk=None if topk == own.topk else topk,
        draft_tokens=(
            None if topk == 1 or (tokens == own.draft_tokens and topk == own.topk) else tokens
        ),
    )


def _named(profile: Profile, arm: Arm) -> str:
    bare = Arm(arm.placement, arm.group)
    return (bare if profile.speculation.of(arm) == profile.speculation else arm).name


def loads(profile: Profile, longest: int = 0) -> tuple[tuple[int, ...], dict[int, str]]:
    """The requests at once of sweep.loads that the server takes at once, and {load: why not}.
    longest: tokens of the longest prompt.

    More would wait for each other, and a load that is not reached would pass for one that was.
    """
    most, room = profile.number("max-running-requests"), profile.number("max-total-tokens")
    each = (
        longest + profile.workload.max_new_tokens + max(profile.sweep.step_counts) + 1
    )  # as in preflight.room
    skipped = {}
    for load in profile.sweep.loads:
        if most is not None and load > most:
            skipped[load] = f"the server takes {most:.0f} requests at once (max-running-requests)"
        elif room is not None and load * each > room:
            skipped[load] = (
                f"its {load * each} tokens are more than the {room:.0f} that the server keeps"
                " (max-total-tokens)"
            )
    return tuple(load for load in profile.sweep.loads if load not in skipped), skipped


def steps(profile: Profile, prompts: int, longest: int = 0) -> Plan:
    """05_steps: the best step count (and tree) of every placement, by halving in one server; then,
    by fresh blocks, each against the profile's own setting and no speculation, at every load.
    prompts: how many there are; longest: tokens of the longest.
    """
    return partial(_steps, profile, prompts, longest)


def _steps(profile: Profile, prompts: int, longest: int, records: Sequence[Line]) -> list[Task]:
    tasks: list[Task] = []
    winners: list[str] = []
    searched = 0
    for group, served in enumerate(candidates(profile)):
        searches, best, used = _search(
            profile,
            prompts,
            records,
            served,
            group,
            _references(profile) if served.topk == profile.speculation.topk else (),
        )
        tasks, searched = tasks + searches, max(searched, used)
        if best is None:
            return tasks
        winners += best
    return tasks + _compared(profile, prompts, winners, group, searched, loads(profile, longest)[0])


def _references(profile: Profile) -> tuple[str, str]:
    """The profile's own setting, which the best are compared with, and its control."""
    first = next(Arm(a.placement, a.group) for a in profile.arms if a.speculates)
    return first.name, replace(first, replica=2).name


def _search(
    profile: Profile,
    prompts: int,
    records: Sequence[Line],
    served: Candidates,
    group: int,
    held: Sequence[str],
) -> tuple[list[Task], list[str] | None, int]:
    """The search in one server: its tasks so far, the best arm of each placement (None while it is
    not known), the prompts that it used.

    held: arms that the server is to hold beside the candidates, for the comparison that it goes on
        with.
    """
    left, tasks, pair, pairs = dict(served.arms), [], 0, profile.sweep.search_pairs
    size = profile.workload.requests_per_block
    warmed = schedule.paired(
        STEPS,
        tuple(dict.fromkeys([*served.names, *held])),
        1,
        prompts,
        size,
        warmups(profile),
        profile.plan.seed,
    )
    tasks += [
        task(profile, replace(p, start_group=group), STEPS) for p in warmed if p.role == "warmup"
    ]
    while any(len(names) > 1 for names in left.values()):
        still_in = [name for names in left.values() if len(names) > 1 for name in names]
        plan = schedule.paired(
            STEPS,
            still_in,
            pairs,
            prompts,
            size,
            warmups(profile),
            profile.plan.seed,
            first_pair=pair,
            leave=pair * size,
        )
        tasks += [
            task(profile, replace(p, start_group=group, role="search"), STEPS)
            for p in plan
            if p.role == "measure"
        ]
        pair, pairs = pair + pairs, 2 * pairs
        logs = speeds(records, STEPS, still_in, pair)
        if logs is None:
            return tasks, None, pair * size
        left = {place: _half(names, logs) for place, names in left.items()}
    return tasks, [names[0] for names in left.values()], pair * size


def _half(names: tuple[str, ...], logs: Logs) -> tuple[str, ...]:
    """Those that go on, in the order in which they are named: who is ahead says nothing about when
    to be measured.
    """
    kept = names if len(names) == 1 else halving.better_half({name: logs[name] for name in names})
    return tuple(name for name in names if name in kept)


def speeds(
    records: Sequence[Line], experiment: str, arms: Iterable[str], pairs: int
) -> Logs | None:
    """Logs of each arm's tokens/s in the search by (start, pair); None while one of its pairs is
    not measured. Where an interruption left no
    pair with all arms in one start, by pair alone."""
    found: dict[str, dict] = {name: {} for name in arms}
    for b in records:
        if (
            isinstance(b, Block)
            and (b.experiment, b.role) == (experiment, "search")
            and b.arm in found
            and b.pair < pairs
            and (speed := tokens_per_s([b]))
        ):
            found[b.arm][b.start, b.pair] = math.log(speed)
    if any({pair for _, pair in units} < set(range(pairs)) for units in found.values()):
        return None
    whole = set.intersection(*map(set, found.values()))
    return (
        found
        if whole
        else {
            name: {pair: log for (_, pair), log in units.items()} for name, units in found.items()
        }
    )


def _compared(
    profile: Profile,
    prompts: int,
    winners: Sequence[str],
    group: int,
    leave: int,
    at: Sequence[int],
) -> list[Task]:
    """The best settings against the profile's own and against none, at every load: one server of
    the last search goes on as the first.
    """
    reference, control = _references(profile)
    arms = [Arm.parse(name) for name in dict.fromkeys([reference, *winners, control])]
    sides = [[arm.name for arm in served] for served in together(profile, arms)]
    begin = next(place for place, side in enumerate(sides) if winners[-1] in side)
    sides += [["none"]] if profile.sweep.against_none and "none" in profile.plan.arms else []
    found: list[Task] = []
    for load in at:
        size = max(profile.workload.requests_per_block, load)
        plan = schedule.by_starts(
            at_load(load),
            sides,
            profile.plan.starts,
            each_start(profile),
            prompts,
            size,
            warmups(profile),
            profile.plan.seed,
            leave=leave,
            begin=begin,
        )
        found += [
            task(profile, replace(p, start_group=group + p.start_group), STEPS, load) for p in plan
        ]
    return sorted(
        found, key=lambda task: task.planned.start_group
    )  # stable: load by load within a start


def warmups(profile: Profile) -> int:
    """Prompts to warm up with, the same at every load: as many as are ever sent at once."""
    return max(WARMUP_REQUESTS, profile.workload.concurrency, *loads(profile)[0])


# ------------------------------------------------------------------ 06_collectives


def task(profile: Profile, planned: Planned, family: str, load: int | None = None) -> Task:
    return Task(
        planned,
        load or profile.workload.concurrency,
        profile.workload.max_new_tokens,
        family,
        bool(Arm.parse(planned.arm).comm),
        load,
    )
