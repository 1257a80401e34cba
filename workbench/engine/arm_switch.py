"""The switch between hot arms in the scheduler: every rank carries it out at the same place of its
work, or none does.
"""

from __future__ import annotations

from typing import Any

from workbench.engine import placement
from workbench.engine.hooks import Hook, Refused
from workbench.engine.orders import Orders

# Its value is the arm's place in the orders: SGLang takes numbers only (managers/io_struct.py:2348
# SetInternalStateReq).
KEY = "draft_tp_arm"
NOT_IDLE = "requests are in work"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController."


class Control:
    """What this rank knows of the active arm. active: one entry a rank, taken from the worker
    itself at start and after every switch.
    """

    def __init__(self, orders: Orders):
        self.orders = orders
        self.active: list[dict[str, Any]] = []
        self.switches = 0
        self.refusal = ""  # why the last switch asked for was refused

    def gather(self, scheduler) -> None:
        """Collective: what is active on each rank."""
        self.active[:] = placement.target_group().all_gather_object(_active(scheduler.draft_worker))

    def read(self) -> dict[str, Any]:
        """{"arm", "steps", "draft_tokens", "switches", "refusal", "active"}: of rank 0, and the
        last one's of every rank.
        """
        mine = self.active[0] if self.active else {}
        return {
            **{key: mine.get(key) for key in ("arm", "steps", "draft_tokens")},
            "switches": self.switches,
            "refusal": self.refusal,
            "active": self.active,
        }

    def handlers(self, found, controller):
        """Adds ours to the handlers that internal_state.py:168 _update_handlers gives."""
        from sglang.srt.managers.scheduler_components.internal_state import (
            UpdateRejected,
            _UpdateHandler,
        )

        scheduler = controller.scheduler

        def validate(_, value):
            # Every rank's word is heard before any acts. An exception of another class would end
            # the server (internal_state.py:155 UpdateRejected).
            said = placement.target_group().all_gather_object(self._objection(scheduler, value))
            self.refusal = "; ".join(dict.fromkeys(filter(None, said)))
            if self.refusal:
                raise UpdateRejected(f"draft-tp: the arm was not switched: {self.refusal}")

        def apply(_, value):
            import torch

            # A prefix cached under one arm has no KV in another's pool.
            if not scheduler.flush_cache():
                raise Refused("the caches could not be flushed although the server was idle")
            torch.get_device_module(scheduler.device).synchronize()
            scheduler.draft_worker.activate(self.orders.arms[int(value)].arm)
            self.switches += 1
            self.gather(scheduler)

        return {**found, KEY: _UpdateHandler(validate, apply)}

    def _objection(self, scheduler, value) -> str:
        if not (float(value).is_integer() and 0 <= value < len(self.orders.arms)):
            return f"there is no arm number {value}"
        if not scheduler.is_fully_idle():
            return NOT_IDLE
        rank, last = placement.target_group().rank_in_group, value == len(self.orders.arms) - 1
        return (
            f"rank {rank} refuses the last arm (a planted fault)"
            if last and rank == self.orders.refusing_rank
            else ""
        )


def hooks(orders: Orders, control: Control) -> list[Hook]:
    """A worker of several drafts, and the switch between them; nothing for a server of one arm."""
    if not orders.hot:
        return []

    def create(original, self, server_args):
        found = original(self, server_args)
        from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

        if found is not EAGLEWorkerV2:
            raise Refused(
                f"several arms in one server need SGLang's EAGLEWorkerV2, not {found.__name__}:"
                " serve them one by one"
            )
        from workbench.engine.hot_arms_worker import HotArmsWorker

        return HotArmsWorker

    return [
        Hook(
            "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
            create,
            ("self", "server_args"),
        ),
        Hook(_STATE + "_update_handlers", control.handlers, ("self",), "after"),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.flush_cache",
            keep_allocator,
            ("self", "empty_cache"),
        ),
    ]


def keep_allocator(original, scheduler, empty_cache: bool = True) -> bool:
    """A flush leaves the allocator its memory: the first block after it would pay for getting it
    back (managers/scheduler.py:5518 flush_cache).
    """
    return original(scheduler, empty_cache=False)


def _active(worker) -> dict[str, Any]:
    """The active arm of this rank, read from what runs, not from what was asked for."""
    if worker is None:
        return {"arm": "none"}
    draft, placed = worker._draft_worker, placement.active()
    group = draft.parallel_layout.tp_group or placement.target_group()
    return {
        "arm": placed.arm,
        "steps": draft.speculative_num_steps,
        "draft_tokens": draft.speculative_num_draft_tokens,
        "topk": draft.topk,
        "agreement": placed.agreement,
        "timing": placed.timing,
        "group_ranks": list(group.ranks),
    }
