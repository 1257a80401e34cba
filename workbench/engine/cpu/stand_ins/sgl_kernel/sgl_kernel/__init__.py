"""Stand-in for the compiled sgl_kernel: the functions that SGLang's CPU and EAGLE paths call, in
plain torch.

What is not here is missing as in any other package (``from sgl_kernel import X`` raises ImportError
naming X), because SGLang takes its own torch code where an import or a probe fails. Above all
``convert_weight_packed`` must stay missing: it is what ``cpu_has_amx_support`` looks for
(srt/utils/common.py:354 _is_intel_amx_backend_available), and with it SGLang would call some
hundred further kernels.
"""

import torch

from workbench.engine.cpu.attention import decode_attention_cpu, extend_attention_cpu
from workbench.engine.cpu.cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from workbench.engine.cpu.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# intel_amx_backend.py:58 decode_attention_cpu takes these two as torch operators.
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
