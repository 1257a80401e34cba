"""Counting from inside the server: rounds by stage, collectives by stage and kind, and (on the CPU engine) seconds by stage."""
from __future__ import annotations

import functools
import time
from collections import Counter

from workbench.engine.hooks import Hook
from workbench.engine.orders import Orders

_EAGLE = "sglang.srt.speculative.eagle_worker_v2."
_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator."
# The calls that stand for one collective each. An outer one may use an inner one (all_gather: all_gather_into_tensor): the outer counts.
_COLLECTIVES = {
    "all_reduce": ("self", "input_"),
    "all_gather": ("self", "input_", "dim", "output_tensor_list"),
    "all_gather_into_tensor": ("self", "output", "input"),
    "reduce_scatter_tensor": ("self", "output", "input"),
    "broadcast": ("self", "input_", "src"),
}
# Methods that are one stage of the cycle. spec_stage_span brackets the draft's only, and prefill and decode extension alike.
_STAGES = {
    "draft": (_EAGLE + "EagleDraftWorker.draft", ("self", "batch", "with_topology")),
    "verify": (_EAGLE + "EAGLEWorkerV2.verify", ("self", "batch", "pp_proxy_tensors", "grammar_barrier")),
    "draft_extend": (_EAGLE + "EagleDraftWorker._draft_extend_for_decode", ("self", "batch", "batch_result", "kv_loc_plan")),
    "draft_prefill": (_EAGLE + "EagleDraftWorker._draft_extend_for_prefill",
                      ("self", "batch", "target_hidden_states", "next_token_ids", "mm_input_embeds", "kv_loc_plan")),
}
_TARGET = ("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
           ("self", "batch", "forward_batch", "pp_proxy_tensors", "is_verify", "skip_attn_backend_init", "capture_hidden_mode",
            "return_kv_loc_plan"))


class Counters:
    """Running totals of this rank since its start; a reader takes differences.

    Collectives are counted where SGLang's Python makes the call, so those inside a replayed CUDA graph are not seen here.
    complete: nothing is replayed from graphs, so a stage without a counted collective has none.
    """

    def __init__(self, complete: bool = False) -> None:
        self.complete = complete
        self.rounds: Counter[str] = Counter()
        self.collectives: Counter[tuple[str, str]] = Counter()
        self.seconds: Counter[str] = Counter()
        self.verified: Counter[str] = Counter()      # verify rounds by the number of draft tokens a request had in them
        self.stage: str | None = None
        self._inside = False

    def read(self) -> dict:
        """{"rounds": {stage: n}, "collectives": {stage: {kind: n}}, "seconds": {stage: s}, "verified": {draft tokens: rounds}}"""
        collectives: dict[str, dict[str, int]] = {stage: {} for stage in self.rounds} if self.complete else {}
        for (stage, kind), count in sorted(self.collectives.items()):
            collectives.setdefault(stage, {})[kind] = count
        return {"rounds": dict(self.rounds), "collectives": collectives, "seconds": dict(self.seconds), "verified": dict(self.verified)}

    def count(self, kind: str, original, group, *args, **kwargs):
        """A collective of more than one rank, counted once under the current stage."""
        if group.world_size == 1 or self._inside:
            return original(group, *args, **kwargs)
        self.collectives[self.stage or "other", kind] += 1
        self._inside = True
        try:
            return original(group, *args, **kwargs)
        finally:
            self._inside = False

    def bracket(self, stage: str, timed: bool, original, *args, **kwargs):
        """One call of a stage; a stage inside another belongs to the outer one (verify runs the target)."""
        if self.stage is not None:
            return original(*args, **kwargs)
        self.stage, begun = stage, time.perf_counter()
        self.rounds[stage] += 1
        try:
            return original(*args, **kwargs)
        finally:
            self.stage = None
            if timed:
                self.seconds[stage] += time.perf_counter() - begun

    def verify(self, timed: bool, original, worker, batch, *args, **kwargs):
        """One verify round, by what it was given to verify: that is how deep the arm in force really drafts."""
        self.verified[str(batch.spec_info.draft_token_num)] += 1
        return self.bracket("verify", timed, original, worker, batch, *args, **kwargs)

    def target(self, timed: bool, original, worker, batch, *args, **kwargs):
        """The target's own forward outside of verify: prefill, or a decode step where nothing speculates."""
        prefill = batch is None or batch.forward_mode.is_extend()
        return self.bracket("prefill" if prefill else "decode", timed, original, worker, batch, *args, **kwargs)


def hooks(orders: Orders, counters: Counters) -> list[Hook]:
    timed = orders.cpu        # on GPUs the work is asynchronous: wall time around a call says nothing
    found = [Hook(_GROUP + name, _bind(counters.count, name), parameters) for name, parameters in _COLLECTIVES.items()]
    found.append(Hook(_TARGET[0], _bind(counters.target, timed), _TARGET[1]))
    if orders.arms:
        found += [Hook(target, _bind(counters.verify, timed) if stage == "verify" else _bind(counters.bracket, stage, timed), parameters)
                  for stage, (target, parameters) in _STAGES.items()]
    return found


def _bind(method, *first):
    @functools.wraps(method)
    def hook(original, *args, **kwargs):
        return method(*first, original, *args, **kwargs)

    return hook
