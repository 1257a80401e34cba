"""The switch between hot arms in the HTTP server: POST /draft_tp/arm."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from workbench.engine.arm_switch import KEY, NOT_IDLE
from workbench.engine.hooks import Hook
from workbench.engine.orders import Orders, Placement

ROUTE = "/draft_tp/arm"


def hooks(orders: Orders) -> list[Hook]:
    """In the launcher, whose process the HTTP server is: the route, added before the app runs.
    Nothing for a server of one arm.
    """

    def serve(*args, **kwargs):
        from sglang.srt.entrypoints import http_server

        _tell_tokenizer(orders.arms[0])
        http_server.app.add_route(ROUTE, _switch(orders, http_server), methods=["POST"])

    return (
        [
            Hook(
                "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
                serve,
                (
                    "server_args",
                    "tokenizer_manager",
                    "template_manager",
                    "port_args",
                    "scheduler_infos",
                    "subprocess_watchdog",
                    "execute_warmup_func",
                    "launch_callback",
                ),
                "before",
            )
        ]
        if orders.hot
        else []
    )


def _switch(orders: Orders, http_server):
    """The route's function. Its body is {"arm": name, "timeout": seconds to wait for the server to
    be idle, 0 when left out}.

    It answers with {"refused": reason or "", "draft_tp": the server's own account}: 200, 409 for a
    refusal, 400 for another body.
    """
    from fastapi.responses import JSONResponse

    names, under_way = [placed.arm for placed in orders.arms], asyncio.Lock()

    async def account() -> dict[str, Any]:
        return (await http_server._global_state.tokenizer_manager.get_internal_state())[0][
            "draft_tp"
        ]

    async def attempt(number: int, timeout: float) -> str:
        """Why it was refused; empty when it was switched. It waits by one deferred flush: asking
        again and again would hold up the work.
        """
        manager, until = http_server._global_state.tokenizer_manager, time.monotonic() + timeout
        while True:
            if all(
                await manager.set_internal_state(
                    http_server.SetInternalStateReq(server_args={KEY: number})
                )
            ):
                _tell_tokenizer(orders.arms[number])
                return ""
            why, left = (await account())["refusal"], until - time.monotonic()
            if why != NOT_IDLE or left <= 0:
                return why
            waited = await manager.flush_cache(timeout_s=left)
            if not waited.success:
                return f"{why} ({waited.message.rstrip('.')})"

    async def switch(request) -> JSONResponse:
        try:
            body = await request.json()
            arm, timeout = str(body["arm"]), float(body.get("timeout", 0))
        except (ValueError, TypeError, KeyError, AttributeError):
            return JSONResponse(
                {"refused": 'the body is not {"arm": name, "timeout": seconds}'}, 400
            )
        if arm not in names:
            why = f"the server holds {', '.join(names)}, not {arm}"
        elif under_way.locked():
            why = "another switch is under way"
        else:
            async with under_way:
                why = await attempt(names.index(arm), timeout)
        return JSONResponse({"refused": why, "draft_tp": await account()}, 409 if why else 200)

    return switch


def _tell_tokenizer(placed: Placement) -> None:
    """The drafts a request proposed are worked out in this process, from its own draft tokens
    (tokenizer_manager.py:3157 speculative_num_draft_tokens).
    """
    from sglang.srt.runtime_context import get_context

    if placed.draft_tokens is not None:
        get_context().override("draft_tp.arm", speculative_num_draft_tokens=placed.draft_tokens)
