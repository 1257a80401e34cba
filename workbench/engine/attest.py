"""Rank reports: what is active on each rank, gathered once after everything is built, and reported
by /server_info.
"""

from __future__ import annotations

import hashlib
import os

import torch

from workbench.engine import memory, placement
from workbench.engine.arm_switch import Control
from workbench.engine.counting import Counters
from workbench.engine.hooks import Hook, Refused
from workbench.engine.orders import SGLANG, SHARED_MEMORY, Orders

_STEERING = (
    "NCCL_",
    "GLOO_",
    SHARED_MEMORY,
    "SGLANG_ENABLE_PCIE_IPC",
    "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE",
)
_PIECE = 1 << 24  # elements: 128 MiB in float64
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController."


def hooks(orders: Orders, counters: Counters, control: Control, installed: list[str]) -> list[Hook]:
    """Report at the end of a scheduler's construction; add it, the active arm and the counts to
    every /server_info.
    """
    gathered: list[dict] = []

    def attest(_, scheduler):
        mine = {
            "sglang": SGLANG,
            "hooks": sorted(installed),
            "omitted": list(orders.omit),
            "corrupt_rank": orders.corrupt_rank,
            "refusing_rank": orders.refusing_rank,
            "cpu_engine": orders.cpu,
            **_rank(scheduler, orders),
        }
        gathered[:] = placement.target_group().all_gather_object(mine)
        control.gather(scheduler)

    def report(_, controller, state):
        state["draft_tp"] = {
            "server": orders.server,
            **control.read(),
            "attestation": gathered,
            "counts": counters.read(),
        }

    return [
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.init_model_worker", attest, ("self",), "after"
        ),
        # Called for every algorithm, none included (internal_state.py:54 _add_speculative).
        Hook(_STATE + "_add_speculative", report, ("self", "state"), "after"),
    ]


def _rank(scheduler, orders: Orders) -> dict:
    from sglang.srt.runtime_context import get_server_args

    target = placement.target_group()
    mine = {
        "rank": target.rank_in_group,
        "node": get_server_args().node_rank,
        "target_ranks": list(target.ranks),
        "placements": [],
        "memory": memory.target(scheduler.tp_worker.model_runner) | {"device": memory.device()},
        "communication": _communication(target, orders.cpu),
    }
    if scheduler.draft_worker is not None:
        drafts = (
            scheduler.draft_worker.drafts
            if orders.hot
            else {orders.arms[0].draft: scheduler.draft_worker._draft_worker}
        )
        facts = {
            draft: (
                _draft(worker, next(p.arm for p in orders.arms if p.draft == draft))
                | {"memory": memory.draft(worker.draft_runner, scheduler.tp_worker.model_runner)}
            )
            for draft, worker in drafts.items()
        }
        mine["placements"] = [
            {
                "arm": placed.arm,
                "number": placed.number,
                "agreement": placed.agreement,
                **facts[placed.draft],
            }
            for placed in orders.arms
        ]
    return mine


def _communication(group, cpu: bool) -> dict:
    """What the target's group talks through (distributed/parallel_state.py:440 PyNcclCommunicator),
    and the variables that steer it.
    """
    if cpu:
        from workbench.engine.cpu import shared

    def usable(communicator) -> bool:
        return communicator is not None and not getattr(communicator, "disabled", False)

    return {
        "environment": {
            key: value for key, value in sorted(os.environ.items()) if key.startswith(_STEERING)
        },
        "nccl": usable(group.pynccl_comm),
        "custom": usable(group.ca_comm),
        "pcie_ipc": usable(group.pcie_ipc_comm),
        # Off outside of graphs by itself (device_communicators/pymscclpp.py), so its presence
        # counts.
        "mscclpp": group.pymscclpp_comm is not None,
        "torch_symm_mem": usable(group.torch_symm_mem_comm),
        "shared_memory": cpu and shared.ranks_of(group) is not None,
    }


def _draft(worker, arm: str) -> dict:
    """The facts of one draft on this rank, taken from what was built, not from what was ordered.
    arm: who it is for.

    qkv_shape: of the projection whose rows are the rank's heads; with MLA that is Q's second one
    (models/deepseek_v2.py:2078 q_b_proj). An MLA pool has one head of kv_lora_rank +
    qk_rope_head_dim on every rank (mem_cache/kv_cache_configurator.py:2471 _build_mla_kv_pool).
    Raises: Refused when a shape shows that a part was built for another group.
    """
    from sglang.srt.speculative.spec_utils import draft_tp_context

    model, pool = worker.draft_runner.model, worker.draft_runner.token_to_kv_pool
    group = worker.parallel_layout.tp_group or placement.target_group()
    attention = (
        model.model.layers[0].self_attn
        if hasattr(model.model, "layers")
        else model.model.midlayer.self_attn
    )
    config, latent = worker.draft_runner.model_config, hasattr(pool, "kv_buffer")
    cached = (pool.kv_buffer if latent else pool.k_buffer)[0]
    with draft_tp_context(worker.parallel_layout):
        heads = 1 if latent else config.get_num_kv_heads(group.world_size)
    facts = {
        "separated": placement.own_group(worker) is not None,
        "group": group.unique_name,
        "group_ranks": list(group.ranks),
        "qkv_shape": list((attention.q_b_proj if latent else attention.qkv_proj).weight.shape),
        "embedding_shape": list(model.model.embed_tokens.weight.shape),
        "head_shape": list(model.lm_head.weight.shape),
        "kv_heads": int(cached.shape[1]),
        "kv_pool_shape": list(cached.shape),
        "weights": _digest(model),
    }
    if facts["kv_heads"] != heads:
        raise Refused(
            f"the draft's KV pool of {arm} has {facts['kv_heads']} heads a rank where its group"
            f" needs {heads}: the KV pool place of the patch is not in force"
        )
    rows = model.model.embed_tokens.num_embeddings_per_partition
    if facts["embedding_shape"][0] != rows:
        raise Refused(
            f"the draft's embedding of {arm} has {facts['embedding_shape'][0]} rows a rank where"
            f" its group needs {rows}: the embedding place of the patch is not in force"
        )
    return facts


def _digest(model: torch.nn.Module) -> str:
    """A digest of this rank's draft weights: equal where replicas are equal (each parameter's name,
    shape, sum and 2-norm).
    """
    total = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        # Piece by piece: both reductions in float64 make a copy of what they are given, nine
        # gigabytes for a head of 163840 tokens.
        pieces = value.detach().reshape(-1).split(_PIECE)
        sums = torch.stack(
            [
                torch.stack((part.sum(), part.square().sum()))
                for part in (piece.double() for piece in pieces)
            ]
        ).sum(0)
        total.update(
            f"{name}{tuple(value.shape)}{sums[0].item():.17g}{sums[1].sqrt().item():.17g}".encode()
        )
    return total.hexdigest()[:16]
