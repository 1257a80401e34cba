"""Bookkeeping of KV cache slots in plain torch: which slot each drafted, verified or accepted token
has in SGLang's pool.

``req_to_token`` is everywhere SGLang's table [requests, width] int32 of the pool slot of each
token; ``pool_len``, its width, is an argument of the compiled kernels that a tensor carries itself.
B is the batch; results are written in place where not returned.
"""

from __future__ import annotations

import ctypes

import torch


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
) -> None:
    """The topk * num_steps slots after each committed prefix, where the draft writes: out_cache_loc
    [B * topk * num_steps].

    Valid for page size 1 or a chain; SGLang computes the other case itself
    (speculative/eagle_worker_common.py:275 page_size) and refuses it on this back end
    (arg_groups/speculative_hook.py:1271 _PAGE_TREE_SPEC_BACKENDS). Call site:
    kernels/ops/speculative/cache_locs.py:99 assign_draft_cache_locs_contiguous_cpu.
    """
    columns = seq_lens.long().unsqueeze(1) + torch.arange(topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long().unsqueeze(1), columns].flatten())


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
) -> None:
    """Slots of the tokens from start_offset to end_offset ([B]) of each request, one request after
    the other.

    Call sites: kernels/ops/speculative/cache_locs.py:740 assign_extend_cache_locs_cpu,
    kernels/ops/speculative/cache_locs.py:763 assign_extend_cache_locs_cpu.
    """
    for row, start, end, at in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[at : at + end - start] = req_to_token[row, start:end]


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
) -> None:
    """The reverse: new slots out_cache_loc, one request after the other, go into the table from
    start_offset to end_offset.

    Call site: mem_cache/allocation.py:746 assign_req_to_token_pool_cpu.
    """
    for row, start, end, at in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start]


def build_draft_decode_metadata_cpu(
    req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len
):
    """A table with a row for each branch of the draft's tree, [B * topk, width]: the prefix, then
    that branch's own slots.

    Branch t of a request owns num_steps slots, t * num_steps after its prefix of seq_lens [B]
    tokens.
    Call site: layers/attention/intel_amx_backend.py:462 build_draft_decode_metadata.
    """
    table = req_to_token[req_pool_indices.long()].repeat_interleave(topk, 0)
    prefix = seq_lens.long().repeat_interleave(topk).unsqueeze(1)
    branch = torch.arange(topk).repeat(len(seq_lens)).unsqueeze(1)
    step = torch.arange(num_steps)
    return table.scatter(1, prefix + step, table.gather(1, prefix + branch * num_steps + step))


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    """Slots of the accepted tokens, packed to the front: accept_index [B, steps + 1] numbers them,
    -1 is padding.

    Call site: kernels/ops/speculative/eagle.py:80 fill_accept_out_cache_loc_cpu.
    """
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride) -> None:
    """The last accepted token of each request: accept_tokens has accept_stride places a request,
    accept_lens [B] of them filled.

    Call site: kernels/ops/speculative/eagle.py:40 fill_bonus_tokens_cpu.
    """
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc) -> None:
    """Copy pool rows src_loc to tgt_loc in every layer's buffers, as if all were read before any is
    written.

    data_ptrs, strides: [buffers], the address of each buffer and the bytes of one row
    (mem_cache/memory_pool.py:3468 copy_all_layer_kv_cache_func).
    Call site: kernels/ops/kvcache/cache_move.py:191 copy_all_layer_kv_cache_cpu.
    """
    if not len(tgt_loc):
        return
    rows = int(torch.maximum(tgt_loc.max(), src_loc.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist()):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[tgt_loc.long()] = buffer[src_loc.long()]


def rotate_input_ids_cpu(*_, **__) -> None:
    """Only multi-layer EAGLE calls it (kernels/ops/speculative/multi_layer_eagle.py:25
    rotate_input_ids_cpu), which is not served here.
    """
    raise NotImplementedError("rotate_input_ids_cpu: multi-layer EAGLE has no CPU stand-in")


def _spans(req_pool_indices, start_offset, end_offset):
    """Row, start, end of each request, and where its tokens begin in the joined order."""
    at = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    ):
        yield row, start, end, at
        at += end - start
