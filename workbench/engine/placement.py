"""The patch: an EAGLE-3 draft on its own TP group of any size that divides the target's. Five
places, as hooks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from workbench.engine.hooks import Hook, Refused
from workbench.engine.memory import COPY
from workbench.engine.orders import Draft, Orders, Placement

log = logging.getLogger(__name__)
_EAGLE = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker."
_POOL = "sglang.srt.model_executor.pool_configurator."


@dataclass
class _State:
    """What this rank knows of its groups; one server process holds one target."""

    orders: Orders
    building: int | None = None  # group size of the draft under construction
    active: Placement | None = None  # whose draft the next batch runs on
    target: object = None  # GroupCoordinator of the target's TP group
    groups: dict | None = None  # group size -> GroupCoordinator


_state: _State | None = None


def hooks(orders: Orders) -> list[Hook]:
    """The patch's hooks for these orders; of a server of several arms that separates no draft, the
    KV budget's alone.
    """
    global _state
    first = orders.arms[0] if orders.arms else None
    _state = _State(orders, first and first.group, first, groups={})
    places = {
        "layout": Hook(
            "sglang.srt.speculative.draft_parallel.resolve_draft_parallel_layout",
            _layout,
            ("model_spec", "collapse_cp"),
        ),
        "kv_pool": Hook(
            _EAGLE + "alloc_memory_pool",
            _pool_in_scope,
            ("self", "memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
        ),
        "embedding": Hook(_EAGLE + "_resolve_shared_embed_and_head", _whole_embedding, ("self",)),
        "kv_budget": Hook(
            _POOL + "DefaultPoolConfigurator.__init__", _default_budget, ("self", "kvc"), "after"
        ),
    }
    places["kv_budget_hybrid"] = Hook(
        _POOL + "HybridSWAPoolConfigurator.__init__", _hybrid_budget, ("self", "kvc"), "after"
    )
    wanted = (
        places
        if orders.separates
        else [place for place in places if orders.hot and place.startswith("kv_budget")]
    )
    return [places[place] for place in wanted if place.removesuffix("_hybrid") not in orders.omit]


def orders() -> Orders:
    return _state.orders


def active() -> Placement:
    """The placement of the arm that the next batch runs on."""
    return _state.active


def activate(placed: Placement) -> None:
    _state.active = placed


def build(draft: Draft) -> None:
    """The next draft that is constructed gets this one's group."""
    _state.building = draft.group


def own_group(worker) -> object | None:
    """The GroupCoordinator a draft worker was separated onto; None when it runs on the target's."""
    group = worker.parallel_layout.tp_group
    return group if group is not None and group in _state.groups.values() else None


def target_group() -> object:
    """The target's GroupCoordinator, also from inside a draft's scope."""
    if _state.target is None:
        from sglang.srt.runtime_context import get_parallel

        _state.target = get_parallel().tp_group
    return _state.target


def consecutive(ranks: list[int], size: int, ranks_a_node: int | None = None) -> list[list[int]]:
    """The target's ranks in groups of ``size`` consecutive ones, in the target's own order.

    Raises: Refused when size does not divide the ranks, or a group would straddle two nodes.
    """
    if size < 1 or len(ranks) % size:
        raise Refused(
            f"own-{size} does not divide the target's TP {len(ranks)}: use a divisor of"
            f" {len(ranks)}"
        )
    if ranks_a_node and ranks_a_node % size:
        raise Refused(
            f"own-{size} would straddle nodes of {ranks_a_node} ranks: use a divisor of"
            f" {ranks_a_node}"
        )
    return [ranks[i : i + size] for i in range(0, len(ranks), size)]


# ------------------------------------------------------------------ place 1: the layout


def _layout(original, model_spec, *, collapse_cp=False):
    """speculative/draft_parallel.py:53 resolve_draft_parallel_layout: upstream separates a draft
    only under DP attention; every later site enters what this returns.
    """
    from sglang.srt.configs.draft_parallel import DraftParallelLayout, DraftTPExecution
    from sglang.srt.runtime_context import get_parallel

    layout, parallel = original(model_spec, collapse_cp=collapse_cp), get_parallel()
    size = _state.building
    if size is None:
        return layout
    if (
        layout.tp_group is not None
        or parallel.attn_dp_enabled
        or parallel.pp_size > 1
        or parallel.attn_cp_size > 1
    ):
        raise Refused(
            "own-N is not to be combined with pipeline or context parallelism or DP attention:"
            " leave those flags out"
        )
    if model_spec.tp_execution is not DraftTPExecution.SINGLE_GROUP:
        raise Refused(
            "this draft architecture follows the target's layout layer by layer (TARGET_LAYOUT) and"
            " cannot be separated: use the arm shared"
        )
    return DraftParallelLayout(
        tp_group=_group(size), attn_tp_size=size, disable_cp=layout.disable_cp
    )


