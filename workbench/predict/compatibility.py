"""Whether a draft fits its target, and both fit the ranks of an arm: one rule a function, over what
the two folders say.
"""

from __future__ import annotations

from workbench.experiment.arms import Arm
from workbench.experiment.checks import Check, passed, refused, warned
from workbench.experiment.profile import Profile
from workbench.predict import quantized
from workbench.predict.aux_layers import aux_layers
from workbench.predict.memory import serving_dtype
from workbench.predict.model_shape import ModelShape
from workbench.predict.sharding import (
    EAGLE3_DRAFTS,
    MLA_DRAFT,
    keeps_embedding,
    takes_head,
)
from workbench.predict.vocabulary import token_map, vocabulary

_LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
_MLA_ONLY_BACKENDS = ("trtllm_mla", "cutlass_mla", "cutedsl_mla", "flashmla", "tokenspeed_mla")


def algorithm(profile: Profile, target: ModelShape, draft: ModelShape) -> Check:
    """The draft's class and the algorithm belong together; with EAGLE an EAGLE-3 draft accepts
    nothing: its accept length is 1.0, and SGLang reports no error.
    """
    named, is_eagle3 = profile.speculation.algorithm.upper(), draft.architecture in EAGLE3_DRAFTS
    if not is_eagle3:
        return refused(
            "pair.draft",
            f"{draft.architecture} is no EAGLE-3 draft",
            f"take one of class {' or '.join(EAGLE3_DRAFTS)}",
        )
    if named != "EAGLE3":
        return refused(
            "speculation.algorithm",
            f"{named} would take an EAGLE-3 draft and accept nothing",
            "use EAGLE3",
        )
    if draft.architecture == MLA_DRAFT and (wrong := _no_mla_draft(draft)):
        return refused(
            f"pair.draft{wrong[0]}",
            wrong[1],
            "take a draft of Kimi's class as published, or a LLaMA-like one",
        )
    return passed("speculation.algorithm", f"EAGLE3 with a draft of class {draft.architecture}")


def _no_mla_draft(draft: ModelShape) -> tuple[str, str] | None:
    """Key and fault of a config.json with which SGLang cannot build its MLA draft class."""
    if draft.layers != 1:  # models/kimi_k25_eagle3.py:243 num_hidden_layers
        return (
            ".num_hidden_layers",
            f"is {draft.layers}, and a draft of class {MLA_DRAFT} has one layer",
        )
    if draft.mla is None or not draft.mla.q_lora_rank:  # models/kimi_k25_eagle3.py:114 q_lora_rank
        return f".{'q' if draft.mla else 'kv'}_lora_rank", f"is missing, and {MLA_DRAFT} needs it"
    kept = draft.stored.get("layers.0.self_attn.kv_b_proj.weight")
    # models/kimi_k25_eagle3.py:504 kv_b_proj
    if draft.quantization and (kept is None or kept.dtype not in ("F32", "BF16", "F16")):
        return (
            ".quantization_config",
            f"quantises kv_b_proj, and {MLA_DRAFT} splits it in a float dtype only",
        )
    return None


def hidden_size(profile: Profile, target: ModelShape, draft: ModelShape) -> Check:
    """The draft is built for hidden states as wide as the target's (models/llama_eagle3.py:152
    target_hidden_size)."""
    wide = draft.eagle.target_hidden_size or draft.hidden_size
    if wide != target.hidden_size:
        key = "target_hidden_size" if draft.eagle.target_hidden_size else "hidden_size"
        return refused(
            f"pair.draft.{key}",
            f"is {wide} where the target's hidden states have {target.hidden_size} values",
            "take a draft trained for this target",
        )
    if takes_head(draft) and draft.hidden_size != target.hidden_size:
        return refused(
            "pair.draft.draft_vocab_size",
            "is null, but the target's head is too wide for this draft",
            "take a draft with a head of its own",
        )
    return passed("pair.draft.hidden_size", f"{draft.hidden_size}, reading hidden states of {wide}")


def embedding(profile: Profile, target: ModelShape, draft: ModelShape) -> Check:
    """Where the draft's token embedding comes from (models/llama.py:910 set_embed)."""
    field, stored = "pair.draft.embed_tokens", "embed_tokens.weight" in draft.stored
    if keeps_embedding(draft):
        if draft.tensors and not stored:
            return refused(
                field,
                "is not in the draft's weights, and the target's is of another width",
                "take a complete draft",
            )
        return passed(field, "the draft's own, of another width than the target's")
    return passed(
        field, "the target's" + (", in place of the one that the draft brings" if stored else "")
    )


