"""Which weights a configuration implies, and how SGLang spreads each of them over the ranks of a
tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.predict.model_files import ITEM_BYTES, Tensor
from workbench.predict.model_shape import ModelShape, canonical

LLAMA_DRAFT = "LlamaForCausalLMEagle3"  # models/llama_eagle3.py:272 LlamaForCausalLMEagle3
# models/kimi_k25_eagle3.py:315 Eagle3DeepseekV2ForCausalLM
MLA_DRAFT = "Eagle3DeepseekV2ForCausalLM"
EAGLE3_DRAFTS = (LLAMA_DRAFT, MLA_DRAFT)
LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DEEPSEEK_LIKE = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
)
FLOATS = ("F64", "F32", "BF16", "F16")
KNOWN = LLAMA_LIKE + DEEPSEEK_LIKE + EAGLE3_DRAFTS
VOCABULARY = ("embed_tokens", "lm_head")
VISION = ("vision_tower.", "mm_projector.")
# Whole on every rank: norms, routers, the latent projections (models/deepseek_v2.py:2070
# fused_qkv_a_proj_with_mqa, models/deepseek_v2.py:2095 kv_a_proj_with_mqa), biases added after an
# all-reduce.
_WHOLE = ("gate", "q_a_proj", "kv_a_proj_with_mqa")
_ROW_PARALLEL = ("o_proj", "down_proj")


def implied(shape: ModelShape) -> Iterator[Tensor]:
    """The weights that config.json implies, by canonical name, in the configuration's dtype; biases
    and vision towers are left out.

    Nothing for an architecture that is not KNOWN. Sources: models/llama.py:160 LlamaAttention,
    models/llama_eagle3.py:46 LlamaDecoderLayer, models/deepseek_v2.py:2057 num_heads and
    models/deepseek_v2.py:2785 _is_layer_sparse, models/kimi_k25_eagle3.py:62 Eagle3MLADecoderLayer
    (models/kimi_k25_eagle3.py:230 use_fc_norm for fc_norm) of SGLang 0.5.23.
    """
    if shape.architecture not in KNOWN:
        return
    draft, hidden = shape.architecture in EAGLE3_DRAFTS, shape.hidden_size
    weights: dict[str, tuple[int, ...]] = {"norm": (hidden,)}
    if not draft or keeps_embedding(shape):
        weights["embed_tokens"] = (shape.vocab_size, hidden)
    if not shape.tied and not (draft and takes_head(shape)):
        weights["lm_head"] = (head_rows(shape), hidden)
    if draft:
        weights["fc"] = (hidden, (shape.eagle.target_hidden_size or hidden) * aux_count(shape))
        if shape.architecture == MLA_DRAFT and (
            shape.config.get("fc_norm") or shape.config.get("use_aux_norm")
        ):
            weights |= {
                f"fc_norm.{i}": (shape.eagle.target_hidden_size or hidden,)
                for i in range(aux_count(shape))
            }
    for layer in range(shape.layers):
        # The draft's first layer reads the embedding beside the target's hidden states.
        wide = 2 * hidden if draft and layer == 0 else hidden
        inner = _latent_attention(shape, wide) if shape.mla else _attention(shape, wide)
        inner |= {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        } | _feed_forward(shape, layer)
        if draft:
            inner["hidden_norm"] = (hidden,)
        weights |= {f"layers.{layer}.{name}": size for name, size in inner.items()}
    for name, size in weights.items():
        yield Tensor(name if name.endswith("_bias") else f"{name}.weight", size, shape.dtype)


def _attention(shape: ModelShape, wide: int) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "self_attn.q_proj": (queries, wide),
        "self_attn.k_proj": (keys, wide),
        "self_attn.v_proj": (keys, wide),
        "self_attn.o_proj": (shape.hidden_size, queries),
    }


def _latent_attention(shape: ModelShape, wide: int) -> dict[str, tuple[int, ...]]:
    mla, queries = (
        shape.mla,
        shape.heads * (shape.mla.qk_nope_head_dim + shape.mla.qk_rope_head_dim),
    )
    query = (
        {
            "self_attn.q_a_proj": (mla.q_lora_rank, wide),
            "self_attn.q_a_layernorm": (mla.q_lora_rank,),
            "self_attn.q_b_proj": (queries, mla.q_lora_rank),
        }
        if mla.q_lora_rank
        else {"self_attn.q_proj": (queries, wide)}
    )
    return query | {
        "self_attn.kv_a_proj_with_mqa": (mla.kv_lora_rank + mla.qk_rope_head_dim, wide),
        "self_attn.kv_a_layernorm": (mla.kv_lora_rank,),
        "self_attn.kv_b_proj": (
            shape.heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            mla.kv_lora_rank,
        ),
        "self_attn.o_proj": (shape.hidden_size, shape.heads * mla.v_head_dim),
    }


def _feed_forward(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    experts, hidden = shape.experts, shape.hidden_size

    def mlp(prefix: str, wide: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.gate_proj": (wide, hidden),
            f"{prefix}.up_proj": (wide, hidden),
            f"{prefix}.down_proj": (hidden, wide),
        }

    if (
        shape.architecture not in DEEPSEEK_LIKE
        or not experts
        or layer < experts.first_layer
        or layer % experts.every
    ):
        return mlp("mlp", shape.intermediate_size)
    sparse = {"mlp.gate": (experts.count, hidden)}
    if shape.config.get("topk_method") == "noaux_tc":
        sparse["mlp.gate.e_score_correction_bias"] = (experts.count,)
    for number in range(experts.count):
        sparse |= mlp(f"mlp.experts.{number}", experts.intermediate_size)
    if experts.shared:
        sparse |= mlp("mlp.shared_experts", experts.intermediate_size * experts.shared)
    return sparse


def aux_count(draft: ModelShape) -> int:
    """How many of the target's layers the draft's fc joins (models/llama_eagle3.py:157
    num_aux_hidden_states, kimi_k25_eagle3.py:48 _get_eagle_aux_layer_count).
    """
    ids = draft.eagle.aux_layers or (
        draft.eagle.stray_aux_layers if draft.architecture == MLA_DRAFT else None
    )
    return draft.eagle.num_aux_hidden_states or (len(ids) if ids else 3)


def keeps_embedding(draft: ModelShape) -> bool:
    """Whether a draft embeds tokens itself; otherwise SGLang gives it the target's embedding
    (models/llama.py:910 set_embed).
    """
    return (draft.eagle.target_hidden_size or draft.hidden_size) != draft.hidden_size


def takes_head(draft: ModelShape) -> bool:
    """Whether a draft predicts with the target's head: draft_vocab_size is null
    (models/llama_eagle3.py:306 draft_vocab_size).
    """
    return not draft.tied and not draft.eagle.draft_vocab_size


def head_rows(shape: ModelShape) -> int:
    """Rows of the output head: the draft's own vocabulary where it has one."""
    return shape.eagle.draft_vocab_size or shape.vocab_size


