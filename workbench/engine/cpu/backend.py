"""Where SGLang's choice of code for the CPU goes past the plain-torch kernels: hooks for its plugin
mechanism, all AROUND.
"""


def keep_intel_amx(orig, view) -> dict:
    """Keep the intel_amx attention back end, which has EAGLE on the CPU; torch_native, its
    replacement, has not.

    Target: sglang/srt/arg_groups/overrides.py:1301 ``_attention_backend_platform_fallbacks``.
    SGLang leaves intel_amx where the compiled sgl_kernel has no AMX; plain torch functions serve it
    here, so nothing is changed (and nothing logged) for it.
    """
    return {} if view.device == "cpu" and view.attention_backend == "intel_amx" else orig(view)


def last_loc_in_torch(orig, req_to_token, req_pool_indices_tensor, prefix_lens_tensor):
    """The slot of each request's last token, [B], -1 for an empty one, by SGLang's own torch
    function.

    Target: sglang/srt/mem_cache/allocation.py:108 ``get_last_loc``, called for page sizes above 1.
    It launches a triton kernel for every back end but torch_native and ascend, so for intel_amx
    too, where no triton kernel runs.
    """
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


def keep_overlap(orig, server_args) -> None:
    """Leave the overlapping scheduler loop on for speculation on a CPU, to test what GPUs run by
    default.

    Target: sglang/srt/arg_groups/speculative_hook.py:66 ``_disable_overlap_schedule_for_cpu``.
    """


def spec_extras_in_torch(
    orig, indices, topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf
):
    """The rows ``indices`` of each buffer, None where there is none; only the overlapping loop asks
    for them.

    Target: sglang/srt/managers/overlap_utils.py:507 ``gather_spec_extras``, a triton kernel.
    """
    rows = indices.long()
    return tuple(
        None if buffer is None else buffer[rows]
        for buffer in (topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf)
    )


def nothing_to_wait_for(orig, device=None) -> None:
    """No device, so nothing to wait for.

    Target: ``torch.cuda.synchronize``, which an MLA draft calls whatever its device when it is
    handed the embedding (sglang/srt/models/kimi_k25_eagle3.py:415 synchronize); a torch without
    CUDA raises there.
    """
