"""Folders of Kimi-K2.5's class, to try the workbench on: the trained tiny target inside the
published wrapper, the same with quantized weights, and the published shapes without contents.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file, save_file

from workbench.predict.model_files import ITEM_BYTES

WRAPPER = "KimiK25ForConditionalGeneration"
CODE = ("configuration_kimi_k25", "modeling_kimi_k25", "tokenization_kimi", "kimi_k25_processor")
# The published folder quantizes the experts alone (its config.json, quantization_config.ignore).
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
}
AWQ = {
    "bits": 4,
    "group_size": 32,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": ["self_attn", "lm_head", "shared_experts"],
}


def wrapped(plain: Path, out: Path, quantization: Mapping | None = None) -> Path:
    """The target in ``plain`` as the published folder wraps one: nested configurations, two shards,
    a vision tower, and code that raises when it is run.
    """
    text = json.loads((plain / "config.json").read_text()) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
    }
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_type"} | {"type": "yarn"}
    for ours in ("head_dim", "qk_head_dim", "rope_interleave", "transformers_version"):
        text.pop(ours, None)
    if quantization:
        text["quantization_config"] = dict(quantization)
    language = {
        f"language_model.{name}": value
        for name, value in _quantized(load_file(plain / "model.safetensors"), quantization).items()
    }
    vision = _vision(64, 128, 2, text["hidden_size"])
    _write(
        out,
        _config(text, _vision_config(64, 128, 2, 4, text["hidden_size"])),
        {"language": language, "vision": vision},
    )
    (out / "generation_config.json").write_text((plain / "generation_config.json").read_text())
    return out


def quantized(plain: Path, out: Path, quantization: Mapping) -> Path:
    """The target in ``plain`` with its weights in the format that ``quantization`` names."""
    out.mkdir(parents=True)
    config = json.loads((plain / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(
        _quantized(load_file(plain / "model.safetensors"), quantization), out / "model.safetensors"
    )
    return out


def published(out: Path, headers: bool = True) -> Path:
    """The published target: config.json, and safetensors of its true headers over holes (595 GB
    that take no room), or its configuration alone.
    """
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 262144,
        "model_type": "kimi_k2",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": INT4,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 163840,
    }
    config = _config(text, _vision_config(1152, 4304, 27, 16, 7168))
    shards = {f"layer-{layer:02}": _published_layer(text, layer) for layer in range(61)}
    table = ("BF16", (text["vocab_size"], text["hidden_size"]))
    shards["tables"] = {
        "language_model.model.embed_tokens.weight": table,
        "language_model.model.norm.weight": ("BF16", (text["hidden_size"],)),
        "language_model.lm_head.weight": table,
    }
    shards["vision"] = {
        name: ("BF16", tuple(value.shape))
        for name, value in _vision(1152, 4304, 27, 7168, torch.device("meta")).items()
    }
    _write(out, config, shards if headers else {})
    return out


def published_draft(out: Path, head: int = 64000, intermediate: int = 18432) -> Path:
    """A LLaMA-like EAGLE-3 draft for it, of 2.6 billion parameters as given: headers over holes,
    and true maps between the vocabularies.
    """
    hidden, vocabulary = 7168, 163840
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": head,
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
            "use_aux_hidden_state": True,
        },
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 262144,
        "model_type": "llama",
        "num_attention_heads": 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": 64,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
    }
    attention = {f"self_attn.{name}_proj": (64 * 128, 2 * hidden) for name in "qkv"}
    layer = attention | {
        "self_attn.o_proj": (hidden, 64 * 128),
        **_feed_forward("mlp", hidden, intermediate),
        **{
            norm: (hidden,)
            for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
    }
    weights = {f"midlayer.{name}.weight": ("BF16", size) for name, size in layer.items()} | {
        "norm.weight": ("BF16", (hidden,)),
        "fc.weight": ("BF16", (hidden, 3 * hidden)),
        "lm_head.weight": ("BF16", (head, hidden)),
        "embed_tokens.weight": ("BF16", (vocabulary, hidden)),
    }
    if head == vocabulary:
        maps = {}
    else:
        maps = {
            "d2t": torch.zeros(head, dtype=torch.int64),
            "t2d": torch.arange(vocabulary) < head,
        }
    _write(out, config, {"weights": weights} | ({"maps": maps} if maps else {}))
    return out


def _config(text: Mapping, vision: Mapping) -> dict:
    own = {
        "AutoConfig": "configuration_kimi_k25.KimiK25Config",
        "AutoModel": f"modeling_kimi_k25.{WRAPPER}",
        "AutoModelForCausalLM": f"modeling_kimi_k25.{WRAPPER}",
    }
    return {
        "architectures": [WRAPPER],
        "auto_map": own,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": text["vocab_size"] - 4,
        "model_type": "kimi_k25",
        "text_config": dict(text)
        | {"auto_map": {"AutoConfig": "configuration_kimi_k25.DeepseekV3Config"}},
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "vision_config": dict(vision),
    } | {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in text}


def _vision_config(hidden: int, intermediate: int, layers: int, heads: int, text: int) -> dict:
    side = 64 if hidden > 64 else 8
    common = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
    }
    return (
        common
        | {f"vt_{name}": value for name, value in common.items()}
        | {
            "_attn_implementation": "eager",
            "init_pos_emb_height": side,
            "init_pos_emb_time": 4,
            "init_pos_emb_width": side,
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "mm_hidden_size": hidden,
            "mm_projector_type": "patchmerger",
            "patch_size": 14,
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-05,
            "text_hidden_size": text,
            "video_attn_type": "spatial_temporal",
        }
    )


def _vision(
    hidden: int, intermediate: int, layers: int, text: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    side = 64 if hidden > 64 else 8
    block = {
        "wqkv": (3 * hidden, hidden),
        "wo": (hidden, hidden),
        "mlp.fc0": (intermediate, hidden),
        "mlp.fc1": (hidden, intermediate),
    }
    sizes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (hidden,),
        "vision_tower.patch_embed.pos_emb.weight": (side, side, hidden),
    }
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    for layer in range(layers):
        prefix = f"vision_tower.encoder.blocks.{layer}."
        norms += [prefix + "norm0", prefix + "norm1"]
        for name, size in block.items():
            sizes |= {f"{prefix}{name}.weight": size, f"{prefix}{name}.bias": size[:1]}
    for name, size in (
        ("mm_projector.proj.0", (4 * hidden, 4 * hidden)),
        ("mm_projector.proj.2", (text, 4 * hidden)),
    ):
        sizes |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
    sizes |= {f"{norm}.{leaf}": (hidden,) for norm in norms for leaf in ("weight", "bias")}
    return {
        name: torch.full(size, 0.01, dtype=torch.bfloat16, device=device)
        for name, size in sizes.items()
    }


def _feed_forward(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    wide = (intermediate, hidden)
    return {
        f"{prefix}.gate_proj": wide,
        f"{prefix}.up_proj": wide,
        f"{prefix}.down_proj": wide[::-1],
    }


def _published_layer(text: Mapping, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, experts, small = (
        text["hidden_size"],
        text["n_routed_experts"],
        text["moe_intermediate_size"],
    )
    inner: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_a_proj": (1536, hidden),
        "self_attn.q_a_layernorm": (1536,),
        "self_attn.q_b_proj": (64 * (128 + 64), 1536),
        "self_attn.kv_a_proj_with_mqa": (512 + 64, hidden),
        "self_attn.kv_a_layernorm": (512,),
        "self_attn.kv_b_proj": (64 * (128 + 128), 512),
        "self_attn.o_proj": (hidden, 64 * 128),
    }
    prefix, packed = f"language_model.model.layers.{layer}.", {}
    if layer == 0:
        inner |= _feed_forward("mlp", hidden, text["intermediate_size"])
    else:
        inner |= {"mlp.gate": (experts, hidden)} | _feed_forward(
            "mlp.shared_experts", hidden, small
        )
        packed["mlp.gate.e_score_correction_bias"] = ("F32", (experts,))
        for number in range(experts):
            for name, (rows, columns) in _feed_forward(
                f"mlp.experts.{number}", hidden, small
            ).items():
                packed |= {
                    f"{name}.weight_packed": ("I32", (rows, columns // 8)),
                    f"{name}.weight_scale": ("BF16", (rows, columns // 32)),
                    f"{name}.weight_shape": ("I32", (2,)),
                }
    plain = {f"{name}.weight": ("BF16", size) for name, size in inner.items()}
    return {prefix + name: entry for name, entry in (plain | packed).items()}


def _quantized(
    weights: dict[str, torch.Tensor], quantization: Mapping | None
) -> dict[str, torch.Tensor]:
    method = (quantization or {}).get("quant_method")
    convert = {None: None, "compressed-tensors": _int4, "fp8": _fp8, "awq": _awq}[method]
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        chosen = {
            "compressed-tensors": ".experts." in name,
            "awq": ".mlp." in name and name.endswith("_proj.weight") and "shared" not in name,
            "fp8": name.endswith(("_proj.weight", "_proj_with_mqa.weight")),
        }.get(method, False)
        if convert is None or not chosen:
            found[name] = value
        else:
            found |= {
                f"{name.removesuffix('weight')}{leaf}": part.contiguous()
                for leaf, part in convert(value.float()).items()
            }
    return found


def _int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Groups of 32 along the columns, eight values of four bits in a word, the lowest first."""
    rows, columns = weight.shape
    groups = weight.view(rows, -1, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-8)
    levels = ((groups / scale).round().clamp(-8, 7) + 8).to(torch.int64).view(rows, -1, 8)
    words = (levels << torch.arange(0, 32, 4)).sum(-1)
    return {
        "weight_packed": torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32),
        "weight_scale": scale.squeeze(-1).to(torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }


