"""Hot arms: one EAGLE worker that holds the drafts of several arms and runs the active one.
Imported by SGLang's scheduler processes only.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.graph_memory_usage import (
    merge_graph_memory_usage,
    merge_graph_time_usage,
)
from sglang.srt.speculative import eagle_worker_v2 as eagle
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState

from workbench.engine import placement
from workbench.engine.hooks import Refused
from workbench.engine.orders import Placement


class HotArmsWorker(eagle.EAGLEWorkerV2):
    """EAGLEWorkerV2 with one EagleDraftWorker for each draft of the orders and one SpecRuntimeState
    for each arm.

    SGLang drives ``_draft_worker``, one at a time; all that is built once a draft (weights, KV
    pool, attention back ends, graphs) is built for each of them. Steps are switched by the states
    of SGLang's own adaptive speculation, without its controller. The server's flags give the
    largest step and token counts of all arms, since SGLang sizes its buffers by them.
    """

    def __init__(self, server_args, gpu_id, nccl_port, target_worker):
        orders = placement.orders()
        first, *others = orders.drafts
        placement.build(first)
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.drafts = {first: self._draft_worker}
        for draft in others:
            placement.build(draft)
            self.drafts[draft] = eagle.EagleDraftWorker(
                server_args, gpu_id, nccl_port, target_worker
            )
        self.arms = {placed.arm: placed for placed in orders.arms}
        self.states: dict[str, SpecRuntimeState] = {}

    # ------------------------------------------------------------------ what SGLang builds once a
    # draft

    def alloc_memory_pool(
        self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None
    ):
        for draft in self.drafts.values():
            draft.alloc_memory_pool(
                memory_pool_config=memory_pool_config,
                req_to_token_pool=req_to_token_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            )
        self.req_to_token_pool, self.token_to_kv_pool_allocator = (
            req_to_token_pool,
            token_to_kv_pool_allocator,
        )

    def init_attention_backends(self):
        for draft in self.drafts.values():
            draft.init_attention_backends()

    def init_cuda_graphs(self):
        for draft in self.drafts.values():
            draft.init_cuda_graphs()
        runner = self._target_worker.model_runner
        built: dict[tuple, SpecRuntimeState] = {}
        targets = {
            (self.speculative_num_steps, self.speculative_num_draft_tokens): (
                runner.attn_backend,
                runner.decode_cuda_graph_runner,
            )
        }
        for arm, placed in self.arms.items():
            key = placed.draft, *self.depth(placed)
            if key not in built:
                built[key] = self._state(placed, targets)
            self.states[arm] = built[key]
        self.activate(next(iter(self.arms)))

    def depth(self, placed: Placement) -> tuple[int, int]:
        """Steps and draft tokens of an arm."""
        spec = eagle.get_spec()
        steps = spec.speculative_num_steps if placed.steps is None else placed.steps
        return steps, (
            spec.speculative_num_draft_tokens
            if placed.draft_tokens is None
            else placed.draft_tokens
        )

    def _state(self, placed: Placement, targets: dict[tuple[int, int], tuple]) -> SpecRuntimeState:
        """The runtime state of an arm; what its step count needs beyond what is there is built, and
        the target's share of it kept.
        """
        depth, draft = self.depth(placed), self.drafts[placed.draft]
        self._draft_worker = draft
        as_started = depth == (self.speculative_num_steps, self.speculative_num_draft_tokens)
        with nullcontext() if as_started else self._override_worker_state(*depth):
            if not as_started:
                with _scope(draft):
                    draft.init_attention_backend()
                    draft._capture_cuda_graphs()
            if depth not in targets:
                targets[depth] = self._target(draft, *depth)
            attention, graphs = targets[depth]
            return SpecRuntimeState(
                *depth,
                draft_attn_backend=draft.draft_attn_backend,
                cuda_graph_runner=draft.cuda_graph_runner,
                target_attn_backend=attention,
                target_graph_runner=graphs,
                draft_extend_attn_backend=draft.draft_extend_attn_backend,
                cuda_graph_runner_for_draft_extend=draft.cuda_graph_runner_for_draft_extend,
            )

    def _target(self, draft, steps: int, draft_tokens: int) -> tuple:
        """The target's attention back end and verify graphs for a step count.

        SGLang builds them inside the draft's scope (eagle_worker_v2.py:1387 init_cuda_graphs); on a
        group of the draft's own the verify graph would be captured without the target's
        all-reduces, and the back end would count the heads of another TP size.

        Raises: Refused inside the scope of a separated draft.
        """
        with _scope(draft) if "target_scope" in placement.orders().omit else nullcontext():
            if placement.is_separated_now():
                raise Refused(
                    f"the target's back end for {steps} steps was to be built on the draft's own"
                    " group"
                )
            runner = self._target_worker.model_runner
            kept = runner.init_new_workspace
            try:
                attention = runner._get_attention_backend(init_new_workspace=True)
            finally:
                runner.init_new_workspace = kept
            if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
                return attention, None
            return attention, eagle.DecodeCudaGraphRunner(
                runner,
                attn_backend=attention,
                speculative_num_steps=steps,
                speculative_num_draft_tokens=draft_tokens,
            )

    # ------------------------------------------------------------------ the switch

    def activate(self, arm: str) -> None:
        """Make an arm active for the next batch; the server must be idle."""
        placed = self.arms[arm]
        self._draft_worker = self.drafts[placed.draft]
        if "forced_state" not in placement.orders().omit:
            # eagle_worker_v2.py:1861 apply_runtime_state returns early on an equal step count,
            # where this draft may still have another's.
            self.speculative_num_steps = None
        self.apply_runtime_state(self.states[arm])
        placement.activate(placed)

    # ------------------------------------------------------------------ unions: asked once, at
    # start, or for a report

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """Decides at start, for every arm to come, whether sequence lengths go to the CPU
        (managers/overlap_utils.py:26 decide_needs_cpu_seq_lens).
        """
        found = [
            backend
            for state in self.states.values()
            for backend in (
                state.target_attn_backend,
                state.draft_attn_backend,
                state.draft_extend_attn_backend,
            )
        ]
        found += [
            draft.draft_runner.attn_backend
            for draft in self.drafts.values()
            if draft.draft_extend_attn_backend is None
        ]
        return tuple(dict.fromkeys(found))

    @property
    def graph_memory_usage(self) -> dict[str, float]:
        return merge_graph_memory_usage(
            *(draft.graph_memory_usage for draft in self.drafts.values()),
            self._additional_graph_memory_usage,
        )

    @property
    def graph_time_usage(self) -> dict[str, float]:
        return merge_graph_time_usage(
            *(draft.graph_time_usage for draft in self.drafts.values()),
            self._additional_graph_time_usage,
        )

    @property
    def weight_load_time(self) -> float:
        return sum(draft.weight_load_time for draft in self.drafts.values())

    @property
    def preloaded_weights_bytes(self) -> int:
        return sum(draft.preloaded_weights_bytes for draft in self.drafts.values())

    def _draft_model_runners(self) -> tuple:
        return tuple(runner for draft in self.drafts.values() for runner in draft.draft_runners)


def _scope(draft) -> ExitStack:
    """The scope in which SGLang builds and runs a draft (eagle_worker_v2.py:279
    draft_tp_context)."""
    stack = ExitStack()
    for context in (
        eagle.draft_pp_context(),
        eagle.draft_tp_context(draft.parallel_layout),
        eagle.speculative_moe_backend_context(),
        eagle.speculative_moe_a2a_backend_context(),
    ):
        stack.enter_context(context)
    return stack
