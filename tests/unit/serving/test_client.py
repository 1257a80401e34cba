"""The client's deadlines, against small HTTP servers that stand for SGLang: slow is not hung, dead
is not hung, and no clock is trusted.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import contextmanager

import pytest
from aiohttp import web

from workbench.experiment.errors import Hung, ServerFailed
from workbench.serving import client

PROMPTS = [{"id": "p0", "input_ids": [1]}, {"id": "p1", "input_ids": [2]}]


@contextmanager
def serving(waits: float, tokens: int = 4):
    """A stand-in that streams a token every so many seconds."""

    async def generate(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for count in range(1, tokens + 1):
            await asyncio.sleep(waits)
            chunk = {
                "output_ids": list(range(count)),
                "meta_info": {"completion_tokens": count, "finish_reason": {"type": "length"}},
            }
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        return response

    async def silent(request):
        await asyncio.sleep(60)

    loop, ports, ready = asyncio.new_event_loop(), [], threading.Event()

    async def start():
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", generate),
                web.get("/server_info", silent),
                web.post("/draft_tp/arm", silent),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(site._server.sockets[0].getsockname()[1])
        ready.set()

    def serve():
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    ready.wait(10)
    yield f"http://127.0.0.1:{ports[0]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def send(url: str, deadline_s: float, **how):
    return client.send(url, PROMPTS, concurrency=2, max_new_tokens=4, deadline_s=deadline_s, **how)


def test_a_slow_server_is_not_a_hung_one():
    with serving(0.3) as url:
        answers = send(url, deadline_s=0.9)  # the whole takes 1.2 s
    assert [a.completion_tokens for a in answers] == [4, 4] and [a.error for a in answers] == [
        None,
        None,
    ]


def test_no_token_within_the_deadline_is_hung():
    with serving(30) as url, pytest.raises(Hung, match="hung: no token for 0.3 s in request p"):
        send(url, deadline_s=0.3)


def test_no_answer_within_the_deadline_is_hung():
    with serving(1) as url:
        with pytest.raises(Hung, match="/server_info for 0.3 s"):
            client.server_info(url, 0.3)


def test_a_server_that_ended_is_not_waited_for():
    """Its port may stay open, held by a stray: then only its processes tell."""
    begun = time.monotonic()
    with (
        serving(30) as url,
        pytest.raises(ServerFailed, match="ended while requests were at work") as found,
    ):
        send(url, deadline_s=60, alive=lambda: time.monotonic() < begun + 0.2)
    assert not isinstance(found.value, Hung) and time.monotonic() - begun < 20


def test_nobody_on_the_port_is_an_error_of_every_request():
    answers = send("http://127.0.0.1:9", deadline_s=1)
    assert all("ClientConnectorError" in a.error for a in answers)


@pytest.mark.parametrize("jump_s", [-7200, 7200])
def test_a_clock_that_is_set_meanwhile_changes_no_time_and_no_deadline(jump_s, monkeypatch):
    """The wall clock jumps between any two looks at it; the monotonic clocks are the only ones that
    the client asks.
    """
    real, looks = time.time, []
    monkeypatch.setattr(time, "time", lambda: looks.append(1) or real() + jump_s * len(looks))
    with serving(0.05) as url:
        answers = send(url, deadline_s=5)
    assert all(0 <= a.sent < a.first < a.end < 10 for a in answers)
