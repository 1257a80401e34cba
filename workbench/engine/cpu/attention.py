"""Attention over SGLang's paged KV pool in plain torch: decode, and extend with a causal or a tree
mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def decode_attention_cpu(
    query,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    output,
    key,
    value,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    sm_scale,
    logit_cap,
    is_cross_attn,
    sliding_window,
    encoder_lens,
    sinks,
) -> None:
    """One new token a request: store its key and value, then attend to everything stored for that
    request.

    query: [B, heads, head_dim].
    output: [B, heads, v_head_dim], written.
    key, value: the new tokens' rows, stored at ``loc`` [B] (None: stored already).
    k_buffer, v_buffer: the pool, [slots, kv_heads, head_dim or v_head_dim]; with MLA one buffer, v
        a view of k's first columns.
    k_scale, v_scale: what an 8-bit pool's numbers are multiplied by.
    req_to_token: [requests, width], the pool slot of each token.
    req_pool_indices, seq_lens: [B], new token included.
    logit_cap: scores become cap * tanh(score / cap); 0 is none.
    attn_logits: scratch of the compiled kernel, not used.
    Signature: layers/attention/intel_amx_backend.py:383 decode_attention_fwd.
    Raises: NotImplementedError for cross attention, a sliding window or sinks.
    """
    _refuse("decode_attention_cpu", is_cross_attn, sliding_window, encoder_lens, sinks)
    if key is not None:
        _store(k_buffer, loc, key, k_scale)
        _store(v_buffer, loc, value, v_scale)
    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        slots = req_to_token[request, :length]
        output[row] = _attend(
            query[row : row + 1],
            _load(k_buffer, slots, k_scale),
            _load(v_buffer, slots, v_scale),
            sm_scale,
            logit_cap,
        )[0]


def extend_attention_cpu(
    query,
    key,
    value,
    output,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_len_extend,
    sm_scale,
    logit_cap,
    is_cross_attn,
    sliding_window,
    encoder_lens,
    sinks,
    tree_mask,
    is_causal,
) -> None:
    """Several new tokens a request (prefill, target verify, draft extend): attend to the cached
    prefix and to each other.

    query: [tokens, heads, head_dim].
    output: [tokens, heads, v_head_dim], written.
    key, value: the new tokens' rows, read from here and not from the pool (None: from the pool); so
        MLA's prefill without absorption works, whose heads are not the pool's.
    seq_lens: [B], prefix and new tokens.
    extend_seq_lens, extend_start_loc: [B], how many are new, where they start in query.
    tree_mask: flat bool, a request after the other, what each new token may see: of the new tokens
        (QLEN_ONLY) or of prefix and new tokens (FULL); None: those before it if is_causal, else
        all. Rest: as in decode_attention_cpu.
    Signature: layers/attention/intel_amx_backend.py:290 extend_attention_fwd.
    Raises: NotImplementedError for cross attention, a sliding window, sinks, or a cached prefix
        whose head size is not the query's; ValueError for a tree mask of another size.
    """
    _refuse("extend_attention_cpu", is_cross_attn, sliding_window, encoder_lens, sinks)
    lengths, extends, starts = (
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
    )
    visible = _visible(lengths, extends, tree_mask, is_causal)
    head_dim, kv_heads = query.shape[-1], None
    if key is not None:
        key = key.reshape(len(key), -1, head_dim)
        kv_heads = key.shape[1]
        value = value.reshape(len(value), kv_heads, -1)
    for request, length, extend, start, mask in zip(
        req_pool_indices.tolist(), lengths, extends, starts, visible
    ):
        stored = length if key is None else length - extend
        new = slice(start, start + extend)
        k, v = [], []
        if stored:
            if k_buffer.shape[1:] != (kv_heads or k_buffer.shape[1], head_dim):
                # SGLang takes the absorbed path, whose heads are the pool's, as soon as there is a
                # prefix (models/deepseek_common/attention_backend_handler.py:248
                # is_extend_without_speculative).
                raise NotImplementedError(
                    f"extend_attention_cpu: a cached prefix of {stored} tokens with heads of"
                    f" {tuple(k_buffer.shape[1:])} for keys of ({kv_heads}, {head_dim}) has no CPU"
                    " stand-in"
                )
            slots = req_to_token[request, :stored]
            k.append(_load(k_buffer, slots, k_scale))
            v.append(_load(v_buffer, slots, v_scale))
        if key is not None:
            k.append(key[new].float())
            v.append(value[new].float())
        output[new] = _attend(query[new], torch.cat(k), torch.cat(v), sm_scale, logit_cap, mask)


def _attend(query, key, value, scale, logit_cap, visible=None):
    """Softmax attention in float32, grouped-query: [T, H, D] over [L, KH, D] and [L, KH, DV] gives
    [T, H, DV]; visible: [T, L].
    """
    tokens, heads, head_dim = query.shape
    grouped = query.float().reshape(tokens, key.shape[1], -1, head_dim)
    scores = torch.einsum("tkgd,lkd->kgtl", grouped, key) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return (
        torch.einsum("kgtl,lkd->tkgd", scores.softmax(-1), value)
        .reshape(tokens, heads, -1)
        .to(query.dtype)
    )


def _visible(lengths, extends, tree_mask, is_causal) -> list:
    """Per request, which of its ``length`` tokens each of its ``extend`` new ones may see: [extend,
    length] bool, None is all.
    """
    if tree_mask is None:
        return [
            torch.ones(e, n, dtype=torch.bool).tril(n - e) if is_causal else None
            for n, e in zip(lengths, extends)
        ]
    among_new, full = [e * e for e in extends], [e * n for n, e in zip(lengths, extends)]
    if tree_mask.numel() == sum(full):
        return [block.view(e, n) for block, n, e in zip(tree_mask.split(full), lengths, extends)]
    if tree_mask.numel() == sum(among_new):
        return [
            F.pad(block.view(e, e), (n - e, 0), value=True)
            for block, n, e in zip(tree_mask.split(among_new), lengths, extends)
        ]
    raise ValueError(
        f"extend_attention_cpu: a tree mask of {tree_mask.numel()} is neither QLEN_ONLY"
        f" ({sum(among_new)}) nor FULL ({sum(full)})"
    )


def _store(buffer, loc, rows, scale) -> None:
    rows = rows.reshape(len(loc), *buffer.shape[1:])
    buffer[loc] = (rows / scale if buffer.dtype in _FLOAT8 else rows).to(buffer.dtype)


def _load(buffer, slots, scale):
    rows = buffer[slots].float()
    return rows * scale if buffer.dtype in _FLOAT8 else rows


def _refuse(op, is_cross_attn, sliding_window, encoder_lens, sinks) -> None:
    # sliding_window is SGLang's size + 1, so 0 says that there is none (intel_amx_backend.py:308
    # sliding_window_size).
    for what, used in (
        ("cross attention", is_cross_attn or encoder_lens is not None),
        ("a sliding window", sliding_window > 0),
        ("attention sinks", sinks is not None),
    ):
        if used:
            raise NotImplementedError(f"{op}: {what} has no CPU stand-in")
