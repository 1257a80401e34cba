"""What the patch is not shown to work with, refused in one sentence before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable

from workbench.engine.hooks import Hook, Refused
from workbench.engine.orders import Orders

# Field of SGLang's ServerArgs, a test of its raw value, what to do. Each was not shown to work with
# a separated draft or with several in one server (or, for adaptive, shown not to:
# eagle_worker_v2.py:1387 init_cuda_graphs captures the target's verify
# graph inside the draft's scope).
UNSUPPORTED: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("pp_size", lambda v: v and v > 1, "pipeline parallelism: leave --pp-size at 1"),
    ("attn_cp_size", lambda v: v and v > 1, "context parallelism: leave --attn-cp-size at 1"),
    (
        "attn_dp_size",
        lambda v: v and v > 1,
        "DP attention, where SGLang separates the draft itself: leave it out",
    ),
    ("dp_size", lambda v: v and v > 1, "data parallelism: start one server a replica"),
    (
        "enable_dp_attention",
        bool,
        "DP attention, where SGLang separates the draft itself: leave it out",
    ),
    ("speculative_adaptive", bool, "--speculative-adaptive: give the steps"),
    (
        "speculative_use_rejection_sampling",
        bool,
        "rejection sampling, whose draft probabilities no agreement covers: leave it out",
    ),
    (
        "disaggregation_mode",
        lambda v: v not in (None, "null"),
        "PD disaggregation: serve prefill and decode together",
    ),
    ("enable_lora", bool, "LoRA: the copied embedding would miss an adapter's"),
    ("lora_paths", bool, "LoRA: the copied embedding would miss an adapter's"),
    ("enable_hierarchical_cache", bool, "the hierarchical cache: leave it out"),
)
UNSUPPORTED_HOT = (
    (
        "tokenizer_worker_num",
        lambda v: v and v > 1,
        "several tokenizer workers, which would not all learn of a switch: leave them at 1",
    ),
    (
        "enable_multi_layer_eagle",
        bool,
        "--enable-multi-layer-eagle, whose worker holds one draft: serve the arms one by one",
    ),
)
_SIZING = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"


def argument_hooks(orders: Orders) -> list[Hook]:
    """Check the server arguments of a separated draft, or of several drafts, where the launcher has
    read them.
    """

    def check(arguments, argv) -> None:
        words = "several arms in one server are" if orders.hot else "a draft on its own group is"
        for field, unsupported, why in UNSUPPORTED + (UNSUPPORTED_HOT if orders.hot else ()):
            if not hasattr(arguments, field):
                raise SystemExit(
                    f"draft-tp: ServerArgs has no {field} to check: install SGLang as published"
                )
            if unsupported(getattr(arguments, field)):
                raise SystemExit(f"draft-tp: {words} not to be combined with {why}.")
        # It would resize pools that it was not shown to know all of (managers/scheduler.py:1174
        # post_capture_resize_kv_pool).
        if orders.hot and os.environ.get(_SIZING, "0").lower() not in (
            "",
            "0",
            "false",
            "no",
            "n",
            "f",
        ):
            raise SystemExit(f"draft-tp: {words} not to be combined with {_SIZING}: leave it out.")

    return (
        [Hook("sglang.srt.server_args.prepare_server_args", check, ("argv",), "after")]
        if orders.separates or orders.hot
        else []
    )


def hooks(orders: Orders) -> list[Hook]:
    """Refuse weight updates in the schedulers of a separated draft, or of several."""
    target = "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.weight_update_runners"
    return [Hook(target, _no_updates, ("self",))] if orders.separates or orders.hot else []


def _no_updates(original, self):
    # The draft's copy of the embedding would keep the old rows, and of several drafts one alone
    # would be updated.
    raise Refused(
        "weights cannot be updated under a draft on its own group, whose embedding is a copy, nor"
        " under several: restart the server"
    )
