"""Counting from inside the server: rounds by stage, collectives by stage and kind, and seconds by
stage.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from workbench.engine import placement
from workbench.engine.hooks import Hook
from workbench.engine.orders import Orders

_EAGLE = "sglang.srt.speculative.eagle_worker_v2."
_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator."
# The calls that stand for one collective each. An outer one may use an inner one (all_gather:
# all_gather_into_tensor): the outer counts.
_COLLECTIVES = {
    "all_reduce": ("self", "input_"),
    "all_gather": ("self", "input_", "dim", "output_tensor_list"),
    "all_gather_into_tensor": ("self", "output", "input"),
    "reduce_scatter_tensor": ("self", "output", "input"),
    "broadcast": ("self", "input_", "src"),
}
# Methods that are one stage of the cycle. spec_stage_span brackets the draft's only, and prefill
# and decode extension alike.
_STAGES = {
    "draft": (_EAGLE + "EagleDraftWorker.draft", ("self", "batch", "with_topology")),
    "verify": (
        _EAGLE + "EAGLEWorkerV2.verify",
        ("self", "batch", "pp_proxy_tensors", "grammar_barrier"),
    ),
    "draft_extend": (
        _EAGLE + "EagleDraftWorker._draft_extend_for_decode",
        ("self", "batch", "batch_result", "kv_loc_plan"),
    ),
    "draft_prefill": (
        _EAGLE + "EagleDraftWorker._draft_extend_for_prefill",
        (
            "self",
            "batch",
            "target_hidden_states",
            "next_token_ids",
            "mm_input_embeds",
            "kv_loc_plan",
        ),
    ),
}
_TARGET = (
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    (
        "self",
        "batch",
        "forward_batch",
        "pp_proxy_tensors",
        "is_verify",
        "skip_attn_backend_init",
        "capture_hidden_mode",
        "return_kv_loc_plan",
    ),
)

# An all-gather inside the NVLink switch that no group is asked for (models/kimi_k25_eagle3.py:221
# MultimemAllGatherer); its state knows its ranks as a group does.
_MULTIMEM = (
    "sglang.srt.distributed.device_communicators.triton_symm_mem_ag.all_gather_inner",
    ("state", "hidden_states", "tp_hidden_dim", "skip_entry_sync", "safe"),
)

# Every graph of a server is one of these or made of some (model_executor/runner_backend/*.py), and
# goes through the three methods.
_GRAPH = "torch.cuda.graphs.CUDAGraph."
_GRAPH_METHODS = {
    "capture_begin": ("self", "pool", "capture_error_mode", "check_input_liveness"),
    "capture_end": ("self",),
    "replay": ("self",),
}
# of so many rounds of a stage one is timed: two events, each 2 to 3 us of the host (traces of two
# H200)
_TIMED = 4
_PENDING = 4096  # spans whose time is not read yet; a reader comes once a block


class Clock(Protocol):
    """Where the time of a span comes from."""

    def mark(self) -> object: ...
    def seconds(self, begun: object, ended: object) -> float: ...


class WallClock:
    """Time on the host, which is where the CPU engine's work is done."""

    mark = staticmethod(time.perf_counter)

    @staticmethod
    def seconds(begun: float, ended: float) -> float:
        return ended - begun


class DeviceClock:
    """Time on the stream that the stage's kernels go to: on GPUs a call returns before its work is
    done.
    """

    @staticmethod
    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        ended.synchronize()
        return begun.elapsed_time(ended) / 1000