def _fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = (-(-size // 32) for size in weight.shape)
    scale = torch.full((rows, columns), weight.abs().max().item() / 448)
    return {
        "weight": (weight / scale[0, 0]).to(torch.float8_e4m3fn),
        "weight_scale_inv": scale,
    }


def _awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    return {
        "qweight": torch.zeros(columns, rows // 8, dtype=torch.int32),
        "qzeros": torch.zeros(columns // 32, rows // 8, dtype=torch.int32),
        "scales": torch.ones(columns // 32, rows, dtype=torch.float16),
    }


def _write(out: Path, config: Mapping, shards: Mapping[str, Mapping]) -> None:
    """A folder whose shards hold tensors, or dtypes and shapes over holes."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config))
    if "auto_map" in config:
        for name in CODE:
            (out / f"{name}.py").write_text("raise RuntimeError('code of the model folder ran')\n")
        own = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
        (out / "tokenizer_config.json").write_text(json.dumps({"auto_map": own}))
        own = {"AutoProcessor": "kimi_k25_processor.KimiK25Processor"}
        (out / "preprocessor_config.json").write_text(json.dumps({"auto_map": own}))
    where = {}
    for number, shard in enumerate(shards.values(), 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        where |= dict.fromkeys(shard, name)
        if isinstance(next(iter(shard.values())), torch.Tensor):
            save_file(dict(shard), out / name)
        else:
            _write_holes(out / name, shard)
    if where:
        index = {"metadata": {}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_holes(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """The format of safetensors: the header's length in eight bytes, the header, the data."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + ITEM_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def prompts(path: Path, count: int = 24, tokens: int = 200) -> Path:
    """Token ids by number, for checks that no server is needed for."""
    made = numpy.random.default_rng(0).integers(1000, 160000, (count, tokens)).tolist()
    path.write_text(json.dumps([{"id": str(i), "input_ids": ids} for i, ids in enumerate(made)]))
    return path