def _group(size: int):
    """The group of this rank; made once, collectively, on every rank of the target's group."""
    if size not in _state.groups:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.runtime_context import get_server_args

        target, world = target_group(), torch.distributed.get_world_size()
        if target.world_size != world:
            raise Refused(
                f"the target's TP group has {target.world_size} of {world} ranks: run one replica"
                " of one stage"
            )
        # A group of one talks to nobody: no NCCL communicator and no custom all-reduce buffers for
        # it.
        alone = (
            {}
            if size > 1
            else dict.fromkeys(
                (
                    "use_pynccl",
                    "use_custom_allreduce",
                    "use_mscclpp",
                    "use_torch_symm_mem_allreduce",
                ),
                False,
            )
        )
        _state.groups[size] = parallel_state.init_model_parallel_group(
            consecutive(list(target.ranks), size, world // get_server_args().nnodes),
            parallel_state.get_world_group().local_rank,
            torch.distributed.get_backend(target.device_group),
            group_name=f"draft_tp{size}",
            **alone,
        )
    return _state.groups[size]


# ------------------------------------------------------------------ place 2: the draft's KV pool


def _pool_in_scope(original, self, *args, **kwargs):
    """eagle_worker_v2.py:243 alloc_memory_pool allocates outside the draft's scope, so with the
    target's head count (kv_cache_configurator.py:2779 get_num_kv_heads).
    """
    if own_group(self) is None:
        return original(self, *args, **kwargs)
    from sglang.srt.speculative.spec_utils import draft_tp_context

    with draft_tp_context(self.parallel_layout):
        return original(self, *args, **kwargs)


# ------------------------------------------------------------------ place 3: the embedding shared
# with the target


def _whole_embedding(original, self):
    """eagle_worker_v2.py:381 _resolve_shared_embed_and_head hands out the target's vocabulary
    shard; the draft needs its own group's slice of the whole table.
    """
    embed, head = original(self)
    group, model = own_group(self), self.draft_runner.model
    if group is None:
        return embed, head
    embed = _reslice(embed, model.model.embed_tokens.weight, group)
    if getattr(model, "load_lm_head_from_target", False):
        head = _reslice(head, model.lm_head.weight, group)
    return embed, head


def _reslice(shard: torch.Tensor | None, wanted: torch.Tensor, group) -> torch.Tensor | None:
    """One rank's rows of a vocabulary table [rows, hidden], as the draft's group shards it, from
    the target's shards.

    Both sides pad the vocabulary at its end only (vocab_parallel_embedding.py:287
    num_embeddings_padded), so whole tables differ in trailing rows alone.
    """
    if shard is None:
        return None
    whole = target_group().all_gather(shard.data.contiguous(), dim=0)
    rows = wanted.shape[0]
    start = rows * group.rank_in_group
    missing = start + rows - whole.shape[0]
    if missing > 0:
        whole = torch.cat([whole, whole.new_zeros(missing, whole.shape[1])])
    mine = whole[start : start + rows]
    # A slice would keep the whole table alive.
    copy = torch.nn.Parameter(mine if rows == whole.shape[0] else mine.clone(), requires_grad=False)
    setattr(copy, COPY, True)
    return copy


# ------------------------------------------------------------------ place 4: the KV budget


def draft_bytes_per_token(kvc, size: int | None) -> int:
    """Bytes of draft KV one token takes on this rank with the draft sharded over ``size`` ranks
    (None: the target's TP).
    """
    from sglang.srt.runtime_context import get_parallel

    layers, config = (
        kvc.spec_aux_config.eagle_draft_num_layers,
        kvc.spec_aux_config.draft_model_config,
    )
    if getattr(config, "kv_lora_rank", None):
        # An MLA draft keeps one latent a token, whatever the TP (pool_configurator.py:380
        # calculate_mla_kv_cache_dim).
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = config.get_num_kv_heads(size or get_parallel().attn_tp_size) * (
            config.head_dim + getattr(config, "v_head_dim", config.head_dim)
        )
    return int(layers or 0) * width * torch._utils._element_size(kvc.kv_cache_dtype)


def _all_drafts(kvc) -> int:
    """Bytes a token of every draft pool that this rank is to hold, each at its own group's head
    count.
    """
    return sum(draft_bytes_per_token(kvc, draft.group) for draft in _state.orders.drafts)


def _default_budget(_, self, kvc):
    """pool_configurator.py:219 DefaultPoolConfigurator prices one draft, each layer like a target
    layer of this rank; set the drafts' real price instead.
    """
    if kvc.is_draft_worker or not kvc.spec_aux_config.eagle_draft_num_layers:
        return
    target = self._compute_cell_size(kvc, kvc.layer_info.num_effective_layers)
    real = target + _all_drafts(kvc)
    log.info(
        "KV budget: %d bytes a token by SGLang, %d with each draft's own heads",
        self._cell_size,
        real,
    )
    self._cell_size = real


def _hybrid_budget(_, self, kvc):
    """pool_configurator.py:736 eagle_draft_num_layers likewise; here the draft is priced at the
    target's full-attention layers.
    """
    if kvc.is_draft_worker or self._fused_full_entry is not None:
        return
    priced = self._full_per_token * self._draft_full_layers_num + self._swa_per_token * (
        self._draft_swa_layers_num + self._draft_swa_full_layers_num
    )
    self._draft_cell_size += _all_drafts(kvc) - priced
    self._recompute_cell_size()


def is_separated_now() -> bool:
    """True inside the scope of a draft that runs on a group of its own (draft_tp_context swaps the
    TP group).
    """
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group in _state.groups.values()