def positions(profile: Profile, target: ModelShape, draft: ModelShape) -> Check:
    """The draft runs at the target's positions, so its context must not be shorter
    (configs/model_config.py:1296 derived_context_len).
    """
    wanted = int(profile.number("context-length", target.context))
    if draft.context < wanted and not profile.server.environment.get(_LONGER_CONTEXT):
        return refused(
            "pair.draft.max_position_embeddings",
            f"gives {draft.context} positions where the target is served with {wanted}",
            f"set server.flags.context-length to {draft.context}, or {_LONGER_CONTEXT} to 1 in"
            " server.environment",
        )
    return passed(
        "pair.draft.max_position_embeddings", f"{draft.context} positions, {wanted} served"
    )


def dtype(profile: Profile, target: ModelShape, draft: ModelShape) -> Check:
    """Draft and target share tables and hidden states, so they are served in one dtype."""
    ours, theirs = serving_dtype(profile, draft), serving_dtype(profile, target)
    if ours != theirs:
        return refused(
            "pair.draft.dtype",
            f"is served as {ours} where the target is {theirs}",
            "name one in server.flags.dtype",
        )
    return passed("pair.draft.dtype", f"{ours}, as the target")


def kernels(profile: Profile, target: ModelShape) -> Check:
    """On GPUs the layers' kernels are made for half precision: sgl_kernel's rmsnorm refuses float32
    once a server is loaded
    (layers/layernorm.py:631 rmsnorm, seen on an H200)."""
    if profile.engine == "cuda" and serving_dtype(profile, target) == "F32":
        return refused(
            "server.flags.dtype",
            "is float32, for which SGLang has no RMSNorm on GPUs",
            "use bfloat16 or float16, or the CPU engine",
        )
    return passed("server.flags.dtype", f"{serving_dtype(profile, target)}")


def attention_backend(profile: Profile, target: ModelShape, draft: ModelShape) -> Check:
    """A draft inherits the target's attention back end; one made for MLA alone cannot serve a
    LLaMA-like draft (sglang#23490).
    """
    field, named = (
        "server.flags.speculative-draft-attention-backend",
        profile.flag("speculative-draft-attention-backend", None),
    )
    mend, ours = "set it to triton, flashinfer or fa3", str(profile.flag("attention-backend", ""))
    if target.mla and not draft.mla and profile.engine == "cuda" and not named:
        if ours in _MLA_ONLY_BACKENDS:
            return refused(
                field, f"is not set, and the draft has no MLA for the target's {ours}", mend
            )
        if not ours:
            return warned(
                field,
                "is not set, and the back end that SGLang picks for an MLA target may not serve a"
                " LLaMA-like draft",
                mend,
            )
    return passed(
        field,
        f"{named or 'the target' + chr(39) + 's'}, for a draft"
        f" {'with' if draft.mla else 'without'} MLA",
    )


def rotary(profile: Profile, shape: ModelShape) -> Check:
    """On a CPU, SGLang builds rotary embeddings for MLA with YaRN scaling alone
    (layers/rotary_embedding/factory.py:480 deepseek_yarn).
    """
    if profile.engine == "cpu" and shape.mla and shape.rope == "default":
        return refused(
            f"{shape.field}.rope_scaling",
            f"is absent, and an MLA {shape.field.removeprefix('pair.')} on the CPU engine needs"
            " YaRN",
            "give it a scaling of type yarn",
        )
    return passed(f"{shape.field}.rope_scaling", shape.rope)