def padded_rows(vocabulary: int, ranks: int) -> int:
    """Rows of a vocabulary table on a rank: padded to 64, or to 64 x ranks where that does not
    divide (vocab_parallel_embedding.py:273 pad_vocab_size).
    """
    unit = 64
    if -(-vocabulary // unit) * unit % ranks:
        unit *= ranks
    return -(-vocabulary // unit) * unit // ranks


def kv_heads_a_rank(shape: ModelShape, ranks: int) -> int:
    """KV heads on one rank; with fewer heads than ranks each rank keeps one, replicated
    (configs/model_config.py:1711 total_num_kv_heads).
    """
    return max(1, shape.kv_heads // ranks)


def rank_elements(shape: ModelShape, tensor: Tensor, ranks: int, unit: int = 1) -> float:
    """How many values of a stored tensor one rank of a group of ``ranks`` keeps; intermediate sizes
    are padded to multiples of ``unit``.

    Column- and row-parallel layers keep 1/ranks, vocabulary tables their padded share, K and V
    whole heads, and MLA's kv_b_proj a second copy, split and transposed
    (deepseek_weight_loader.py:762 w_kc).
    """
    name = canonical(tensor.name)
    module, leaf = name.split(".")[-2:] if "." in name else ("", name)
    if module in VOCABULARY:
        return padded_rows(tensor.shape[0], ranks) * tensor.elements / tensor.shape[0]
    if (
        name.startswith(VISION)
        or len(tensor.shape) < 1
        or "norm" in name
        or module in _WHOLE
        or leaf == "d2t"
    ):
        return tensor.elements
    if (
        module == "fc"
        and shape.architecture != MLA_DRAFT
        or leaf == "bias"
        and module in _ROW_PARALLEL
    ):
        return tensor.elements
    if module in ("k_proj", "v_proj"):
        return tensor.elements * kv_heads_a_rank(shape, ranks) / shape.kv_heads
    if module == "kv_b_proj" and leaf == "weight":
        return 2 * tensor.elements / ranks
    if module in ("gate_proj", "up_proj", "down_proj") and leaf == "weight":
        size = tensor.shape[module == "down_proj"]
        return tensor.elements / size * (-(-size // unit) * unit) / ranks
    return tensor.elements / ranks


def rank_bytes(shape: ModelShape, tensor: Tensor, ranks: int, dtype: str, unit: int = 1) -> float:
    """Bytes of a stored tensor on one rank, served in ``dtype``: plain weights are converted,
    quantised ones and their scales are not.
    """
    plain = tensor.dtype in FLOATS and tensor.name.endswith((".weight", ".bias"))
    return rank_elements(shape, tensor, ranks, unit) * ITEM_BYTES.get(
        dtype if plain else tensor.dtype, 1
    )


def is_served(shape: ModelShape, tensor: Tensor) -> bool:
    """Whether SGLang keeps this tensor of a checkpoint: not t2d, not a tied or borrowed table, not
    the layers of a bundled MTP head.
    """
    name = canonical(tensor.name)
    draft = shape.architecture in EAGLE3_DRAFTS
    if name == "t2d" or name.startswith("lm_head.") and (shape.tied or draft and takes_head(shape)):
        return False
    if name.startswith("embed_tokens.") and draft and not keeps_embedding(shape):
        return False
    return not (name.startswith("layers.") and int(name.split(".")[1]) >= shape.layers)
