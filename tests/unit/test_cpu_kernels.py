"""The CPU engine's kernels against slow, obvious references: one query, one node, one slot at a time, in plain Python."""
import math
import random
from dataclasses import dataclass

import pytest
import torch

from workbench.engine.cpu import attention, cache, tree

# ---------------------------------------------------------------- attention


def softmax_of_one(query, keys, values, scale, cap):
    """One query of one head over a list of keys and values."""
    scores = [scale * sum(a * b for a, b in zip(query, key)) for key in keys]
    scores = [cap * math.tanh(s / cap) if cap else s for s in scores]
    weights = [math.exp(s - max(scores)) for s in scores]
    return [sum(w * v[d] for w, v in zip(weights, values)) / sum(weights) for d in range(len(values[0]))]


def attend(query, key, value, sees, scale, cap):
    """query [T][H][D], key and value [L][KH][D]; token t sees the positions sees[t]; head h reads KV head h // (H / KH)."""
    heads, kv_heads = len(query[0]), len(key[0])
    return [[softmax_of_one(query[t][h], [key[s][h * kv_heads // heads] for s in sees[t]],
                            [value[s][h * kv_heads // heads] for s in sees[t]], scale, cap) for h in range(heads)]
            for t in range(len(query))]


@dataclass
class Pool:
    """A random paged pool: token s of request r lies in slot ``table[r][s]``; requests share no slot, order is random."""

    table: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, rng, lengths, kv_heads, head_dim, v_head_dim, width=40):
        slots = rng.sample(range(1, len(lengths) * width + 1), len(lengths) * width)
        table = torch.tensor(slots, dtype=torch.int32).view(len(lengths), width)
        return cls(table, torch.randn(table.numel() + 1, kv_heads, head_dim), torch.randn(table.numel() + 1, kv_heads, v_head_dim))

    def tokens(self, buffer, request, count):
        return [buffer[int(slot)].tolist() for slot in self.table[request, :count]]


def extend(query, key, value, pool, requests, lengths, extends, *, k_scale=1.0, v_scale=1.0, cap=0.0, cross=False, window=0,
           encoder_lens=None, sinks=None, tree_mask=None, causal=True, scale=0.3):
    starts = [sum(extends[:i]) for i in range(len(extends))]
    heads, v_head_dim = query.shape[1], pool.v.shape[2] if value is None else value.reshape(len(query), -1).shape[1] // (
        key.reshape(len(query), -1).shape[1] // query.shape[2])
    output = torch.full((len(query), heads, v_head_dim), float("nan"))
    attention.extend_attention_cpu(query, key, value, output, pool.k, pool.v, k_scale, v_scale, pool.table, torch.tensor(requests),
                                   torch.tensor(lengths), torch.tensor(extends, dtype=torch.int32),
                                   torch.tensor(starts, dtype=torch.int32), max(extends), scale, cap, cross, window, encoder_lens, sinks,
                                   tree_mask, causal)
    return output


def decode(query, pool, requests, lengths, *, key=None, value=None, loc=None, k_scale=1.0, v_scale=1.0, cap=0.0, cross=False, window=0,
           encoder_lens=None, sinks=None, scale=0.3):
    output = torch.full((*query.shape[:2], pool.v.shape[2]), float("nan"))
    attention.decode_attention_cpu(query, pool.k, pool.v, k_scale, v_scale, output, key, value, loc, None, pool.table,
                                   torch.tensor(requests), torch.tensor(lengths), scale, cap, cross, window, encoder_lens, sinks)
    return output


def reference_extend(query, pool, requests, lengths, extends, sees, cap=0.0, scale=0.3):
    """Everything is in the pool; sees(i, t) lists the positions that new token t of request i may see."""
    rows, at = [], 0
    for i, (request, length, count) in enumerate(zip(requests, lengths, extends)):
        rows += attend(query[at:at + count].tolist(), pool.tokens(pool.k, request, length), pool.tokens(pool.v, request, length),
                       [sees(i, t) for t in range(count)], scale, cap)
        at += count
    return torch.tensor(rows)


def new_tokens(buffer, pool, requests, lengths, extends):
    """The rows of the new tokens, as SGLang hands them over beside the pool that it has written them to."""
    return torch.cat([buffer[pool.table[r, n - e:n].long()] for r, n, e in zip(requests, lengths, extends)])


SHAPES = [(1, 1, 4, 4), (4, 2, 8, 8), (6, 2, 8, 4), (4, 1, 12, 8)]     # heads, KV heads, head size, value head size


@pytest.mark.parametrize("heads, kv_heads, head_dim, v_head_dim", SHAPES)
@pytest.mark.parametrize("cap", [0.0, 0.8])
def test_decode(heads, kv_heads, head_dim, v_head_dim, cap):
    torch.manual_seed(heads)
    lengths, requests = [1, 13, 6], [2, 0, 3]
    pool = Pool.random(random.Random(1), range(4), kv_heads, head_dim, v_head_dim)
    query = torch.randn(3, heads, head_dim)
    key, value = torch.randn(3, kv_heads * head_dim), torch.randn(3, kv_heads * v_head_dim)
    loc = torch.tensor([pool.table[r, n - 1] for r, n in zip(requests, lengths)])
    before = pool.k.clone()
    got = decode(query, pool, requests, lengths, key=key, value=value, loc=loc, cap=cap)

    assert torch.equal(pool.k[loc], key.view(3, kv_heads, head_dim)) and torch.equal(pool.v[loc], value.view(3, kv_heads, v_head_dim))
    untouched = [slot for slot in range(len(before)) if slot not in loc.tolist()]
    assert torch.equal(pool.k[untouched], before[untouched])
    want = reference_extend(query, pool, requests, lengths, [1, 1, 1], lambda i, t: range(lengths[i]), cap)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(decode(query, pool, requests, lengths, cap=cap), want)       # stored already


@pytest.mark.parametrize("heads, kv_heads, head_dim, v_head_dim", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("from_pool", [True, False])
def test_extend_over_a_prefix(heads, kv_heads, head_dim, v_head_dim, causal, from_pool):
    torch.manual_seed(heads)
    requests, lengths, extends = [1, 3, 0], [9, 5, 7], [4, 5, 1]
    pool = Pool.random(random.Random(2), range(4), kv_heads, head_dim, v_head_dim)
    query = torch.randn(sum(extends), heads, head_dim)
    want = reference_extend(query, pool, requests, lengths, extends,
                            lambda i, t: range(lengths[i] - extends[i] + t + 1 if causal else lengths[i]), cap=0.8)
    key, value = (None, None) if from_pool else (new_tokens(b, pool, requests, lengths, extends) for b in (pool.k, pool.v))
    torch.testing.assert_close(extend(query, key, value, pool, requests, lengths, extends, cap=0.8, causal=causal), want)


@pytest.mark.parametrize("mode", ["QLEN_ONLY", "FULL"])
@pytest.mark.parametrize("seed", range(4))
def test_extend_with_a_tree_mask(mode, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    requests, lengths, extends = [2, 0, 1], [9, 6, 20], [6, 6, 6]
    pool = Pool.random(rng, range(3), 2, 8, 8)
    parents = [[None] + [rng.randrange(node) for node in range(1, 6)] for _ in requests]

    def sees(i, node):
        prefix, path = lengths[i] - extends[i], []
        while node is not None:
            path.append(prefix + node)
            node = parents[i][node]
        return [*range(prefix), *path]

    cells = [position in sees(i, t) for i in range(3) for t in range(6)
             for position in range(0 if mode == "FULL" else lengths[i] - extends[i], lengths[i])]
    query = torch.randn(sum(extends), 4, 8)
    want = reference_extend(query, pool, requests, lengths, extends, sees)
    got = extend(query, *(new_tokens(b, pool, requests, lengths, extends) for b in (pool.k, pool.v)), pool, requests, lengths, extends,
                 tree_mask=torch.tensor(cells))
    torch.testing.assert_close(got, want)


def test_a_tree_mask_of_another_size_is_refused():
    pool = Pool.random(random.Random(0), range(1), 1, 4, 4)
    with pytest.raises(ValueError, match="tree mask of 5 is neither QLEN_ONLY .9. nor FULL .15."):
        extend(torch.randn(3, 1, 4), None, None, pool, [0], [5], [3], tree_mask=torch.ones(5, dtype=torch.bool))


def test_mla_prefill_without_absorption_reads_keys_and_values_from_its_arguments():
    """Heads of 6 and 5 for a pool that holds one latent row of 12 a token (models/deepseek_common/.../forward_mha.py:386)."""
    torch.manual_seed(0)
    latent = torch.randn(81, 1, 12)
    pool = Pool(Pool.random(random.Random(0), range(2), 1, 1, 1).table, latent, latent[..., :8])
    query, key, value = torch.randn(7, 4, 6), torch.randn(7, 4, 6), torch.randn(7, 4, 5)
    got = extend(query, key, value, pool, [0, 1], [3, 4], [3, 4])
    for start, count in ((0, 3), (3, 4)):
        new = slice(start, start + count)
        want = attend(query[new].tolist(), key[new].tolist(), value[new].tolist(), [range(t + 1) for t in range(count)], 0.3, 0.0)
        torch.testing.assert_close(got[new], torch.tensor(want))
    with pytest.raises(NotImplementedError, match="cached prefix of 2 tokens"):
        extend(query[:3], key[:3], value[:3], pool, [0], [5], [3])


def test_mla_with_absorption_over_a_prefix():
    """One latent buffer: the value is the key's first columns, for the pool and for the new tokens."""
    torch.manual_seed(0)
    latent = torch.randn(121, 1, 12)
    pool = Pool(Pool.random(random.Random(0), range(3), 1, 1, 1).table, latent, latent[..., :8])
    requests, lengths, extends = [0, 2], [9, 4], [3, 1]
    query, key = torch.randn(4, 4, 12), new_tokens(latent, pool, requests, lengths, extends)
    want = reference_extend(query, pool, requests, lengths, extends, lambda i, t: range(lengths[i] - extends[i] + t + 1))
    torch.testing.assert_close(extend(query, key, key[..., :8], pool, requests, lengths, extends), want)
    new = torch.randn(2, 1, 12)
    loc = torch.tensor([pool.table[0, 8], pool.table[2, 3]])
    got = decode(query[2:], pool, requests, lengths, key=new, value=new[..., :8], loc=loc)
    assert torch.equal(latent[loc], new)
    torch.testing.assert_close(got, reference_extend(query[2:], pool, requests, lengths, [1, 1], lambda i, t: range(lengths[i])))


def test_an_8_bit_pool_is_read_and_written_by_its_scales():
    torch.manual_seed(0)
    pool = Pool.random(random.Random(0), range(2), 2, 8, 8)
    plain = Pool(pool.table, (pool.k / 2).to(torch.float8_e4m3fn).float() * 2, (pool.v / 4).to(torch.float8_e4m3fn).float() * 4)
    small = Pool(pool.table, (pool.k / 2).to(torch.float8_e4m3fn), (pool.v / 4).to(torch.float8_e4m3fn))
    query, scales = torch.randn(5, 4, 8), {"k_scale": 2.0, "v_scale": 4.0}
    torch.testing.assert_close(extend(query, None, None, small, [0, 1], [6, 3], [4, 1], **scales),
                               extend(query, None, None, plain, [0, 1], [6, 3], [4, 1]))
    key, value, loc = torch.randn(2, 2, 8), torch.randn(2, 2, 8), torch.tensor([pool.table[0, 5], pool.table[1, 2]])
    decode(query[:2], small, [0, 1], [6, 3], key=key, value=value, loc=loc, **scales)
    assert torch.equal(small.k[loc].float(), (key / 2).to(torch.float8_e4m3fn).float())
    assert torch.equal(small.v[loc].float(), (value / 4).to(torch.float8_e4m3fn).float())


def test_scales_leave_a_pool_of_full_precision_alone():
    """SGLang hands a layer's scales over whatever the pool is, and divides by them only on writing 8 bits (memory_pool.py:2926)."""
    torch.manual_seed(0)
    pool, query = Pool.random(random.Random(0), range(1), 1, 4, 4), torch.randn(1, 1, 4)
    assert torch.equal(decode(query, pool, [0], [5], k_scale=3.0, v_scale=3.0), decode(query, pool, [0], [5]))


@pytest.mark.parametrize("kernel", ["decode", "extend"])
@pytest.mark.parametrize("what, arguments", [("cross attention", {"cross": True}), ("cross attention", {"encoder_lens": torch.ones(1)}),
                                             ("sliding window", {"window": 1}), ("sinks", {"sinks": torch.zeros(1)})])
def test_attention_that_has_no_stand_in_is_refused_by_name(kernel, what, arguments):
    pool, query = Pool.random(random.Random(0), range(1), 1, 4, 4), torch.randn(1, 1, 4)
    with pytest.raises(NotImplementedError, match=f"{kernel}_attention_cpu: .*{what} has no CPU stand-in"):
        if kernel == "decode":
            decode(query, pool, [0], [5], **arguments)
        else:
            extend(query, None, None, pool, [0], [5], [1], **arguments)


# ---------------------------------------------------------------- the token tree


@dataclass
class Candidate:
    """A token that the draft considered: its own number, what it was drafted from (None: node 0), its score."""

    number: int
    parent: "Candidate | None"
    score: float


def draft(rng, topk, steps, tokens):
    """What EAGLE's draft does (speculative/spec_utils.py:417, eagle_utils.py:100), with objects: returns parent_list, the selected.

    Scores fall along a path, as products of probabilities do, so a selected candidate's parent is selected too.
    """
    kept, candidates, parents = [None], [], []
    for step in range(steps):
        new = [Candidate(len(candidates) + i, parent, (parent.score if parent else 1.0) * rng.uniform(0.1, 0.99))
               for i, parent in enumerate(parent for parent in kept for _ in range(topk))]
        candidates += new
        if step < steps - 1:    # the last step's choice is nobody's parent
            kept = sorted(new, key=lambda c: -c.score)[:topk]
            parents += [-1, *range(topk)] if step == 0 else [c.number for c in kept]
            kept = kept if step else new
    selected = sorted(sorted(candidates, key=lambda c: -c.score)[:tokens - 1], key=lambda c: c.number)
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
    out = {"tree_mask": torch.ones(size, dtype=torch.bool), "positions": torch.empty(batch * tokens, dtype=torch.long),
           **{name: torch.full((batch, tokens), -1) for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling")}}
    tree.build_tree_kernel_efficient_cpu(torch.tensor(parents, dtype=torch.long).view(batch, -1),
                                         torch.tensor([[c.number for c in s] for s in selected]).view(batch, -1), torch.tensor(lengths),
                                         *out.values(), topk, steps, tokens, mode)
    return out


TREES = [(1, 3, 4), (1, 1, 2), (2, 1, 3), (2, 3, 6), (2, 4, 8), (3, 3, 10), (4, 2, 5), (4, 3, 12), (4, 4, 30)]     # topk, steps, tokens


@pytest.mark.parametrize("topk, steps, tokens", TREES)
@pytest.mark.parametrize("mode", [tree.FULL_MASK, tree.QLEN_ONLY])
@pytest.mark.parametrize("seed", range(3))
def test_build_tree(topk, steps, tokens, mode, seed):
    rng, lengths = random.Random(seed), [7, 1, 12]
    parents, selected = zip(*(draft(rng, topk, steps, tokens) for _ in lengths))
    out = build(parents, selected, lengths, topk, steps, tokens, mode)
    paths = [[ancestors(node, s) for node in range(tokens)] for s in selected]

    cells = [True if position < prefix else position - prefix in path
             for length, request in zip(lengths, paths) for path in request
             for prefix in [length if mode == tree.FULL_MASK else 0] for position in range(prefix + tokens)]
    assert out["tree_mask"].tolist() == cells
    assert out["positions"].tolist() == [n + len(path) - 1 for n, request in zip(lengths, paths) for path in request]
    assert out["retrive_index"].flatten().tolist() == list(range(3 * tokens))
    for request, child, sibling in zip(paths, out["retrive_next_token"].tolist(), out["retrive_next_sibling"].tolist()):
        children = [[c for c in range(1, tokens) if request[c][1] == node] for node in range(tokens)]
        assert child == [next(iter(c), -1) for c in children]
        assert sibling == [-1] + [next((s for s in children[request[node][1]] if s > node), -1) for node in range(1, tokens)]


def test_a_node_whose_parent_was_not_selected_is_linked_nowhere():
    """topk 2: candidate 4 was drafted from candidate 1, and only candidates 0 and 4 are selected."""
    out = build([[-1, 0, 1]], [[Candidate(0, None, 1), Candidate(4, None, 1)]], [5], 2, 2, 3, tree.QLEN_ONLY)
    assert out["retrive_next_token"].tolist() == [[1, -1, -1]] and out["retrive_next_sibling"].tolist() == [[-1, -1, -1]]
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
    accept_index, correct = torch.full((3, steps + 1), -1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    tree.verify_tree_greedy_cpu(predicts=predicts, accept_index=accept_index, accept_token_num=correct, candidates=candidates,
                                retrive_index=out["retrive_index"], retrive_next_token=out["retrive_next_token"],
                                retrive_next_sibling=out["retrive_next_sibling"], target_predict=target)

    want = [-7] * (3 * tokens)
    for b, s in enumerate(selected):
        path, number = [0], None
        while True:
            want[b * tokens + path[-1]] = int(target[b, path[-1]])
            right = [node for node in range(1, tokens) if ancestors(node, s)[1] == path[-1] and candidates[b, node] == target[b, path[-1]]]
            if not right:
                break
            path.append(right[0])
        assert accept_index[b].tolist() == [b * tokens + node for node in path] + [-1] * (steps + 1 - len(path))
        assert correct[b] == len(path) - 1
    assert predicts.tolist() == want


# ---------------------------------------------------------------- cache slots


def table(rng, requests=5, width=50):
    return torch.tensor(rng.sample(range(1000), requests * width), dtype=torch.int32).view(requests, width)


@pytest.mark.parametrize("topk, steps", [(1, 3), (2, 3), (4, 1)])
def test_the_draft_writes_behind_each_prefix(topk, steps):
    slots, requests, lengths = table(random.Random(0)), [3, 0], [11, 4]
    out = torch.empty(2 * topk * steps, dtype=torch.long)
    cache.assign_draft_cache_locs_contiguous_cpu(torch.tensor(requests), slots, torch.tensor(lengths), out, 50, topk, steps)
    assert out.tolist() == [int(slots[r, n + i]) for r, n in zip(requests, lengths) for i in range(topk * steps)]


@pytest.mark.parametrize("topk, steps", [(1, 3), (2, 3), (4, 2), (3, 1)])
def test_each_branch_sees_the_prefix_and_its_own_slots(topk, steps):
    slots, requests, lengths = table(random.Random(1)), [4, 0, 2], [11, 1, 30]
    before = slots.clone()
    rows = cache.build_draft_decode_metadata_cpu(slots, torch.tensor(requests), torch.tensor(lengths), topk, steps, 50)
    assert rows.shape == (3 * topk, 50) and rows.dtype == torch.int32
    for b, (request, length) in enumerate(zip(requests, lengths)):
        for branch in range(topk):
            own = [int(slots[request, length + branch * steps + s]) for s in range(steps)]
            assert rows[b * topk + branch, :length + steps].tolist() == slots[request, :length].tolist() + own
    assert torch.equal(slots, before)


@pytest.mark.parametrize("spans", [[(0, 3), (5, 5), (7, 20)], [(2, 3)], [(4, 4)], []])
def test_extend_slots_and_back(spans):
    slots, requests = table(random.Random(2)), [2, 4, 1][:len(spans)]
    start, end = (torch.tensor([span[i] for span in spans], dtype=torch.int32) for i in (0, 1))
    want = [int(slots[r, i]) for r, (a, b) in zip(requests, spans) for i in range(a, b)]
    out = torch.empty(len(want) + 2, dtype=torch.long).fill_(-1)       # SGLang's buffer may be longer (cache_locs.py:736)
    cache.assign_extend_cache_locs_cpu(torch.tensor(requests), slots, start, end, out, 50)
    assert out.tolist() == [*want, -1, -1]

    other = torch.full_like(slots, -1)
    cache.assign_req_to_token_pool_cpu(torch.tensor(requests), other, start, end, out, 50)
    cells = {(r, i) for r, (a, b) in zip(requests, spans) for i in range(a, b)}
    assert other.tolist() == [[int(slots[r, i]) if (r, i) in cells else -1 for i in range(50)] for r in range(5)]


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
    buffers = [torch.randn(20, 2, 4), torch.randn(20, 2, 3), torch.randn(20, 2, 4).to(torch.bfloat16)]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b[0].numel() * b.element_size() for b in buffers])
    targets, sources = rng.sample(range(20), 8), rng.choices(range(20), k=8)
    before = [b.clone() for b in buffers]
    cache.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor(targets), torch.tensor(sources))
    for old, new in zip(before, buffers):
        moved = dict(zip(targets, sources))
        assert all(torch.equal(new[row], old[moved.get(row, row)]) for row in range(20))


def test_multi_layer_eagle_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="rotate_input_ids_cpu"):
        cache.rotate_input_ids_cpu()
