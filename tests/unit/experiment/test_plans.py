"""Plans: as few servers as can hold the arms, every comparison paired where it can be, answers
compared once an arm.
"""

from collections import Counter, defaultdict

import pytest
from simulated_runs import profile

from workbench.experiment import plans
from workbench.experiment.arms import Arm

PROMPTS = 64
TREE = "+topk=2+draft_tokens=6"


def tasks(**plan):
    return plans.draft_tp(
        profile(plan={"pairs": 6, "starts": 3, "blocks_per_start": 2, **plan}), PROMPTS
    )


def held(planned) -> list[set[str]]:
    """The arms of each start group, in order."""
    groups = defaultdict(set)
    for task in planned:
        groups[task.planned.start_group].add(task.planned.arm)
    return list(groups.values())


def names(groups) -> list[list[str]]:
    return [[arm.name for arm in group] for group in groups]


def test_arms_share_a_server_where_they_share_topk_and_speculate():
    arms = [
        Arm.parse(name)
        for name in (
            "none",
            "shared",
            f"own-1{TREE}",
            "own-2",
            "none#2",
            f"shared{TREE}",
            "own-1+steps=0",
            "shared",
        )
    ]
    assert names(plans.together(profile(), arms)) == [
        ["none", "none#2"],
        ["shared", "own-2", "own-1+steps=0"],
        [f"own-1{TREE}", f"shared{TREE}"],
    ]


def test_hot_starts_hold_every_speculating_arm_and_the_control_and_none_is_alone():
    groups = held(tasks())
    off = "own-1+agreement=off"
    assert sorted(map(sorted, groups)) == sorted(
        map(
            sorted,
            [
                {"none"},
                {"none"},
                {"none"},
                {"shared", "own-1", "shared#2", off},
                {"shared", "own-1", "shared#2"},
                {"shared", "own-1", "shared#2"},
                {f"shared{TREE}", f"own-1{TREE}"},
            ],
        )
    )


def test_restart_gives_every_arm_a_server_of_its_own():
    planned = tasks(restart=True)
    assert all(len(group) == 1 for group in held(planned))
    starts = Counter(next(iter(group)) for group in held(planned))
    assert starts == {
        "none": 3,
        "shared": 3,
        "own-1": 3,
        "shared#2": 3,
        "own-1+agreement=off": 1,
        f"shared{TREE}": 1,
        f"own-1{TREE}": 1,
    }


@pytest.mark.parametrize("restart", [False, True])
def test_each_arm_answers_the_parity_prompts_alone_and_together_and_none_twice(restart):
    asked = Counter(
        (t.planned.arm, t.concurrency) for t in tasks(restart=restart) if t.planned.role == "parity"
    )
    assert asked == {
        (arm, n): 2 if arm == "none" else 1
        for n in (1, 4)
        for arm in (
            "none",
            "shared",
            "own-1",
            "own-1+agreement=off",
            f"shared{TREE}",
            f"own-1{TREE}",
        )
    }


@pytest.mark.parametrize(
    ("plan", "pairs"),
    [({}, 6), ({"pairs": 24}, 24), ({"pairs": 7}, 9), ({"pairs": 1, "blocks_per_start": 4}, 12)],
)
def test_pairs_inside_hot_servers_are_at_least_those_asked_for(plan, pairs):
    measured = [t.planned for t in tasks(**plan) if t.planned.role == "measure"]
    for arm in ("shared", "own-1", "shared#2", "none"):
        assert sum(p.arm == arm for p in measured) == pairs
    by_pair = defaultdict(dict)
    for p in measured:
        by_pair[p.pair][p.arm] = p
    assert all(len({p.prompts for p in pair.values()}) == 1 for pair in by_pair.values())
    assert all(
        len({pair[arm].start_group for arm in ("shared", "own-1", "shared#2")}) == 1
        for pair in by_pair.values()
    )


def test_a_restart_plan_ignores_pairs():
    assert (
        sum(
            t.planned.role == "measure" and t.planned.arm == "shared"
            for t in tasks(restart=True, pairs=24)
        )
        == 6
    )


def test_every_start_warms_up_each_of_its_measured_arms_before_measuring():
    for restart in (False, True):
        first: dict = {}
        for t in tasks(restart=restart):
            if t.planned.role != "parity":
                first.setdefault((t.planned.start_group, t.planned.arm), t.planned.role)
        assert set(first.values()) == {"warmup"}


def test_arms_of_the_profile_with_a_topk_of_their_own_get_a_server_of_their_own():
    groups = held(tasks(arms=("none", "shared", f"own-1{TREE}")))
    assert {"shared", "shared#2"} <= groups[1] | groups[0] | groups[2]
    assert all(not ({"shared", f"own-1{TREE}"} <= group) for group in groups)


@pytest.mark.parametrize("restart", [False, True])
def test_traces_come_after_all_else_of_the_first_start_of_each_arm(restart):
    planned = [t.planned for t in tasks(restart=restart, traces=True)]
    traced = {p.arm: number for number, p in enumerate(planned) if p.role == "trace"}
    assert (
        sorted(traced) == ["none", "own-1", "shared"]
        and sum(p.role == "trace" for p in planned) == 3
    )
    for arm, number in traced.items():
        groups = list(dict.fromkeys(p.start_group for p in planned if p.arm == arm))
        assert planned[number].start_group == groups[0]
        assert not any(p.role == "measure" and p.start_group == groups[0] for p in planned[number:])
    assert not any(t.planned.role == "trace" for t in tasks(restart=restart))


def test_an_arm_with_steps_of_its_own_is_measured_and_has_no_tree_that_it_might_not_fill():
    arms = [Arm.parse(name) for name in ("shared", "shared+steps=1", "own-1+steps=7")]
    assert [arm.name for arm in plans.variants(arms)] == [
        f"shared{TREE}",
        "own-1+steps=7+agreement=off",
    ]
