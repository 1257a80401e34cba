"""The switch between hot arms: a control request that every rank of the scheduler carries out at the same place of its work, or none."""
from __future__ import annotations

import asyncio
import time
from typing import Any

from workbench.engine import placement
from workbench.engine.hooks import Hook, Refused
from workbench.engine.orders import Orders

ROUTE = "/draft_tp/arm"
_KEY = "draft_tp_arm"                 # its value is the arm's place in the orders: SGLang takes numbers only (io_struct.py:2350)
_NOT_IDLE = "requests are in work"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController."


class Control:
    """What this rank knows of the arm in force. in_force: one entry a rank, taken from the worker itself at start and after every switch."""

    def __init__(self, orders: Orders):
        self.orders = orders
        self.in_force: list[dict[str, Any]] = []
        self.switches = 0
        self.refusal = ""             # why the last switch asked for was refused

    def gather(self, scheduler) -> None:
        """Collective: what is in force on each rank."""
        self.in_force[:] = placement.target_group().all_gather_object(_in_force(scheduler.draft_worker))

    def read(self) -> dict[str, Any]:
        """{"arm", "steps", "draft_tokens", "switches", "refusal", "in_force"}: of rank 0, and the last one's of every rank."""
        mine = self.in_force[0] if self.in_force else {}
        return {**{key: mine.get(key) for key in ("arm", "steps", "draft_tokens")}, "switches": self.switches, "refusal": self.refusal,
                "in_force": self.in_force}

    # ------------------------------------------------------------------ in the scheduler: every rank, in the order of its work

    def handlers(self, found, controller):
        """internal_state.py:168 asks for its handlers; adds ours."""
        from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

        scheduler = controller.scheduler

        def validate(_, value):
            # Every rank's word is heard before any acts. An exception of another class would end the server (internal_state.py:149).
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

        return {**found, _KEY: _UpdateHandler(validate, apply)}

    def _objection(self, scheduler, value) -> str:
        if not (float(value).is_integer() and 0 <= value < len(self.orders.arms)):
            return f"there is no arm number {value}"
        if not scheduler.is_fully_idle():
            return _NOT_IDLE
        rank, last = placement.target_group().rank_in_group, value == len(self.orders.arms) - 1
        return f"rank {rank} refuses the last arm (a planted fault)" if last and rank == self.orders.refusing_rank else ""

    # ------------------------------------------------------------------ in the HTTP server's process

    def serve_route(self, *args, **kwargs):
        """Before http_server.py:2841 runs the app: add POST /draft_tp/arm.

        Its body is {"arm": name, "timeout": seconds to wait for the server to be idle, 0 when left out}. It answers with
        {"refused": reason or "", "draft_tp": the server's own account}: 200, 409 for a refusal, 400 for another body.
        """
        from fastapi.responses import JSONResponse
        from sglang.srt.entrypoints import http_server
        from sglang.srt.runtime_context import get_context

        names, under_way = [placed.arm for placed in self.orders.arms], asyncio.Lock()

        def tell_tokenizer(placed) -> None:
            # Proposed drafts are worked out here, from this process's own draft tokens (tokenizer_manager.py:3157).
            if placed.draft_tokens is not None:
                get_context().override("draft_tp.arm", speculative_num_draft_tokens=placed.draft_tokens)

        async def state() -> dict[str, Any]:
            return (await http_server._global_state.tokenizer_manager.get_internal_state())[0]["draft_tp"]

        async def attempt(arm: str, timeout: float) -> str:
            """Why it was refused; empty when it was switched. One request to wait, not many to ask: asking interrupts the work."""
            manager, until = http_server._global_state.tokenizer_manager, time.monotonic() + timeout
            while True:
                if all(await manager.set_internal_state(http_server.SetInternalStateReq(server_args={_KEY: names.index(arm)}))):
                    tell_tokenizer(self.orders.arms[names.index(arm)])
                    return ""
                why, left = (await state())["refusal"], until - time.monotonic()
                if why != _NOT_IDLE or left <= 0:
                    return why
                waited = await manager.flush_cache(timeout_s=left)
                if not waited.success:
                    return f"{why} ({waited.message.rstrip('.')})"

        async def switch(request):
            try:
                body = await request.json()
                arm, timeout = str(body["arm"]), float(body.get("timeout", 0))
            except (ValueError, TypeError, KeyError, AttributeError):
                return JSONResponse({"refused": 'the body is not {"arm": name, "timeout": seconds}'}, 400)
            if arm not in names:
                why = f"the server holds {', '.join(names)}, not {arm}"
            elif under_way.locked():
                why = "another switch is under way"
            else:
                async with under_way:
                    why = await attempt(arm, timeout)
            return JSONResponse({"refused": why, "draft_tp": await state()}, 409 if why else 200)

        tell_tokenizer(self.orders.arms[0])
        http_server.app.add_route(ROUTE, switch, methods=["POST"])


def hooks(orders: Orders, control: Control) -> list[Hook]:
    """A worker of several drafts, and the switch between them; nothing for a server of one arm."""
    if not orders.hot:
        return []

    def create(original, self, server_args):
        found = original(self, server_args)
        from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

        if found is not EAGLEWorkerV2:
            raise Refused(f"several arms in one server need SGLang's EAGLEWorkerV2, not {found.__name__}: serve them one by one")
        from workbench.engine.hotarms import HotArmsWorker

        return HotArmsWorker

    return [
        Hook("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", create, ("self", "server_args")),
        Hook(_STATE + "_update_handlers", control.handlers, ("self",), "after"),
        Hook("sglang.srt.managers.scheduler.Scheduler.flush_cache", keep_allocator, ("self", "empty_cache")),
    ]


def route_hooks(orders: Orders) -> list[Hook]:
    """In the launcher, whose process the HTTP server is: POST /draft_tp/arm."""
    return [Hook("sglang.srt.entrypoints.http_server._setup_and_run_http_server", Control(orders).serve_route,
                 ("server_args", "tokenizer_manager", "template_manager", "port_args", "scheduler_infos", "subprocess_watchdog",
                  "execute_warmup_func", "launch_callback"), "before")] if orders.hot else []


def keep_allocator(original, scheduler, empty_cache: bool = True) -> bool:
    """A flush leaves the allocator its memory: the first block after it would pay for getting it back (scheduler.py:5518)."""
    return original(scheduler, empty_cache=False)


def _in_force(worker) -> dict[str, Any]:
    """The arm in force on this rank, read from what runs, not from what was asked for."""
    if worker is None:
        return {"arm": "none"}
    draft, placed = worker._draft_worker, placement.in_force()
    group = draft.parallel_layout.tp_group or placement.target_group()
    return {"arm": placed.arm, "steps": draft.speculative_num_steps, "draft_tokens": draft.speculative_num_draft_tokens,
            "topk": draft.topk, "agreement": placed.agreement, "group_ranks": list(group.ranks)}