def heads(profile: Profile, shape: ModelShape, ranks: int, field: str) -> Check:
    """A group of ``ranks`` splits heads evenly; KV heads are split, or replicated where there are
    fewer (models/llama.py:183 total_num_heads to models/llama.py:193 total_num_kv_heads).

    SGLang on a CPU would add empty heads instead, and pads intermediate sizes
    (configs/update_config.py:245 num_attention_heads, configs/update_config.py:290
    intermediate_padding_size): the former is another model than the GPU's and is refused, the
    latter changes nothing.
    """
    who = "the target" if shape.field == "pair.target" else "the draft"
    mend = "use a divisor" if field == "tp" else "leave this arm out or choose a group that divides"
    problem = None
    if shape.heads % ranks:
        problem = f"{ranks} does not divide {who}'s {shape.heads} attention heads"
    elif profile.engine == "cpu" and shape.kv_heads % ranks:
        problem = (
            f"{ranks} does not divide {who}'s {shape.kv_heads} KV heads, which the CPU engine"
            " cannot replicate"
        )
    elif not shape.mla and shape.kv_heads % ranks and ranks % shape.kv_heads:
        problem = f"{ranks} neither divides {who}'s {shape.kv_heads} KV heads nor is a multiple"
    elif profile.engine == "cuda" and _dense(shape) and shape.intermediate_size % ranks:
        problem = f"{ranks} does not divide {who}'s intermediate size {shape.intermediate_size}"
    # models/deepseek_v2.py:714 n_routed_experts
    elif shape.experts and shape.experts.count < ranks:
        problem = f"{ranks} ranks are more than {who}'s {shape.experts.count} experts"
    elif profile.engine == "cuda" and shape.experts and shape.experts.intermediate_size % ranks:
        problem = (
            f"{ranks} does not divide the size {shape.experts.intermediate_size} of {who}'s experts"
        )
    elif block := profile.engine == "cuda" and _split_block(shape, ranks):
        problem = f"{ranks} ranks split {who}'s quantised blocks of {block}"
    if problem:
        return refused(field, problem, mend)
    kv = (
        "one latent"
        if shape.mla
        else f"{max(1, shape.kv_heads // ranks)} of {shape.kv_heads} KV heads"
    )
    return passed(
        field,
        f"{who} on {ranks} rank{'s' * (ranks > 1)}: {shape.heads // ranks} of {shape.heads} heads,"
        f" {kv} each",
    )


def _split_block(shape: ModelShape, ranks: int) -> int | None:
    """The block size that a group would cut through, if any (layers/quantization/fp8.py:594
    block_k, layers/quantization/fp8.py:1588 block_n).
    """
    blocks = (shape.quantization or {}).get("weight_block_size") if ranks > 1 else None
    sizes = [shape.intermediate_size] * _dense(shape) + (
        [shape.experts.intermediate_size] if shape.experts else []
    )
    return next((b for b in blocks or () for size in sizes if size // ranks % b), None)


def _dense(shape: ModelShape) -> bool:
    return not shape.experts or shape.experts.first_layer > 0


def group(profile: Profile, arm: Arm) -> Check:
    """own-N: N consecutive ranks of one node are a group, so N divides the target's TP and the
    ranks of a node.
    """
    if arm.placement != "own":
        return passed(f"plan.arms {arm.name}", f"the draft on the target's {profile.tp} ranks")
    each = profile.ranks_a_node
    divisors = [n for n in range(1, profile.tp) if profile.tp % n == 0 and each % n == 0] or [1]
    if profile.tp % arm.group:
        return refused(
            f"plan.arms {arm.name}",
            f"{arm.group} does not divide TP {profile.tp}",
            f"use {' or '.join(f'own-{n}' for n in divisors)}",
        )
    if each % arm.group:
        return refused(
            f"plan.arms {arm.name}",
            f"is a group of {arm.group} that would straddle nodes of {each} rank{'s' * (each > 1)}",
            f"use {' or '.join(f'own-{n}' for n in divisors)}",
        )
    if arm.group == profile.tp:
        return warned(
            f"plan.arms {arm.name}",
            f"is the target's whole group of {profile.tp}, as in shared, with a communicator of"
            " its own",
            "use it only as a control",
        )
    return passed(
        f"plan.arms {arm.name}",
        f"{profile.tp // arm.group} drafts on {arm.group} rank{'s' * (arm.group > 1)} each",
    )


def tree(profile: Profile, arm: Arm) -> Check:
    """A tree of s steps and topk k offers k + (s - 1) k^2 candidates; one fewer than draft_tokens
    is chosen (eagle_utils.py:110 top_scores).

    Raises: BadInput when the arm's own settings cannot be served.
    """
    setting = profile.speculation.of(arm)
    if not setting.fills:
        return refused(
            "speculation.draft_tokens",
            f"{setting.draft_tokens} for {arm.name}, but {setting.steps} steps of topk "
            f"{setting.topk} offer {setting.candidates} beside the root",
            f"use at most {setting.candidates + 1}",
        )
    shape = "chain" if setting.topk == 1 else f"tree of topk {setting.topk}"
    return passed(
        "speculation",
        f"{arm.name}: {shape}, {setting.steps} steps, {setting.draft_tokens} tokens verified",
    )


def _layers(shape: ModelShape) -> str:
    return f"{shape.layers} layer{'s' * (shape.layers != 1)}"


def stored_weights(shape: ModelShape) -> Check:
    """The files hold every weight that config.json implies (quantized.py)."""
    return quantized.complete(shape, _layers(shape))


PAIR_RULES = (
    algorithm,
    hidden_size,
    vocabulary,
    token_map,
    aux_layers,
    embedding,
    positions,
    dtype,
    attention_backend,
)
