"""The schedule: balance, shared and fresh prompts, warm-up kept apart, starts that alternate, and
growth without change.
"""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from workbench.experiment import schedule
from workbench.experiment.errors import BadInput


def plan(arms, pairs=12, available=64, per_block=4, warmup=2, seed=5, **more):
    return schedule.paired("draft_tp", arms, pairs, available, per_block, warmup, seed, **more)


def measured(blocks):
    return [b for b in blocks if b.role == "measure"]


def by_pair(blocks):
    found = defaultdict(list)
    for block in measured(blocks):
        found[block.pair].append(block)
    return found


def test_two_arms_run_abba():
    order = "".join(
        "A" if b.arm == "shared" else "B" for b in measured(plan(("shared", "own-1"), pairs=4))
    )
    assert order in ("ABBAABBA", "BAABBAAB")


ARMS = ("shared", "own-1", "own-2", "own-4", "own-8", "shared#2")


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("seed", [1, 5])
def test_each_arm_is_in_each_position_and_follows_each_arm_itself_included_equally_often(
    count, seed
):
    arms = ARMS[:count]
    pairs = schedule.balanced(1, count)
    blocks = plan(arms, pairs, available=400, seed=seed)
    positions = Counter((b.arm, b.position) for b in measured(blocks))
    assert len(positions) == count**2 and len(set(positions.values())) == 1
    follows = Counter((a.arm, b.arm) for a, b in pairwise(blocks) if b.role == "measure")
    assert len(follows) == count**2 and set(follows.values()) == {pairs // count}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("each", [2, 3])
def test_the_balance_holds_over_starts_that_cut_the_period(count, each):
    arms = ARMS[:count]
    starts = schedule.balanced(1, count)
    blocks = schedule.by_starts("draft_tp", (arms,), starts, each, 400, 1, 1, seed=2)
    follows = Counter(
        (a.arm, b.arm)
        for a, b in pairwise(blocks)
        if b.role == "measure" and a.start_group == b.start_group
    )
    assert len(follows) == count**2 and len(set(follows.values())) == 1


def test_two_periods_are_balanced_as_one_is():
    blocks = measured(plan(ARMS[:4], 16, available=400))
    follows = Counter((a.arm, b.arm) for a, b in pairwise(blocks))
    # All but the first block's, which follows a warm-up of its own arm.
    assert sum(follows.values()) == 63 and set(follows.values()) == {3, 4}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_a_linear_drift_cancels_over_a_period(count):
    arms = ARMS[:count]
    blocks = measured(plan(arms, schedule.balanced(1, count), available=400))
    # Within a pair, where arms are compared: the drift between pairs is common to all of its arms.
    places = {arm: sum(b.position for b in blocks if b.arm == arm) for arm in arms}
    assert len(set(places.values())) == 1


def test_balanced_rounds_up_to_the_period():
    assert [schedule.balanced(7, arms) for arms in (1, 2, 3, 4, 5, 6)] == [7, 8, 12, 8, 10, 12]
    assert schedule.balanced(12, 3) == 12


def test_a_pair_shares_prompts_and_seed_and_pairs_do_not():
    pairs = by_pair(plan(("shared", "own-1", "shared#2"), pairs=12, available=50))
    assert all(
        len({(b.prompts, b.seed) for b in blocks}) == 1 and len(blocks) == 3
        for blocks in pairs.values()
    )
    used = [p for blocks in pairs.values() for p in blocks[0].prompts]
    assert len(set(used)) == len(used) == 48
    assert len({blocks[0].seed for blocks in pairs.values()}) == 12


def test_warm_up_prompts_are_never_measured():
    blocks = plan(("shared", "own-1"), pairs=40, available=19, per_block=4, warmup=3)
    warm = [b for b in blocks if b.role == "warmup"]
    assert [b.arm for b in blocks[:2]] == [b.arm for b in warm]
    assert {b.arm for b in warm} == {"shared", "own-1"} and blocks[2].arm == warm[-1].arm
    assert all(b.pair is None and len(b.prompts) == 3 for b in warm)
    assert not {p for b in warm for p in b.prompts} & {
        p for b in measured(blocks) for p in b.prompts
    }


def test_used_up_prompts_are_shuffled_anew_but_never_within_a_block():
    blocks = measured(plan(("shared", "own-1"), pairs=30, available=12, per_block=4, warmup=1))
    assert all(len(set(b.prompts)) == 4 for b in blocks)
    assert (
        len({frozenset(b.prompts) for b in blocks}) > 2
    )  # 11 prompts give two blocks a round; later rounds cut them otherwise
    # each round of the set is used before any of it comes again
    rounds = [blocks[i].prompts + blocks[i + 2].prompts for i in range(0, 60, 4)]
    assert all(len(set(r)) == 8 for r in rounds)


def test_without_reuse_used_up_prompts_are_an_error():
    assert len(plan(("shared", "own-1"), pairs=3, available=14, reuse=False)) == 2 + 6
    with pytest.raises(BadInput, match="used up"):
        plan(("shared", "own-1"), pairs=4, available=14, reuse=False)


def test_more_pairs_of_one_seed_begin_with_the_same_ones_and_seeds_differ():
    arms = ("shared", "own-1", "own-2")
    assert plan(arms, pairs=20)[: 3 + 18] == plan(arms, pairs=6)
    assert plan(arms, seed=6) != plan(arms, seed=5)


def test_starts_alternate_and_each_begins_with_a_warm_up():
    blocks = schedule.by_starts("baseline", ("none", "shared"), 4, 3, 40, 2, 2, seed=1)
    starts = defaultdict(list)
    for block in blocks:
        starts[block.start_group].append(block)
    assert list(starts) == list(range(8))
    order = "".join("A" if group[0].arm == "none" else "B" for group in starts.values())
    assert order in ("ABBAABBA", "BAABBAAB")
    for group in starts.values():
        assert [b.role for b in group] == ["warmup", "measure", "measure", "measure"] and len(
            {b.arm for b in group}
        ) == 1


def test_a_side_of_several_arms_is_one_start_with_balanced_blocks():
    hot = ("shared", "own-1", "shared#2")
    blocks = schedule.by_starts("draft_tp", ("none", hot), 3, 2, 64, 4, 2, seed=3)
    groups = defaultdict(set)
    for block in blocks:
        groups[block.start_group].add(block.arm)
    assert sorted(map(len, groups.values())) == [1, 1, 1, 3, 3, 3]
    inside = [b.arm for b in measured(blocks) if b.arm != "none"]
    assert all(
        count == 2 for count in Counter((arm, i % 3) for i, arm in enumerate(inside)).values()
    )
    for members in by_pair(blocks).values():
        assert (
            sorted(b.arm for b in members) == sorted(("none", *hot))
            and len({(b.prompts, b.seed) for b in members}) == 1
        )
        assert sorted(b.position for b in members) == [0, 1, 2, 3]
    assert sorted(by_pair(blocks)) == list(range(6))


def test_every_start_has_the_same_prompts_unless_fresh_ones_are_asked_for():
    def rounds(**how):
        blocks = schedule.by_starts("baseline", ("none", "shared"), 3, 2, 40, 2, 2, seed=1, **how)
        return [
            {b.prompts for b in measured(blocks) if b.start_group // 2 == turn} for turn in range(3)
        ]

    same, fresh = rounds(), rounds(same_prompts=False)
    assert same[0] == same[1] == same[2] and len(same[0]) == 2
    assert len({p for turn in fresh for block in turn for p in block}) == 3 * 2 * 2


def test_parity_repeats_each_arm_on_the_same_prompts():
    blocks = schedule.parity("draft_tp", ("none", "shared", "own-1"), (4, 9), seed=0)
    assert Counter(b.arm for b in blocks) == {"none": 2, "shared": 2, "own-1": 2}
    assert {b.prompts for b in blocks} == {(4, 9)} and {b.role for b in blocks} == {"parity"}


@pytest.mark.parametrize(
    "arms, of, expected",
    [
        (("none", "shared", "own-1"), None, "shared#2"),
        (("none", "own-1"), None, "none#2"),
        (("shared", "own-2+steps=2"), "own-2+steps=2", "own-2#2+steps=2"),
    ],
)
def test_the_control_is_a_replica(arms, of, expected):
    assert schedule.with_control(arms, of) == (*arms, expected)
    assert schedule.with_control((*arms, expected), of) == (*arms, expected)


@pytest.mark.parametrize(
    "change, field",
    [
        ({"arms": ()}, "plan.arms"),
        ({"arms": ("shared", "shared")}, "plan.arms"),
        ({"arms": ("shared", "fast")}, "arm"),
        ({"pairs": 0}, "pairs"),
        ({"per_block": 0}, "requests_per_block"),
        ({"available": 5}, "workload.prompts"),
    ],
)
def test_what_cannot_be_scheduled_is_bad_input(change, field):
    with pytest.raises(BadInput) as caught:
        plan(**{"arms": ("shared", "own-1"), **change})
    assert caught.value.field == field
