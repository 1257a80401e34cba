"""The CPU engine's attention against a softmax written out for one query of one head at a time."""

import math
import random
from dataclasses import dataclass

import pytest
import torch

from workbench.engine.cpu import attention


def softmax_of_one(query, keys, values, scale, cap):
    """One query of one head over a list of keys and values."""
    scores = [scale * sum(a * b for a, b in zip(query, key)) for key in keys]
    scores = [cap * math.tanh(s / cap) if cap else s for s in scores]
    weights = [math.exp(s - max(scores)) for s in scores]
    return [
        sum(w * v[d] for w, v in zip(weights, values)) / sum(weights) for d in range(len(values[0]))
    ]


def attend(query, key, value, sees, scale, cap):
    """query [T][H][D], key and value [L][KH][D]; token t sees the positions sees[t]; head h reads
    KV head h // (H / KH).
    """
    heads, kv_heads = len(query[0]), len(key[0])
    return [
        [
            softmax_of_one(
                query[t][h],
                [key[s][h * kv_heads // heads] for s in sees[t]],
                [value[s][h * kv_heads // heads] for s in sees[t]],
                scale,
                cap,
            )
            for h in range(heads)
        ]
        for t in range(len(query))
    ]


@dataclass
class Pool:
    """A random paged pool: token s of request r lies in slot ``table[r][s]``; requests share no
    slot, order is random.
    """

    table: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, rng, lengths, kv_heads, head_dim, v_head_dim, width=40):
        slots = rng.sample(range(1, len(lengths) * width + 1), len(lengths) * width)
        table = torch.tensor(slots, dtype=torch.int32).view(len(lengths), width)
        return cls(
            table,
            torch.randn(table.numel() + 1, kv_heads, head_dim),
            torch.randn(table.numel() + 1, kv_heads, v_head_dim),
        )

    def tokens(self, buffer, request, count):
        return [buffer[int(slot)].tolist() for slot in self.table[request, :count]]


def extend(
    query,
    key,
    value,
    pool,
    requests,
    lengths,
    extends,
    *,
    k_scale=1.0,
    v_scale=1.0,
    cap=0.0,
    cross=False,
    window=0,
    encoder_lens=None,
    sinks=None,
    tree_mask=None,
    causal=True,
    scale=0.3,
):
    starts = [sum(extends[:i]) for i in range(len(extends))]
    heads, v_head_dim = (
        query.shape[1],
        (
            pool.v.shape[2]
            if value is None
            else value.reshape(len(query), -1).shape[1]
            // (key.reshape(len(query), -1).shape[1] // query.shape[2])
        ),
    )
    output = torch.full((len(query), heads, v_head_dim), float("nan"))
    attention.extend_attention_cpu(
        query,
        key,
        value,
        output,
        pool.k,
        pool.v,
        k_scale,
        v_scale,
        pool.table,
        torch.tensor(requests),
        torch.tensor(lengths),
        torch.tensor(extends, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        max(extends),
        scale,
        cap,
        cross,
        window,
        encoder_lens,
        sinks,
        tree_mask,
        causal,
    )
    return output


def decode(
    query,
    pool,
    requests,
    lengths,
    *,
    key=None,
    value=None,
    loc=None,
    k_scale=1.0,
    v_scale=1.0,
    cap=0.0,
    cross=False,
    window=0,
    encoder_lens=None,
    sinks=None,
    scale=0.3,
):
    output = torch.full((*query.shape[:2], pool.v.shape[2]), float("nan"))
    attention.decode_attention_cpu(
        query,
        pool.k,
        pool.v,
        k_scale,
        v_scale,
        output,
        key,
        value,
        loc,
        None,
        pool.table,
        torch.tensor(requests),
        torch.tensor(lengths),
        scale,
        cap,
        cross,
        window,
        encoder_lens,
        sinks,
    )
    return output


def reference_extend(query, pool, requests, lengths, extends, sees, cap=0.0, scale=0.3):
    """Everything is in the pool; sees(i, t) lists the positions that new token t of request i may
    see.
    """
    rows, at = [], 0
    for i, (request, length, count) in enumerate(zip(requests, lengths, extends)):
        rows += attend(
            query[at : at + count].tolist(),
            pool.tokens(pool.k, request, length),
            pool.tokens(pool.v, request, length),
            [sees(i, t) for t in range(count)],
            scale,
            cap,
        )
        at += count
    return torch.tensor(rows)


def new_tokens(buffer, pool, requests, lengths, extends):
    """The rows of the new tokens, as SGLang hands them over beside the pool that it has written
    them to.
    """
    return torch.cat(
        [buffer[pool.table[r, n - e : n].long()] for r, n, e in zip(requests, lengths, extends)]
    )


SHAPES = [
    (1, 1, 4, 4),
    (4, 2, 8, 8),
    (6, 2, 8, 4),
    (4, 1, 12, 8),
]  # heads, KV heads, head size, value head size


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

    assert torch.equal(pool.k[loc], key.view(3, kv_heads, head_dim)) and torch.equal(
        pool.v[loc], value.view(3, kv_heads, v_head_dim)
    )
    untouched = [slot for slot in range(len(before)) if slot not in loc.tolist()]
    assert torch.equal(pool.k[untouched], before[untouched])
    want = reference_extend(
        query, pool, requests, lengths, [1, 1, 1], lambda i, t: range(lengths[i]), cap
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        decode(query, pool, requests, lengths, cap=cap), want
    )  # stored already


@pytest.mark.parametrize("heads, kv_heads, head_dim, v_head_dim", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("from_pool", [True, False])
def test_extend_over_a_prefix(heads, kv_heads, head_dim, v_head_dim, causal, from_pool):
    torch.manual_seed(heads)
    requests, lengths, extends = [1, 3, 0], [9, 5, 7], [4, 5, 1]
    pool = Pool.random(random.Random(2), range(4), kv_heads, head_dim, v_head_dim)
    query = torch.randn(sum(extends), heads, head_dim)
    want = reference_extend(
        query,
        pool,
        requests,
        lengths,
        extends,
        lambda i, t: range(lengths[i] - extends[i] + t + 1 if causal else lengths[i]),
        cap=0.8,
    )
    key, value = (
        (None, None)
        if from_pool
        else (new_tokens(b, pool, requests, lengths, extends) for b in (pool.k, pool.v))
    )
    torch.testing.assert_close(
        extend(query, key, value, pool, requests, lengths, extends, cap=0.8, causal=causal), want
    )


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

    cells = [
        position in sees(i, t)
        for i in range(3)
        for t in range(6)
        for position in range(0 if mode == "FULL" else lengths[i] - extends[i], lengths[i])
    ]
    query = torch.randn(sum(extends), 4, 8)
    want = reference_extend(query, pool, requests, lengths, extends, sees)
    got = extend(
        query,
        *(new_tokens(b, pool, requests, lengths, extends) for b in (pool.k, pool.v)),
        pool,
        requests,
        lengths,
        extends,
        tree_mask=torch.tensor(cells),
    )
    torch.testing.assert_close(got, want)


def test_a_tree_mask_of_another_size_is_refused():
    pool = Pool.random(random.Random(0), range(1), 1, 4, 4)
    with pytest.raises(ValueError, match="tree mask of 5 is neither QLEN_ONLY .9. nor FULL .15."):
        extend(
            torch.randn(3, 1, 4),
            None,
            None,
            pool,
            [0],
            [5],
            [3],
            tree_mask=torch.ones(5, dtype=torch.bool),
        )


def test_mla_prefill_without_absorption_reads_keys_and_values_from_its_arguments():
    """Heads of 6 and 5 for a pool that holds one latent row of 12 a token
    (models/deepseek_common/.../forward_mha.py:386).
    """
    torch.manual_seed(0)
    latent = torch.randn(81, 1, 12)
    pool = Pool(Pool.random(random.Random(0), range(2), 1, 1, 1).table, latent, latent[..., :8])
    query, key, value = torch.randn(7, 4, 6), torch.randn(7, 4, 6), torch.randn(7, 4, 5)
    got = extend(query, key, value, pool, [0, 1], [3, 4], [3, 4])
    for start, count in ((0, 3), (3, 4)):
        new = slice(start, start + count)
        want = attend(
            query[new].tolist(),
            key[new].tolist(),
            value[new].tolist(),
            [range(t + 1) for t in range(count)],
            0.3,
            0.0,
        )
        torch.testing.assert_close(got[new], torch.tensor(want))
    with pytest.raises(NotImplementedError, match="cached prefix of 2 tokens"):
        extend(query[:3], key[:3], value[:3], pool, [0], [5], [3])


def test_mla_with_absorption_over_a_prefix():
    """One latent buffer: the value is the key's first columns, in the pool and in new tokens."""
    torch.manual_seed(0)
    latent = torch.randn(121, 1, 12)
    pool = Pool(Pool.random(random.Random(0), range(3), 1, 1, 1).table, latent, latent[..., :8])
    requests, lengths, extends = [0, 2], [9, 4], [3, 1]
    query, key = torch.randn(4, 4, 12), new_tokens(latent, pool, requests, lengths, extends)
    want = reference_extend(
        query, pool, requests, lengths, extends, lambda i, t: range(lengths[i] - extends[i] + t + 1)
    )
    torch.testing.assert_close(
        extend(query, key, key[..., :8], pool, requests, lengths, extends), want
    )
    new = torch.randn(2, 1, 12)
    loc = torch.tensor([pool.table[0, 8], pool.table[2, 3]])
    got = decode(query[2:], pool, requests, lengths, key=new, value=new[..., :8], loc=loc)
    assert torch.equal(latent[loc], new)
    torch.testing.assert_close(
        got,
        reference_extend(
            query[2:], pool, requests, lengths, [1, 1], lambda i, t: range(lengths[i])
        ),
    )


def test_an_8_bit_pool_is_read_and_written_by_its_scales():
    torch.manual_seed(0)
    pool = Pool.random(random.Random(0), range(2), 2, 8, 8)
    plain = Pool(
        pool.table,
        (pool.k / 2).to(torch.float8_e4m3fn).float() * 2,
        (pool.v / 4).to(torch.float8_e4m3fn).float() * 4,
    )
    small = Pool(
        pool.table, (pool.k / 2).to(torch.float8_e4m3fn), (pool.v / 4).to(torch.float8_e4m3fn)
    )
    query, scales = torch.randn(5, 4, 8), {"k_scale": 2.0, "v_scale": 4.0}
    torch.testing.assert_close(
        extend(query, None, None, small, [0, 1], [6, 3], [4, 1], **scales),
        extend(query, None, None, plain, [0, 1], [6, 3], [4, 1]),
    )
    key, value, loc = (
        torch.randn(2, 2, 8),
        torch.randn(2, 2, 8),
        torch.tensor([pool.table[0, 5], pool.table[1, 2]]),
    )
    decode(query[:2], small, [0, 1], [6, 3], key=key, value=value, loc=loc, **scales)
    assert torch.equal(small.k[loc].float(), (key / 2).to(torch.float8_e4m3fn).float())
    assert torch.equal(small.v[loc].float(), (value / 4).to(torch.float8_e4m3fn).float())


def test_scales_leave_a_pool_of_full_precision_alone():
    """SGLang hands a layer's scales over whatever the pool is, and divides by them only on writing
    8 bits (memory_pool.py:2926).
    """
    torch.manual_seed(0)
    pool, query = Pool.random(random.Random(0), range(1), 1, 4, 4), torch.randn(1, 1, 4)
    assert torch.equal(
        decode(query, pool, [0], [5], k_scale=3.0, v_scale=3.0), decode(query, pool, [0], [5])
    )


@pytest.mark.parametrize("kernel", ["decode", "extend"])
@pytest.mark.parametrize(
    "what, arguments",
    [
        ("cross attention", {"cross": True}),
        ("cross attention", {"encoder_lens": torch.ones(1)}),
        ("sliding window", {"window": 1}),
        ("sinks", {"sinks": torch.zeros(1)}),
    ],
)
def test_attention_that_has_no_stand_in_is_refused_by_name(kernel, what, arguments):
    pool, query = Pool.random(random.Random(0), range(1), 1, 4, 4), torch.randn(1, 1, 4)
    with pytest.raises(
        NotImplementedError, match=f"{kernel}_attention_cpu: .*{what} has no CPU stand-in"
    ):
        if kernel == "decode":
            decode(query, pool, [0], [5], **arguments)
        else:
            extend(query, None, None, pool, [0], [5], [1], **arguments)
