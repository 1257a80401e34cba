"""The work of a cycle's stages on one rank: bytes, operations, kernels, collectives."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.profile import Profile
from workbench.predict import memory, quantized
from workbench.predict.model_files import ITEM_BYTES
from workbench.predict.model_shape import ModelShape, canonical
from workbench.predict.sharding import (
    MLA_DRAFT,
    VISION,
    VOCABULARY,
    head_rows,
    is_served,
    padded_rows,
    rank_bytes,
    rank_elements,
)

# Kernels of a decode step, estimated by reading models/llama.py (norm, QKV, rotary, KV store,
# attention in two passes, output, norm, gate and up, activation, down), models/deepseek_v2.py
# (router, sorting, experts, shared expert; latent projections) and, once a forward, embedding, head
# and argmax. A trace counts the real ones
# (workbench/answers/torch_trace.py): give
# them as ``kernels``.
LAYER_KERNELS, SPARSE_KERNELS, LATENT_KERNELS, FORWARD_KERNELS = 11, 8, 6, 8


@dataclass(frozen=True)
class Collective:
    """So many collectives of one kind a stage; bytes: one rank's input."""

    kind: str
    bytes: int
    ranks: int
    count: int


@dataclass(frozen=True)
class Work:
    """What one rank does in a stage. bytes: read from memory; operations: multiplications and
    additions; kernels: launched; products: of
    them those that read weights."""

    bytes: float = 0.0
    operations: float = 0.0
    kernels: float = 0.0
    collectives: tuple[Collective, ...] = ()
    products: float = 0.0

    def times(self, count: int) -> Work:
        return Work(
            count * self.bytes,
            count * self.operations,
            count * self.kernels,
            tuple(replace(c, count=count * c.count) for c in self.collectives),
            count * self.products,
        )


def distinct_experts(count: int, per_token: int, tokens: float) -> float:
    """Expected number of distinct experts of one layer that ``tokens`` tokens read, each routed to
    ``per_token`` of ``count``.

    An expert that a token takes with probability p is read unless every token passes it by: E = sum
    of 1 - (1 - p)^tokens over experts (linearity of expectation; the occupancy problem of Feller,
    An Introduction to Probability Theory, vol. 1, IV.2, for subsets). p = per_token / count, as
    where routing is uniform and tokens are independent; those of one text share experts, so this is
    rather too many.
    Raises: BadInput when the numbers are no routing.
    """
    if not 0 < per_token <= count or tokens < 0:
        raise BadInput(
            "experts",
            f"are {count} with {per_token} a token for {tokens:g} tokens",
            "give 1 or more a token, and no more than there are",
        )
    return count * (1 - (1 - per_token / count) ** tokens)


@dataclass(frozen=True)
class _Weights:
    """One rank's weights by when they are read: always, of one routed expert in every sparse layer,
    of the draft's fc. (bytes, elements)
    products: how many products read those of always and of experts, the head's included."""

    always: tuple[float, float]
    expert: tuple[float, float]
    fc: tuple[float, float]
    products: int


@lru_cache(64)  # a model of many experts has 200,000 tensors, and every stage reads them
def _weights(shape: ModelShape, ranks: int, dtype: str, unit: int) -> _Weights:
    sums = {part: [0.0, 0.0] for part in ("always", "expert", "fc")}
    products: set[str] = set()
    for tensor in quantized.weights(shape):
        name = canonical(tensor.name)
        module = name.split(".")[-2] if "." in name else name
        if (
            not is_served(shape, tensor)
            or module in (*VOCABULARY, "d2t")
            or name.startswith(VISION)
        ):
            continue  # the head is added below; of an embedding only the tokens' rows are read
        part, share = "fc" if module == "fc" else "always", 1.0
        if module == "kv_b_proj":
            # of it and its transposed copy a decode step reads the copy alone
            # (tensors.rank_elements)
            share = 0.5
        elif ".experts." in name:
            number = re.search(r"\.experts\.(\d+)\.", name)
            if number and number[1] != "0":
                continue  # experts are equal: the first stands for each
            part, share = "expert", 1.0 if number else 1 / shape.experts.count
        if len(tensor.shape) > 1 and part != "fc":
            products.add(_fused(name.rsplit(".", 1)[0] + "."))  # its scales are read with it
        sums[part][0] += share * rank_bytes(shape, tensor, ranks, dtype, unit)
        multiplied = quantized.values(shape, tensor) * rank_elements(shape, tensor, ranks, unit)
        sums[part][1] += share * multiplied
    if not sums["always"][1]:
        raise BadInput(
            shape.field,
            f"the weights of {shape.architecture} are not known",
            "give a folder with its safetensors files",
        )
    head = padded_rows(head_rows(shape), ranks) * shape.hidden_size
    sums["always"][0] += head * ITEM_BYTES[dtype]
    return _Weights(*(tuple(sums[part]) for part in ("always", "expert", "fc")), len(products) + 1)


def _fused(name: str) -> str:
    """The product that reads a weight: SGLang stacks Q, K and V, gate and up, and MLA's first
    projections (models/llama.py:160 LlamaAttention, models/llama.py:98 gate_up_proj,
    models/deepseek_v2.py:2070 fused_qkv_a_proj_with_mqa)."""
    for stacked, parts in (
        ("qkv", "q_proj|k_proj|v_proj"),
        ("gate_up", "gate_proj|up_proj"),
        ("qkv_a", "q_a_proj|kv_a_proj_with_mqa"),
    ):
        name = re.sub(rf"\.({parts})\.", f".{stacked}.", name)
    return name


