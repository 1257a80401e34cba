"""How much memory an arm takes on each rank, before anything is started: weights, both KV pools,
the copied embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from workbench.experiment.arms import Arm
from workbench.experiment.profile import Profile
from workbench.predict import quantized, static_fraction
from workbench.predict.model_files import ITEM_BYTES
from workbench.predict.model_shape import ModelShape
from workbench.predict.sharding import (
    KNOWN,
    is_served,
    keeps_embedding,
    kv_heads_a_rank,
    padded_rows,
    rank_bytes,
    takes_head,
)

GIB, MIB = 1 << 30, 1 << 20
_SERVING_DTYPES = {
    "float32": "F32",
    "float": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "half": "F16",
}
_KV_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bf16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class ArmMemory:
    """Bytes on one rank of an arm.

    target, draft: weights.
    embedding: what own-N copies of the target's embedding (and head, where the draft borrows it).
    kv, draft_kv: bytes a token of the target's and of the draft's KV pool.
    priced: bytes a token by which the number of tokens is divided out.
    exact: every weight and pool is of a known layout; otherwise the figures are a guide.
    """

    arm: str
    target: int
    draft: int
    embedding: int
    kv: int
    draft_kv: int
    priced: int
    exact: bool

    @property
    def weights(self) -> int:
        return self.target + self.draft + self.embedding

    def tokens(self, static: float) -> int:
        """Tokens that fit beside the weights in ``static`` bytes, as SGLang counts them
        (pool_configurator.py:642 _cell_size).
        """
        return max(0, int((static - self.weights) // self.priced))

    def pools(self, tokens: int, page: int = 1) -> int:
        """Bytes of both KV pools; each has one page more than its tokens
        (mem_cache/memory_pool.py:2589 page_size, mem_cache/memory_pool.py:4866 page_size).
        """
        return (tokens + page) * (self.kv + self.draft_kv)


def predict(profile: Profile, target: ModelShape, draft: ModelShape | None, arm: Arm) -> ArmMemory:
    """What one rank holds when ``arm`` is served; ``draft`` may be None for an arm without one.

    Activations, CUDA graphs, communicators and the CUDA context are not in it: SGLang leaves 1 -
    mem-fraction-static for them.
    """
    ranks, kv = profile.tp, _kv_bytes_per_token(target, profile.tp, _kv_bytes(profile, target))
    whole = weight_bytes(profile, target, ranks)
    if not arm.speculates or draft is None:
        return ArmMemory(arm.name, whole, 0, 0, kv, 0, kv, _exact(target))
    group = arm.group or ranks
    draft_kv = _kv_bytes_per_token(draft, group, _kv_bytes(profile, draft, draft=True))
    # SGLang prices a draft layer like a layer of the target (pool_configurator.py:311
    # draft_kv_size); the patch puts the draft's own price there.
    as_target = int(kv * draft.layers / target.layers)
    return ArmMemory(
        arm.name,
        whole,
        weight_bytes(profile, draft, group),
        _copied(profile, target, draft, arm),
        kv,
        draft_kv,
        kv + (draft_kv if arm.group else as_target),
        _exact(target) and _exact(draft),
    )


def together(needs: Mapping[Arm, ArmMemory]) -> ArmMemory:
    """What one rank holds when one server holds several arms: the target once, and each draft once,
    however many arms run on it.

    needs: of each arm alone. Every pool has the same number of tokens, each at its draft's own
        price (engine/placement.py).
    """
    drafts = {(arm.group, arm.replica): need for arm, need in needs.items() if arm.speculates}
    if len(drafts) < 2:
        return next(iter(needs.values()))
    one, several = next(iter(drafts.values())), list(drafts.values())
    pools = sum(need.draft_kv for need in several)
    return ArmMemory(
        " and ".join(arm.name for arm in needs),
        one.target,
        sum(need.draft for need in several),
        sum(need.embedding for need in several),
        one.kv,
        pools,
        one.kv + pools,
        all(need.exact for need in several),
    )


def weight_bytes(profile: Profile, shape: ModelShape, ranks: int) -> int:
    """Bytes of a model's weights on one rank of a group: by its files where it has any, by its
    configuration otherwise.
    """
    # configs/update_config.py:12 DEFAULT_MOE_PADDING_SIZE, configs/update_config.py:290
    # intermediate_padding_size
    unit = 32 * ranks if profile.engine == "cpu" else 1
    return _weight_bytes(shape, ranks, serving_dtype(profile, shape), unit)


@lru_cache(64)  # a model of many experts has 200,000 tensors, and every arm holds them
def _weight_bytes(shape: ModelShape, ranks: int, dtype: str, unit: int) -> int:
    return round(
        sum(
            rank_bytes(shape, t, ranks, dtype, unit)
            for t in quantized.weights(shape)
            if is_served(shape, t)
        )
    )


def _copied(profile: Profile, target: ModelShape, draft: ModelShape, arm: Arm) -> int:
    """Bytes of the rows that a separated draft keeps of the target's tables: its group's slice, not
    the target's.
    """
    if not arm.group:
        return 0
    # set_embed hands nothing over to a draft with an embedding of its own (models/llama.py:910
    # set_embed).
    tables = (not keeps_embedding(draft)) + takes_head(draft)
    return (
        tables
        * padded_rows(target.vocab_size, arm.group)
        * target.hidden_size
        * ITEM_BYTES[serving_dtype(profile, target)]
    )


def _kv_bytes_per_token(shape: ModelShape, ranks: int, item: int) -> int:
    """KV bytes a token on one rank, all layers: the latent for MLA (kv_cache_configurator.py:3419
    kv_cache_dim), else K and V of the rank's heads
    (pool_configurator.py:492 get_num_kv_heads)."""
    if shape.mla:
        return (shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim) * shape.layers * item
    return kv_heads_a_rank(shape, ranks) * 2 * shape.head_dim * shape.layers * item


def serving_dtype(profile: Profile, shape: ModelShape) -> str:
    """The dtype a model is served in; with ``auto`` a float32 checkpoint becomes float16
    (configs/model_config.py:2303 dtype).
    """
    if profile.engine == "cpu":
        return "F32"
    named = str(profile.flag("dtype", "auto")).lower()
    return _SERVING_DTYPES.get(named) or ("F16" if shape.dtype == "F32" else shape.dtype)


def _kv_bytes(profile: Profile, shape: ModelShape, draft: bool = False) -> int:
    named = profile.flag("speculative-draft-kv-cache-dtype", None) if draft else None
    return _KV_BYTES.get(
        str(named or profile.flag("kv-cache-dtype", "auto")),
        ITEM_BYTES[serving_dtype(profile, shape)],
    )


def static_bytes(
    profile: Profile, free: int, target: ModelShape | None = None, capacity: int = 0
) -> float:
    """Bytes that weights and KV pools may take of ``free`` on a rank
    (mem_cache/kv_cache_configurator.py:3007 mem_fraction_static).

    capacity: bytes of the rank's GPU, by which SGLang chooses where the profile gives no
        --mem-fraction-static (static_fraction.py); ``free`` where it is 0.
    Ranks of the CPU engine share one machine, and what is kept back of it.
    """
    fraction = profile.number("mem-fraction-static")
    if fraction is None and profile.engine == "cpu":
        prefill = max(2048, profile.number("chunked-prefill-size", 2048))
        kept = 512 + 1.5 * prefill + profile.tp / 8 * 1024
        kept = max(kept, 10 * 1024 if free > 60 * GIB else 0)
        return max(0.0, free - MIB * kept / profile.tp)
    if fraction is None:
        fraction = static_fraction.static_fraction(profile, target, capacity or free)
    return max(0.0, fraction * free - static_fraction.withheld(profile, target))


def gib(count: float) -> str:
    """A number of bytes in words: ``1.23 GiB``, smaller ones in MiB or bytes."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} bytes"


def _exact(shape: ModelShape) -> bool:
    """Whether the layout of every weight and of the pool is known; of a quantization that is not
    known here, only where the files are there.
    """
    sliding = (
        shape.config.get("use_sliding_window")
        or shape.config.get("layer_types")
        and len(set(shape.config["layer_types"])) > 1
    )
    return (
        shape.architecture in KNOWN
        and not sliding
        and bool(shape.tensors or not shape.vision)  # a tower's weights are not implied
        and bool(shape.tensors or not quantized.unknown(shape))
    )
