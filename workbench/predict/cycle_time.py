"""The cost model: from shapes and a machine's measured inputs to the seconds of each stage of a
cycle, for every placement of the draft.

Sources of the formulas, where they are used:
- a stage takes as long as its bytes at the measured bandwidth or its operations at the measured
rate, whichever is longer (roofline: Williams, Waterman and Patterson, Communications of the ACM
52(4), 2009); how bytes become seconds: machine.Machine.read_s; a forward reads each weight once and
multiplies and adds once for each of them and each token (Pope et al., Efficiently Scaling
Transformer Inference, 2022, section 2). Attention's own operations are left out: at the contexts of
a cycle they are few beside the weights'.
- a forward makes one all-reduce for the embedding (vocab_parallel_embedding.py:526), two a layer
(attention output and feed-forward: linear.py:1824; experts: deepseek_v2.py:1293) and one all-gather
of logits (logits_processor.py:1036), none in a group of one (parallel_state.py:692). Counted on
real servers: 3 and 1 for a draft of one layer, 9 and 1 for a target of 4.
- n steps are n - 1 draft forwards (eagle_worker_v2.py:819) and one in draft-extend (:1211).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.profile import Profile
from workbench.predict import compatibility, memory
from workbench.predict.machine import Machine
from workbench.predict.model_shape import ITEM_BYTES, ModelShape, canonical
from workbench.predict.sharding import (
    MLA_DRAFT,
    VISION,
    VOCABULARY,
    head_rows,
    implied,
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


@dataclass(frozen=True)
class Cost:
    """Seconds of a stage on the slowest rank. work_s: bytes or operations, whichever take longer;
    launch_s: what launching adds to that.
    """

    bytes_s: float
    operations_s: float
    collective_s: float
    launch_s: float

    @property
    def work_s(self) -> float:
        return max(self.bytes_s, self.operations_s)

    @property
    def total_s(self) -> float:
        return self.work_s + self.collective_s + self.launch_s


@dataclass(frozen=True)
class Prediction:
    """The predicted cycle of an arm (without speculation: its step), by stage. host_s: what the
    host needs for a cycle beside the device's work; remainder_s: what is added to both. Either
    as measured elsewhere; 0 where nothing was measured.
    """

    arm: str
    stages: dict[str, Cost]
    remainder_s: float = 0.0
    host_s: float = 0.0

    @property
    def draft_s(self) -> float:
        """Seconds of a cycle that drafting takes: draft, with the agreement of the ranks, and
        draft-extend.
        """
        return sum(
            self.stages[stage].total_s
            for stage in ("draft", "draft_extend")
            if stage in self.stages
        )

    @property
    def device_s(self) -> float:
        """Seconds of a cycle in which the device has work."""
        return sum(cost.total_s for cost in self.stages.values())

    @property
    def cycle_s(self) -> float:
        """SGLang prepares the next cycle on the host while the device is at work on this one (its
        overlap scheduler,
        managers/scheduler.py:event_loop_overlap), so the slower of the two sets the pace."""
        return max(self.device_s, self.host_s) + self.remainder_s


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


def _weights(profile: Profile, shape: ModelShape, ranks: int) -> _Weights:
    dtype, unit = memory.serving_dtype(profile, shape), 32 * ranks if profile.engine == "cpu" else 1
    sums = {part: [0.0, 0.0] for part in ("always", "expert", "fc")}
    products: set[str] = set()
    for tensor in shape.tensors or implied(shape):
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
            products.add(_fused(name))
        sums[part][0] += share * rank_bytes(shape, tensor, ranks, dtype, unit)
        sums[part][1] += share * rank_elements(shape, tensor, ranks, unit)
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
    projections (models/llama.py:160, :66,
    deepseek_v2.py:2070)."""
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
        own steps (llama_eagle3.py:238).
    Raises: BadInput where the weights are not known, or config.json does not say how many experts a
        token takes.
    """
    weights, item = (
        _weights(profile, shape, ranks),
        ITEM_BYTES[memory.serving_dtype(profile, shape)],
    )
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
        ):  # its fc is column-parallel (kimi_k25_eagle3.py:212)
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
    # (eagle_draft_extend_cuda_graph_runner.py:384).
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


def overlaps(profile: Profile) -> bool:
    """Whether the host prepares a cycle while the device works on the one before."""
    return profile.engine == "cuda" and not profile.flag("disable-overlap-schedule", False)


def cost(profile: Profile, work: Work, machine: Machine, kernels: float | None = None) -> Cost:
    """What a stage's work costs on a machine; kernels: how many it launches, where a trace has
    counted them.

    In a graph each kernel costs its measured place in a graph and the stage one replay, no launch.
    Without graphs a GPU is launched to while it works, so launches cost only what they exceed the
    work by; on a CPU every operator is paid.
    Raises: BadInput when something of this was not measured on the machine.
    """
    graph, custom = graphs(profile), not profile.flag("disable-custom-all-reduce", False)
    count = work.kernels if kernels is None else kernels
    done = Cost(
        machine.read_s(work.bytes, work.products),
        work.operations / machine.known("matrix_ops_per_s"),
        sum(
            c.count
            * machine.collective_s(
                c.kind, c.bytes, c.ranks, graph=graph and c.kind != "broadcast", custom=custom
            )
            for c in work.collectives
        ),
        0.0,
    )
    if graph:
        launch = count * machine.known("graph_launch_s") + machine.known("graph_replay_s") * (
            count > 0
        )
    else:
        launch = count * machine.known("launch_s") - (
            done.total_s if profile.engine == "cuda" else 0.0
        )
    return replace(done, launch_s=max(0.0, launch))


def predict(
    profile: Profile,
    target: ModelShape,
    draft: ModelShape | None,
    arm: Arm,
    machine: Machine,
    *,
    context: float = 0.0,
    concurrency: int | None = None,
    kernels: Mapping[str, float] | None = None,
    remainder_s: float = 0.0,
    host_s: float = 0.0,
) -> Prediction:
    """The cycle of an arm. Arguments as for ``stages``, ``cost`` and ``Prediction``; kernels:
    {stage: kernels a cycle} as a trace counted them.

    Raises: BadInput as ``forward`` and ``cost`` do.
    """
    works = stages(profile, target, draft, arm, context=context, concurrency=concurrency)
    costs = {
        name: cost(profile, work, machine, (kernels or {}).get(name))
        for name, work in works.items()
    }
    return Prediction(arm.name, costs, remainder_s, host_s)


def placements(profile: Profile, draft: ModelShape) -> tuple[Arm, ...]:
    """Shared, and own-N for every N that divides the target's ranks and the draft's heads."""
    sizes = [n for n in range(1, profile.tp + 1) if profile.tp % n == 0]
    return (
        Arm("shared"),
        *(
            Arm("own", n)
            for n in sizes
            if compatibility.heads(profile, draft, n, f"own-{n}").status != "refused"
        ),
    )


def by_placement(
    profile: Profile, target: ModelShape, draft: ModelShape, machine: Machine, **how
) -> dict[str, Prediction]:
    """{arm: its predicted cycle} for every placement; how: as for ``predict``."""
    return {
        arm.name: predict(profile, target, draft, arm, machine, **how)
        for arm in placements(profile, draft)
    }


def best(predictions: Mapping[str, Prediction]) -> Prediction:
    """The placement whose drafting takes the least time: weights read on few ranks against
    collectives saved.
    """
    return min(predictions.values(), key=lambda p: p.draft_s)


def verify_s(
    profile: Profile,
    target: ModelShape,
    machine: Machine,
    widths: Sequence[int] = tuple(range(1, 9)),
    **how,
) -> dict[int, float]:
    """{width: seconds of a verify of so many tokens a request}; width 1 is a plain step. how:
    context, concurrency.
    """
    requests, none = how.get("concurrency") or profile.workload.concurrency, Arm("none")
    kv = memory.predict(profile, target, None, none).kv * how.get("context", 0.0) * requests
    return {
        width: (
            cost(
                profile,
                forward(
                    profile,
                    target,
                    profile.tp,
                    width * requests,
                    rows=width * requests,
                    kv_bytes=kv,
                ),
                machine,
            ).total_s
        )
        for width in widths
    }