def forward(
    profile: Profile,
    shape: ModelShape,
    ranks: int,
    tokens: int,
    *,
    rows: int,
    kv_bytes: float = 0.0,
    fc: bool = False,
) -> Work:
    """One forward of ``tokens`` tokens on one rank of a group of ``ranks``, with logits for
    ``rows`` of them.

    kv_bytes: KV read on the rank.
    fc: a draft joins the target's hidden states, which it does in draft-extend and not between its
        own steps (llama_eagle3.py:238 hidden_states).
    Raises: BadInput where the weights are not known, or config.json does not say how many experts a
        token takes.
    """
    dtype = memory.serving_dtype(profile, shape)
    unit = 32 * ranks if profile.engine == "cpu" else 1
    weights, item = _weights(shape, ranks, dtype, unit), ITEM_BYTES[dtype]
    read, multiplied = (
        weights.always[0] + kv_bytes + tokens * shape.hidden_size * item,
        tokens * weights.always[1],
    )
    if shape.experts and weights.expert[0]:
        each = experts_a_token(shape)
        read += distinct_experts(shape.experts.count, each, tokens) * weights.expert[0]
        multiplied += tokens * each * weights.expert[1]
    if fc:
        read, multiplied = read + weights.fc[0], multiplied + tokens * weights.fc[1]
    products = weights.products + fc
    head = padded_rows(head_rows(shape), ranks)
    kernels = FORWARD_KERNELS + shape.layers * (
        LAYER_KERNELS + LATENT_KERNELS * bool(shape.mla) + SPARSE_KERNELS * bool(shape.experts)
    )
    found: list[Collective] = []
    if ranks > 1:
        found += [
            Collective(
                "all_reduce", tokens * shape.hidden_size * item, ranks, 1 + 2 * shape.layers
            ),
            Collective("all_gather", rows * head * item, ranks, 1),
        ]
        if (
            fc and shape.architecture == MLA_DRAFT
        ):  # its fc is column-parallel (kimi_k25_eagle3.py:212 fc)
            found.append(
                Collective("all_gather", tokens * shape.hidden_size // ranks * item, ranks, 1)
            )
    return Work(
        read, 2 * (multiplied + rows * head * shape.hidden_size), kernels, tuple(found), products
    )


def experts_a_token(shape: ModelShape) -> int:
    """How many routed experts a token takes.

    Raises: BadInput when config.json does not say.
    """
    named = next(
        (
            shape.config[key]
            for key in ("num_experts_per_tok", "moe_topk", "top_k_experts")
            if shape.config.get(key)
        ),
        None,
    )
    if named is None:
        raise BadInput(
            shape.field,
            "config.json does not say how many experts a token takes",
            "add num_experts_per_tok",
        )
    return int(named)


def stages(
    profile: Profile,
    target: ModelShape,
    draft: ModelShape | None,
    arm: Arm,
    *,
    context: float = 0.0,
    concurrency: int | None = None,
) -> dict[str, Work]:
    """{stage: work of one rank a cycle}; {"decode": ...} without speculation. context: tokens of KV
    a request has; concurrency: requests at once (default: the workload's). An own group's draft
    works on the same tokens on every group, so nothing is divided among groups.
    """
    requests = concurrency or profile.workload.concurrency
    needs, held = memory.predict(profile, target, draft, arm), context * requests
    if not arm.speculates or draft is None:
        return {
            "decode": forward(
                profile, target, profile.tp, requests, rows=requests, kv_bytes=held * needs.kv
            )
        }
    speculation, group = profile.speculation.of(arm), arm.group or profile.tp
    width, fan = requests * speculation.draft_tokens, requests * speculation.topk
    # In graphs draft-extend has logits of the last accepted token only
    # (eagle_draft_extend_cuda_graph_runner.py:385 num_tokens_for_logprob).
    rows = requests if graphs(profile) else width
    drafts = forward(profile, draft, group, fan, rows=fan, kv_bytes=held * needs.draft_kv).times(
        max(0, speculation.steps - 1)
    )
    if arm.group and profile.tp > 1 and speculation.agreement != "off" and speculation.steps:
        # int64 tokens of a chain; a tree's parents and order beside them
        # (workbench/engine/agreement.py).
        size = (
            8
            * (width - requests)
            * (1 if speculation.topk == 1 and speculation.agreement == "broadcast" else 3)
        )
        kind = "broadcast" if speculation.agreement == "broadcast" else "all_gather"
        drafts = replace(
            drafts, collectives=(*drafts.collectives, Collective(kind, size, profile.tp, 1))
        )
    return {
        "draft": drafts,
        "verify": forward(profile, target, profile.tp, width, rows=width, kv_bytes=held * needs.kv),
        "draft_extend": forward(
            profile, draft, group, width, rows=rows, kv_bytes=held * needs.draft_kv, fc=True
        ),
    }


def graphs(profile: Profile) -> bool:
    """Whether decode, draft and verify run in CUDA graphs under the profile."""
    return profile.engine == "cuda" and not profile.flag("disable-cuda-graph", False)
