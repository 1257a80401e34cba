"""The engine's parts that need no server: orders, groups, agreement, counting."""

from types import SimpleNamespace

import pytest
import torch

from workbench.engine import agreement, counting, hooks, placement
from workbench.engine.counting import Counters
from workbench.engine.hooks import Hook, Refused
from workbench.engine.orders import Draft, Orders, Placement


def test_orders_survive_the_environment():
    orders = Orders(
        "id",
        (
            Placement("own-2", 2, steps=2, draft_tokens=3, agreement="check"),
            Placement("shared#2", number=2),
        ),
        cpu=True,
        overlap=True,
        omit=("embedding",),
        corrupt_rank=1,
        refusing_rank=0,
    )
    assert Orders.from_json(orders.to_json()) == orders and orders.separates and orders.hot
    assert (
        not Orders(arms=(Placement("shared"),)).separates
        and not Orders(arms=(Placement("shared"),)).hot
    )
    with pytest.raises(ValueError, match="unknown orders"):
        Orders.from_json('{"agreemnt": "off"}')


def test_arms_share_a_draft_where_group_and_number_are_equal():
    arms = (
        Placement("shared"),
        Placement("own-1", 1),
        Placement("own-1+steps=2", 1, steps=2),
        Placement("shared#2", number=2),
        Placement("own-2", 2),
    )
    assert Orders(arms=arms).drafts == (Draft(), Draft(1), Draft(None, 2), Draft(2))


def test_of_two_hooks_around_one_target_the_earlier_is_outside():
    def adds(word):
        return lambda original, *args: f"{word}({original(*args)})"

    given = (
        Hook("a.B.c", adds("first"), ("self",)),
        Hook("a.B.d", adds("other"), ()),
        Hook("a.B.c", adds("second"), ("self",)),
        Hook("a.B.c", print, (), "after"),
    )
    joined = {(hook.target, hook.kind): hook.function for hook in hooks._joined(given)}
    assert (
        len(joined) == 3
        and joined["a.B.c", "around"](str, 5) == "first(second(5))"
        and joined["a.B.d", "around"](str, 5) == "other(5)"
    )


@pytest.mark.parametrize(
    ("size", "groups"), [(1, [[0], [1], [2], [3]]), (2, [[0, 1], [2, 3]]), (4, [[0, 1, 2, 3]])]
)
def test_groups_are_consecutive_ranks(size, groups):
    assert placement.consecutive([0, 1, 2, 3], size) == groups


def test_groups_follow_the_targets_own_order():
    assert placement.consecutive([4, 6, 5, 7], 2) == [[4, 6], [5, 7]]


@pytest.mark.parametrize(
    ("ranks", "size", "node", "words"),
    [
        (4, 3, None, "does not divide"),
        (4, 0, None, "does not divide"),
        (8, 4, 2, "straddle"),
        (6, 4, None, "does not divide"),
    ],
)
def test_groups_that_cannot_be_are_refused(ranks, size, node, words):
    with pytest.raises(Refused, match=words):
        placement.consecutive(list(range(ranks)), size, node)


class Group:
    """Stands for a group of ranks whose other members hold what the test says."""

    def __init__(self, *ranks: torch.Tensor):
        self.ranks, self.calls, self.world_size = ranks, 0, len(ranks)

    def broadcast(self, tensor, src):
        self.calls += 1
        return tensor.copy_(self.ranks[src])

    def all_gather(self, tensor, dim):
        self.calls += 1
        return torch.stack(self.ranks)


def tree(tokens):
    return (
        torch.arange(6, dtype=torch.int64).view(2, 3),
        torch.arange(4, dtype=torch.int32).view(2, 2),
        torch.tensor(tokens),
    )


def test_broadcast_gives_rank_0s_tree_with_shapes_and_types_in_one_collective():
    mine, theirs = tree([[1, 2], [3, 4]]), tree([[9, 8], [7, 6]])
    group = Group(torch.cat([part.reshape(-1).to(torch.int64) for part in theirs]))
    agreed = agreement.broadcast(mine, group, chain=False)
    assert (
        all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(agreed, theirs))
        and group.calls == 1
    )


def test_a_chain_broadcasts_its_tokens_alone_and_leaves_the_draft_its_own():
    mine = tree([[1, 2], [3, 4]])
    parents, order, tokens = agreement.broadcast(
        mine, group := Group(torch.tensor([[9, 8], [7, 6]])), chain=True
    )
    assert (
        tokens.tolist() == [[9, 8], [7, 6]]
        and mine[2].tolist() == [[1, 2], [3, 4]]
        and group.calls == 1
    )
    assert parents is mine[0] and order is mine[1]


