"""The CPU engine's tree and cache kernels against slow, obvious references: one node, one slot at a
time, in plain Python.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from workbench.engine.cpu import cache, tree

# ---------------------------------------------------------------- the token tree


@dataclass
class Candidate:
    """A token that the draft considered: its own number, what it was drafted from (None: node 0),
    its score.
    """

    number: int
    parent: "Candidate | None"
    score: float


def draft(rng, topk, steps, tokens):
    """What EAGLE's draft does (speculative/spec_utils.py:417, eagle_utils.py:100), with objects:
    returns parent_list, the selected.

    Scores fall along a path, as products of probabilities do, so a selected candidate's parent is
    selected too.
    """
    kept, candidates, parents = [None], [], []
    for step in range(steps):
        new = [
            Candidate(
                len(candidates) + i,
                parent,
                (parent.score if parent else 1.0) * rng.uniform(0.1, 0.99),
            )
            for i, parent in enumerate(parent for parent in kept for _ in range(topk))
        ]
        candidates += new
        if step < steps - 1:  # the last step's choice is nobody's parent
            kept = sorted(new, key=lambda c: -c.score)[:topk]
            # Entry 0 stands for node 0; the compiled kernels never read it, so it is a wrong number
            # here (SGLang's is -1).
            parents += [0, *range(topk)] if step == 0 else [c.number for c in kept]
            kept = kept if step else new
    selected = sorted(
        sorted(candidates, key=lambda c: -c.score)[: tokens - 1], key=lambda c: c.number
    )
    return parents, selected


def ancestors(node, selected):
    """Nodes from this one up to node 0, itself first."""
    path, candidate = [], selected[node - 1] if node else None
    while candidate is not None:
        path.append(1 + [c.number for c in selected].index(candidate.number))
        candidate = candidate.parent
    return [*path, 0]


def build(parents, selected, lengths, topk, steps, tokens, mode):
    batch = len(selected)
    size = batch * tokens * tokens + (sum(lengths) * tokens if mode == tree.FULL_MASK else 0)
    out = {
        "tree_mask": torch.ones(size, dtype=torch.bool),
        "positions": torch.empty(batch * tokens, dtype=torch.long),
        **{
            name: torch.full((batch, tokens), -1)
            for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling")
        },
    }
    tree.build_tree_kernel_efficient_cpu(
        torch.tensor(parents, dtype=torch.long).view(batch, -1),
        torch.tensor([[c.number for c in s] for s in selected]).view(batch, -1),
        torch.tensor(lengths),
        *out.values(),
        topk,
        steps,
        tokens,
        mode,
    )
    return out


TREES = [
    (1, 3, 4),
    (1, 1, 2),
    (2, 1, 3),
    (2, 3, 6),
    (2, 4, 8),
    (3, 3, 10),
    (4, 2, 5),
    (4, 3, 12),
    (4, 4, 30),
]  # topk, steps, tokens


@pytest.mark.parametrize("topk, steps, tokens", TREES)
@pytest.mark.parametrize("mode", [tree.FULL_MASK, tree.QLEN_ONLY])
@pytest.mark.parametrize("seed", range(3))
def test_build_tree(topk, steps, tokens, mode, seed):
    rng, lengths = random.Random(seed), [7, 1, 12]
    parents, selected = zip(*(draft(rng, topk, steps, tokens) for _ in lengths))
    out = build(parents, selected, lengths, topk, steps, tokens, mode)
    paths = [[ancestors(node, s) for node in range(tokens)] for s in selected]

    cells = [
        True if position < prefix else position - prefix in path
        for length, request in zip(lengths, paths)
        for path in request
        for prefix in [length if mode == tree.FULL_MASK else 0]
        for position in range(prefix + tokens)
    ]
    assert out["tree_mask"].tolist() == cells
    assert out["positions"].tolist() == [
        n + len(path) - 1 for n, request in zip(lengths, paths) for path in request
    ]
    assert out["retrive_index"].flatten().tolist() == list(range(3 * tokens))
    for request, child, sibling in zip(
        paths, out["retrive_next_token"].tolist(), out["retrive_next_sibling"].tolist()
    ):
        children = [
            [c for c in range(1, tokens) if request[c][1] == node] for node in range(tokens)
        ]
        assert child == [next(iter(c), -1) for c in children]
        assert sibling == [-1] + [
            next((s for s in children[request[node][1]] if s > node), -1)
            for node in range(1, tokens)
        ]


def test_a_node_whose_parent_was_not_selected_is_linked_nowhere():
    """topk 2: candidate 4 was drafted from candidate 1, and 0 and 4 alone are selected."""
    out = build(
        [[-1, 0, 1]], [[Candidate(0, None, 1), Candidate(4, None, 1)]], [5], 2, 2, 3, tree.QLEN_ONLY
    )
    assert out["retrive_next_token"].tolist() == [[1, -1, -1]] and out[
        "retrive_next_sibling"
    ].tolist() == [[-1, -1, -1]]
    assert out["tree_mask"].view(3, 3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]


def test_the_bit_packed_mask_is_refused():
    with pytest.raises(NotImplementedError, match="bit-packed"):
        build([[-1]], [[Candidate(0, None, 1)]], [5], 1, 1, 2, 2)


@pytest.mark.parametrize("topk, steps, tokens", TREES)
@pytest.mark.parametrize("seed", range(6))
def test_verify_tree_greedy(topk, steps, tokens, seed):
    """A vocabulary of three, so that paths are accepted, and equal siblings occur."""
    rng, lengths = random.Random(seed), [7, 1, 12]
    parents, selected = zip(*(draft(rng, topk, steps, tokens) for _ in lengths))
    out = build(parents, selected, lengths, topk, steps, tokens, tree.QLEN_ONLY)
    candidates = torch.tensor([[rng.randrange(3) for _ in range(tokens)] for _ in lengths])
    target = torch.tensor([[rng.randrange(3) for _ in range(tokens)] for _ in lengths])
    predicts = torch.full((3 * tokens,), -7, dtype=torch.int32)
    accept_index, correct = (
        torch.full((3, steps + 1), -1, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
    )
    tree.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=correct,
        candidates=candidates,
        retrive_index=out["retrive_index"],
        retrive_next_token=out["retrive_next_token"],
        retrive_next_sibling=out["retrive_next_sibling"],
        target_predict=target,
    )

    want = [-7] * (3 * tokens)
    for b, s in enumerate(selected):
        path = [0]
        while True:
            want[b * tokens + path[-1]] = int(target[b, path[-1]])
            right = [
                node
                for node in range(1, tokens)
                if ancestors(node, s)[1] == path[-1] and candidates[b, node] == target[b, path[-1]]
            ]
            if not right:
                break
            path.append(right[0])
        assert accept_index[b].tolist() == [b * tokens + node for node in path] + [-1] * (
            steps + 1 - len(path)
        )
        assert correct[b] == len(path) - 1
    assert predicts.tolist() == want


# ---------------------------------------------------------------- cache slots


def table(rng, requests=5, width=50):
    return torch.tensor(rng.sample(range(1000), requests * width), dtype=torch.int32).view(
        requests, width
    )


@pytest.mark.parametrize("topk, steps", [(1, 3), (2, 3), (4, 1)])
def test_the_draft_writes_behind_each_prefix(topk, steps):
    slots, requests, lengths = table(random.Random(0)), [3, 0], [11, 4]
    out = torch.empty(2 * topk * steps, dtype=torch.long)
    cache.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor(requests), slots, torch.tensor(lengths), out, 50, topk, steps
    )
    assert out.tolist() == [
        int(slots[r, n + i]) for r, n in zip(requests, lengths) for i in range(topk * steps)
    ]


@pytest.mark.parametrize("topk, steps", [(1, 3), (2, 3), (4, 2), (3, 1)])
def test_each_branch_sees_the_prefix_and_its_own_slots(topk, steps):
    slots, requests, lengths = table(random.Random(1)), [4, 0, 2], [11, 1, 30]
    before = slots.clone()
    rows = cache.build_draft_decode_metadata_cpu(
        slots, torch.tensor(requests), torch.tensor(lengths), topk, steps, 50
    )
    assert rows.shape == (3 * topk, 50) and rows.dtype == torch.int32
    for b, (request, length) in enumerate(zip(requests, lengths)):
        for branch in range(topk):
            own = [int(slots[request, length + branch * steps + s]) for s in range(steps)]
            assert (
                rows[b * topk + branch, : length + steps].tolist()
                == slots[request, :length].tolist() + own
            )
    assert torch.equal(slots, before)


@pytest.mark.parametrize("spans", [[(0, 3), (5, 5), (7, 20)], [(2, 3)], [(4, 4)], []])
def test_extend_slots_and_back(spans):
    slots, requests = table(random.Random(2)), [2, 4, 1][: len(spans)]
    start, end = (torch.tensor([span[i] for span in spans], dtype=torch.int32) for i in (0, 1))
    want = [int(slots[r, i]) for r, (a, b) in zip(requests, spans) for i in range(a, b)]
    out = torch.empty(len(want) + 2, dtype=torch.long).fill_(
        -1
    )  # SGLang's buffer may be longer (cache_locs.py:736)
    cache.assign_extend_cache_locs_cpu(torch.tensor(requests), slots, start, end, out, 50)
    assert out.tolist() == [*want, -1, -1]

    other = torch.full_like(slots, -1)
    cache.assign_req_to_token_pool_cpu(torch.tensor(requests), other, start, end, out, 50)
    cells = {(r, i) for r, (a, b) in zip(requests, spans) for i in range(a, b)}
    assert other.tolist() == [
        [int(slots[r, i]) if (r, i) in cells else -1 for i in range(50)] for r in range(5)
    ]


def test_accepted_slots_are_packed_and_the_bonus_is_the_last_accepted():
    accept_index = torch.tensor([[0, 2, -1], [3, 4, 5], [6, -1, -1]], dtype=torch.int32)
    slots, out = torch.arange(100, 109), torch.zeros(9, dtype=torch.long)
    cache.fill_accept_out_cache_loc_cpu(accept_index, slots, out)
    assert out.tolist() == [100, 102, 103, 104, 105, 106, 0, 0, 0]
    bonus = torch.empty(3, dtype=torch.int32)
    tokens = torch.tensor([10, 11, 0, 20, 21, 22, 30, 0, 0], dtype=torch.int32)
    cache.fill_bonus_tokens_cpu(tokens, torch.tensor([2, 3, 1], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [11, 22, 30]


@pytest.mark.parametrize("seed", range(3))
def test_rows_move_in_every_layer_as_if_read_before_written(seed):
    rng = random.Random(seed)
    buffers = [
        torch.randn(20, 2, 4),
        torch.randn(20, 2, 3),
        torch.randn(20, 2, 4).to(torch.bfloat16),
    ]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b[0].numel() * b.element_size() for b in buffers])
    targets, sources = rng.sample(range(20), 8), rng.choices(range(20), k=8)
    before = [b.clone() for b in buffers]
    cache.copy_all_layer_kv_cache_cpu(
        pointers, strides, torch.tensor(targets), torch.tensor(sources)
    )
    for old, new in zip(before, buffers):
        moved = dict(zip(targets, sources))
        assert all(torch.equal(new[row], old[moved.get(row, row)]) for row in range(20))


def test_multi_layer_eagle_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="rotate_input_ids_cpu"):
        cache.rotate_input_ids_cpu()