class Counters:
    """Running totals of this rank since its start; a reader takes differences.

    Collectives are counted where SGLang's Python makes the call. A CUDA graph makes it once, when
    it is captured: what a graph holds is kept with it and counted at each replay. timing: whether
    stages are timed now, which one round of ``_TIMED`` is.
    """

    def __init__(
        self, clock: Clock | None = None, timing: Callable[[], bool] = lambda: True
    ) -> None:
        self.clock, self.timing = clock or WallClock(), timing
        self.rounds: Counter[str] = Counter()
        self.collectives: Counter[tuple[str, str]] = Counter()
        self.seconds: Counter[str] = Counter()
        self.timed: Counter[str] = Counter()  # rounds whose seconds these are
        self.verified: Counter[str] = (
            Counter()
        )  # verify rounds by the number of draft tokens a request had in them
        self.stage: str | None = None
        self._inside = False
        self._captured: Counter[str] | None = None
        self._graphs: WeakKeyDictionary[object, Counter[str]] = WeakKeyDictionary()
        self._spans: deque[tuple[str, object, object]] = deque()

    def read(self) -> dict:
        """{"rounds": {stage: n}, "collectives": {stage: {kind: n}}, "seconds": {stage: s}, "timed":
        {stage: n}, "verified": {draft tokens:
        rounds}}; seconds are those of the timed rounds alone."""
        self._settle(0)
        collectives: dict[str, dict[str, int]] = {stage: {} for stage in self.rounds}
        for (stage, kind), count in sorted(self.collectives.items()):
            collectives.setdefault(stage, {})[kind] = count
        return {
            "rounds": dict(self.rounds),
            "collectives": collectives,
            "seconds": dict(self.seconds),
            "timed": dict(self.timed),
            "verified": dict(self.verified),
        }

    def count(self, kind: str, original, group, *args, **kwargs):
        """A collective of more than one rank, counted once under the current stage, or kept with
        the graph under capture.
        """
        if group.world_size == 1 or self._inside:
            return original(group, *args, **kwargs)
        if self._captured is None:
            self.collectives[self.stage or "other", kind] += 1
        else:
            self._captured[kind] += 1
        self._inside = True
        try:
            return original(group, *args, **kwargs)
        finally:
            self._inside = False

    def capture_begin(self, original, graph, *args, **kwargs):
        self._captured = Counter()
        return original(graph, *args, **kwargs)

    def capture_end(self, original, graph, *args, **kwargs):
        self._graphs[graph], self._captured = self._captured or Counter(), None
        return original(graph, *args, **kwargs)

    def replay(self, original, graph, *args, **kwargs):
        for kind, count in self._graphs.get(graph, {}).items():
            self.collectives[self.stage or "other", kind] += count
        return original(graph, *args, **kwargs)

    def bracket(self, stage: str, original, *args, **kwargs):
        """One call of a stage; a stage inside another belongs to the outer one (verify runs the
        target).
        """
        if self.stage is not None:
            return original(*args, **kwargs)
        self.stage, timed = stage, self.timing() and self.rounds[stage] % _TIMED == 0
        self.rounds[stage] += 1
        begun = self.clock.mark() if timed else None
        try:
            return original(*args, **kwargs)
        finally:
            self.stage = None
            if timed:
                self._spans.append((stage, begun, self.clock.mark()))
                self._settle(_PENDING)

    def _settle(self, left: int) -> None:
        """Add up the oldest spans until so many are left: late, since reading an event waits for
        its work.
        """
        while len(self._spans) > left:
            stage, begun, ended = self._spans.popleft()
            self.seconds[stage] += self.clock.seconds(begun, ended)
            self.timed[stage] += 1

    def verify(self, original, worker, batch, *args, **kwargs):
        """One verify round, by what it was given to verify: that is how deep the active arm
        really drafts.
        """
        self.verified[str(batch.spec_info.draft_token_num)] += 1
        return self.bracket("verify", original, worker, batch, *args, **kwargs)

    def target(self, original, worker, batch, *args, **kwargs):
        """The target's own forward outside of verify: prefill, or a decode step where nothing
        speculates.
        """
        prefill = batch is None or batch.forward_mode.is_extend()
        return self.bracket(
            "prefill" if prefill else "decode", original, worker, batch, *args, **kwargs
        )


def counters(orders: Orders) -> Counters:
    def timing() -> bool:
        return placement.active() is None or placement.active().timing == "on"

    return Counters(WallClock() if orders.cpu else DeviceClock(), timing)


def hooks(orders: Orders, counters: Counters) -> list[Hook]:
    found = [
        Hook(_GROUP + name, _bind(counters.count, name), parameters)
        for name, parameters in _COLLECTIVES.items()
    ]
    found.append(Hook(_TARGET[0], _bind(counters.target), _TARGET[1]))
    if not orders.cpu:
        found += [
            Hook(_GRAPH + name, _bind(getattr(counters, name)), parameters)
            for name, parameters in _GRAPH_METHODS.items()
        ]
        found.append(Hook(_MULTIMEM[0], _bind(counters.count, "all_gather"), _MULTIMEM[1]))
    if orders.arms:
        found += [
            Hook(
                target,
                _bind(counters.verify) if stage == "verify" else _bind(counters.bracket, stage),
                parameters,
            )
            for stage, (target, parameters) in _STAGES.items()
        ]
    return found


def _bind(method, *first):
    @functools.wraps(method)
    def hook(original, *args, **kwargs):
        return method(*first, original, *args, **kwargs)

    return hook
