"""Model folders of a few kilobytes, written name by name as checkpoints have them, and a profile
that serves them. For tests.
"""

import json
from pathlib import Path

import numpy
import yaml
from safetensors.numpy import save_file

from workbench.experiment import profile as profiles

TARGET = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=32,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=128,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    torch_dtype="float32",
)
DRAFT = TARGET | dict(
    architectures=["LlamaForCausalLMEagle3"],
    num_hidden_layers=1,
    draft_vocab_size=64,
    eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
)
DEEPSEEK = TARGET | dict(
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=8,
    n_shared_experts=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    topk_method="noaux_tc",
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
)
MLA_DRAFT = {
    k: v
    for k, v in DEEPSEEK.items()
    if k not in ("n_routed_experts", "n_shared_experts", "moe_intermediate_size")
} | dict(
    architectures=["Eagle3DeepseekV2ForCausalLM"],
    model_type="kimi_k2",
    num_hidden_layers=1,
    draft_vocab_size=128,
    eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
)
KEEP = numpy.arange(64) * 2  # the target's tokens that the draft proposes


def layer(prefix: str, config: dict, wide: int | None = None) -> dict[str, tuple[int, ...]]:
    hidden, heads, keys, size = (
        config[k]
        for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    width, wide = config["head_dim"], wide or hidden
    return {
        f"{prefix}.self_attn.q_proj.weight": (heads * width, wide),
        f"{prefix}.self_attn.k_proj.weight": (keys * width, wide),
        f"{prefix}.self_attn.v_proj.weight": (keys * width, wide),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads * width),
        f"{prefix}.mlp.gate_proj.weight": (size, hidden),
        f"{prefix}.mlp.up_proj.weight": (size, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, size),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def target_sizes(config: dict) -> dict[str, tuple[int, ...]]:
    sizes = {
        "model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"]),
        "model.norm.weight": (config["hidden_size"],),
        "lm_head.weight": (config["vocab_size"], config["hidden_size"]),
    }
    for number in range(config["num_hidden_layers"]):
        sizes |= layer(f"model.layers.{number}", config)
    return sizes


def draft_sizes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, ids = (
        config["hidden_size"],
        (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"),
    )
    return {
        "fc.weight": (hidden, config.get("target_hidden_size", hidden) * (len(ids) if ids else 3)),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.get("draft_vocab_size") or config["vocab_size"], hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        **layer("midlayer", config, 2 * hidden),
    }


def token_maps(keep=KEEP, vocabulary: int = 128) -> dict[str, numpy.ndarray]:
    marks = numpy.zeros(vocabulary, dtype=bool)
    marks[keep] = True
    return {"d2t": (keep - numpy.arange(len(keep))).astype(numpy.int64), "t2d": marks}


def write(
    folder: Path, config: dict, sizes: dict, values: dict | None = None, dtype=numpy.float32
) -> Path:
    """A model folder of zeros; a size of None leaves the weight out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    zeros = {
        name: numpy.zeros(size, dtype=dtype) for name, size in sizes.items() if size is not None
    }
    save_file(zeros | (values or {}), folder / "model.safetensors")
    return folder


def write_pair(
    root: Path, target: dict | None = None, draft: dict | None = None, maps: dict | None = None
) -> None:
    """A pair that passes every check, but for the keys given (a value of None removes the key)."""
    ours = {
        k: v
        for k, v in (TARGET | (target or {})).items()
        if v is not None or k == "draft_vocab_size"
    }
    theirs = {k: v for k, v in (DRAFT | (draft or {})).items() if v is not None}
    write(root / "target", ours, target_sizes(ours))
    write(root / "draft", theirs, draft_sizes(theirs), token_maps() if maps is None else maps)


def settings(root: Path, **changes) -> dict:
    """The fields of a profile for the pair under ``root``, sections merged with ``changes``."""
    prompts = root / "prompts.json"
    if not prompts.exists():
        ids = [[1, 2, 3], [4, 5, 6, 7, 127]] + [[8, 9, n] for n in range(10, 16)]
        prompts.write_text(json.dumps([{"id": c, "input_ids": i} for c, i in zip("abcdefgh", ids)]))
    fields = dict(
        engine="cpu",
        pair=dict(target=str(root / "target"), draft=str(root / "draft")),
        tp=2,
        server=dict(flags={"max-total-tokens": 1024, "disable-radix-cache": True}),
        workload=dict(prompts=str(prompts), max_new_tokens=16),
        plan=dict(arms=["none", "shared", "own-1"]),
    )
    for name, value in changes.items():
        fields[name] = fields.get(name, {}) | value if isinstance(value, dict) else value
    return fields


def profile(root: Path, **changes) -> profiles.Profile:
    """A profile for the pair under ``root``, read from a YAML file as any is."""
    path = root / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings(root, **changes)))
    return profiles.load(path)
