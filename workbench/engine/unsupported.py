"""What the patch is not shown to work with, refused in one sentence before a model is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass

from workbench.engine.hooks import Hook, Refused
from workbench.engine.orders import Orders

_OFF = (False, 0, None, "", "false", "False")
_ONE = (1, None)


@dataclass(frozen=True)
class Unsupported:
    """A feature of SGLang that this workbench is not shown to work with.

    what: the feature, and why.
    flags: of the server, without dashes; the first is the field of ServerArgs.
    harmless: values that leave it off.
    when: at which server it is refused again at the launch, where SGLang has read its arguments:
        ``separated`` (a draft on its own group, or several), ``hot`` (several), or None, where the
        check of the profile is all there is.
    mend: what to do at the launch.
    beforehand: whether the check of a profile refuses it too; else it depends on the server.
    """

    what: str
    flags: tuple[str, ...]
    harmless: tuple[object, ...] = _OFF
    when: str | None = "separated"
    mend: str = "leave it out"
    beforehand: bool = True

    @property
    def field(self) -> str:
        return self.flags[0].replace("-", "_")


# The one table. Adaptive steps were shown not to work (eagle_worker_v2.py:1387 init_cuda_graphs
# captures the target's verify graph inside the draft's scope); the others were not shown to.
UNSUPPORTED = (
    Unsupported(
        "pipeline parallelism",
        ("pp-size", "pipeline-parallel-size"),
        _ONE,
        mend="leave --pp-size at 1",
    ),
    Unsupported(
        "context parallelism",
        ("attn-cp-size", "attention-context-parallel-size"),
        _ONE,
        mend="leave --attn-cp-size at 1",
    ),
    Unsupported(
        "context parallelism", ("dcp-size", "decode-context-parallel-size"), _ONE, when=None
    ),
    Unsupported("context parallelism", ("enable-prefill-cp",), when=None),
    Unsupported(
        "DP attention, where SGLang separates the draft itself",
        ("attn-dp-size", "attention-data-parallel-size"),
        _ONE,
    ),
    Unsupported("DP attention, where SGLang separates the draft itself", ("enable-dp-attention",)),
    Unsupported(
        "data parallelism, whose replicas split the load unseen",
        ("dp-size", "data-parallel-size"),
        _ONE,
        mend="start one server a replica",
    ),
    Unsupported(
        "adaptive steps (--speculative-adaptive), which capture the target's verify graph inside"
        " the draft's group",
        ("speculative-adaptive",),
        mend="give the steps",
    ),
    Unsupported(
        "rejection sampling, whose draft probabilities no agreement of the ranks covers",
        ("speculative-use-rejection-sampling",),
    ),
    Unsupported(
        "rejection sampling, whose draft probabilities no agreement of the ranks covers",
        ("speculative-use-block-verification",),
        when=None,
    ),
    Unsupported(
        "PD disaggregation",
        ("disaggregation-mode",),
        (None, "null"),
        mend="serve prefill and decode together",
    ),
    Unsupported("prefill/decode multiplexing", ("enable-pdmux",), when=None),
    Unsupported("LoRA, which changes the embedding that own-N copies", ("enable-lora",)),
    Unsupported("LoRA, which changes the embedding that own-N copies", ("lora-paths",)),
    Unsupported(
        "the hierarchical cache, which moves KV of the shared allocator without the draft's pool",
        ("enable-hierarchical-cache", "enable-hicache"),
    ),
    Unsupported(
        "a hierarchical cache, which moves KV of the shared allocator without the draft's pool",
        ("enable-hisparse", "enable-lmcache", "enable-flexkv"),
        when=None,
    ),
    Unsupported(
        "the unified memory pool, which places the draft's KV by the target's layout",
        ("enable-unified-memory",),
        when=None,
    ),
    Unsupported(
        "multi-layer EAGLE (--enable-multi-layer-eagle), whose worker holds one draft",
        ("enable-multi-layer-eagle",),
        when="hot",
        mend="serve the arms one by one",
    ),
    Unsupported(
        "several tokenizer workers, which would not all learn of a switch",
        ("tokenizer-worker-num",),
        (0, 1, None),
        when="hot",
        mend="leave them at 1",
        beforehand=False,
    ),
    Unsupported(
        "a key, which would be written to the run log, and the client sends none",
        ("api-key", "admin-api-key"),
        when=None,
    ),
    Unsupported("a second file of flags that this check does not see", ("config",), when=None),
)


def by_flag(name: str) -> Unsupported | None:
    """The entry of a flag that a profile cannot have; None for another flag."""
    fitting = (entry for entry in UNSUPPORTED if entry.beforehand and name in entry.flags)
    return next(fitting, None)


_SIZING = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"


def argument_hooks(orders: Orders) -> list[Hook]:
    """Check the server arguments of a separated draft, or of several drafts, where the launcher has
    read them.
    """

    def check(arguments, argv) -> None:
        words = "several arms in one server are" if orders.hot else "a draft on its own group is"
        asked = ("separated", "hot") if orders.hot else ("separated",)
        for entry in UNSUPPORTED:
            if entry.when not in asked:
                continue
            if not hasattr(arguments, entry.field):
                raise SystemExit(
                    f"draft-tp: ServerArgs has no {entry.field} to check: install SGLang as"
                    " published"
                )
            if getattr(arguments, entry.field) not in entry.harmless:
                raise SystemExit(
                    f"draft-tp: {words} not to be combined with {entry.what}: {entry.mend}."
                )
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