def test_check_names_the_ranks_that_differ():
    packed = torch.cat([part.reshape(-1).to(torch.int64) for part in tree([[1, 2], [3, 4]])])
    agreement.check(tree([[1, 2], [3, 4]]), Group(packed, packed.clone()))
    other = packed.clone()
    other[-1] += 1
    with pytest.raises(agreement.RanksDisagreed, match=r"ranks \[1, 3\]"):
        agreement.check(tree([[1, 2], [3, 4]]), Group(packed, other, packed, other))


def test_collectives_are_counted_once_by_stage_and_not_for_a_group_of_one():
    counters, group, alone = Counters(), Group(*[torch.zeros(1)] * 2), Group(torch.zeros(1))

    def gather(group):
        return counters.count("all_gather_into_tensor", lambda _: None, group)

    def draft():
        counters.count("all_reduce", lambda _: None, group)
        counters.count("all_gather", gather, group)  # uses another one: still one collective
        counters.count("all_reduce", lambda _: None, alone)
        counters.bracket(
            "verify", lambda: counters.count("broadcast", lambda _: None, group)
        )  # inside: the outer stage's

    counters.bracket("draft", draft)
    counters.count("all_reduce", lambda _: None, group)
    said = counters.read()
    assert said["rounds"] == {"draft": 1}
    assert said["collectives"] == {
        "draft": {"all_reduce": 1, "all_gather": 1, "broadcast": 1},
        "other": {"all_reduce": 1},
    }
    assert set(said["seconds"]) == {"draft"} and said["verified"] == {}


def test_verify_rounds_are_counted_by_their_width():
    counters = Counters()
    for width in (4, 4, 3):
        batch = SimpleNamespace(spec_info=SimpleNamespace(draft_token_num=width))
        assert counters.verify(lambda worker, batch: batch, "worker", batch) is batch
    assert counters.read()["verified"] == {"4": 2, "3": 1} and counters.read()["rounds"] == {
        "verify": 3
    }


def test_a_stage_without_a_collective_says_so():
    counters = Counters()
    counters.bracket("draft", lambda: None)
    assert counters.read()["collectives"] == {"draft": {}}


def test_an_all_gather_inside_the_switch_is_counted_like_one_of_a_group():
    counters = Counters()
    (hook,) = [
        h
        for h in counting.hooks(Orders("server", ()), counters)
        if h.target.endswith("all_gather_inner")
    ]
    for ranks in (2, 1):
        state = SimpleNamespace(world_size=ranks)  # of triton_symm_mem_ag.MultimemAllGatherState
        assert (
            hook.function(lambda state, rows, tp_hidden_dim: rows, state, "rows", tp_hidden_dim=8)
            == "rows"
        )
    assert counters.read()["collectives"] == {"other": {"all_gather": 1}}


class Graph:
    """Stands for a torch.cuda.CUDAGraph, which no CPU has."""


def test_collectives_of_a_cuda_graph_are_counted_at_each_replay_and_not_at_its_capture():
    counters, group, graph, empty = Counters(), Group(*[torch.zeros(1)] * 2), Graph(), Graph()
    counters.capture_begin(lambda graph, pool: None, graph, pool="pool")
    for kind in ("all_reduce", "all_reduce", "all_gather"):
        counters.count(kind, lambda _: None, group)
    counters.capture_end(lambda graph: None, graph)
    counters.capture_begin(lambda graph: None, empty)
    counters.capture_end(lambda graph: None, empty)
    assert counters.read()["collectives"] == {}
    for stage in ("draft", "draft", "verify"):
        counters.bracket(
            stage, lambda: [counters.replay(lambda graph: None, g) for g in (graph, empty)]
        )
    twice = {"all_gather": 2, "all_reduce": 4}
    assert counters.read()["collectives"] == {
        "draft": twice,
        "verify": {kind: n // 2 for kind, n in twice.items()},
    }


def test_only_what_was_timed_is_summed_up_and_late():
    class Clock:
        now, read = 0, 0

        def mark(self):
            self.now += 1
            return self.now

        def seconds(self, begun, ended):
            self.read += 1
            return ended - begun

    timing, clock = [True], Clock()
    counters = Counters(clock, lambda: timing[0])
    for timing[0] in (
        *[True] * 6,
        *[False] * 6,
        *[True] * 6,
    ):  # rounds 0 and 4, none of 6 to 11, 12 and 16
        counters.bracket("draft", lambda: None)
    assert clock.read == 0  # waiting for an event inside a cycle would be a gap of our own making
    said = counters.read()
    assert (said["rounds"], said["timed"], said["seconds"]) == (
        {"draft": 18},
        {"draft": 4},
        {"draft": 4},
    )


def test_a_stage_that_fails_does_not_swallow_the_next():
    counters = Counters()
    with pytest.raises(ZeroDivisionError):
        counters.bracket("draft", lambda: 1 / 0)
    counters.bracket("verify", lambda: None)
    assert counters.read()["rounds"] == {"draft": 1, "verify": 1}
