"""A small asynchronous client: streams requests to one SGLang server, keeps what each cost, and
reads the server's own account.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp

from workbench.experiment.errors import Hung, ServerFailed
from workbench.experiment.runlog import Request

# Greedy everywhere: speculation on CPU is greedy whatever is asked, and identity of tokens is owed
# only there. ignore_eos keeps
# the work of a block the same for every arm.
GREEDY = {"temperature": 0, "ignore_eos": True}


def send(
    url: str,
    prompts: Sequence[Mapping[str, Any]],
    *,
    concurrency: int,
    max_new_tokens: int,
    deadline_s: float,
    alive: Callable[[], bool] = lambda: True,
) -> list[Request]:
    """Stream every prompt, at most ``concurrency`` at once, in order; one Request each, its times
    in seconds from the call.

    prompts: {"id", "input_ids"}.
    deadline_s: the longest a request may go without a token.
    alive: whether the server still runs, asked twice a second: a port that stays open would hide
        its end.
    Raises: Hung when a request passes the deadline; ServerFailed when the server ends meanwhile.
    """
    return _run(_send(url, prompts, concurrency, max_new_tokens, deadline_s, alive))


def _run(work: Coroutine) -> Any:
    # A notebook's kernel already runs a loop in its own thread, where asyncio.run refuses to start
    # another.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _send(
    url: str,
    prompts: Sequence[Mapping[str, Any]],
    concurrency: int,
    max_new_tokens: int,
    deadline_s: float,
    alive: Callable[[], bool],
) -> list[Request]:
    begun, gate = time.perf_counter(), asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=deadline_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(prompt: Mapping[str, Any]) -> Request:
            async with gate:
                return await _stream(session, url, prompt, max_new_tokens, begun)

        work = asyncio.gather(*map(one, prompts))
        while not work.done():
            await asyncio.wait([work], timeout=0.5)
            if not work.done() and not alive():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                raise ServerFailed("the server ended while requests were at work")
        return list(work.result())


async def _stream(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Mapping[str, Any],
    max_new_tokens: int,
    begun: float,
) -> Request:
    body = {
        "input_ids": list(prompt["input_ids"]),
        "stream": True,
        "sampling_params": {**GREEDY, "max_new_tokens": max_new_tokens},
    }
    sent, first, last, error = time.perf_counter() - begun, None, {}, None
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                error = f"HTTP {response.status}: {(await response.text())[:200]}"
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    error = str(chunk["error"].get("message", chunk["error"]))[:200]
                    continue
                first = first if first is not None else time.perf_counter() - begun
                last = chunk
    except asyncio.TimeoutError:
        raise Hung(
            f"hung: no token for {session.timeout.sock_read:g} s in request {prompt['id']} while"
            " the server was up"
        ) from None
    except aiohttp.ClientError as failure:
        error = f"{type(failure).__name__}: {failure}"
    meta = last.get("meta_info", {})
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        error = reason.get("message", "aborted")
    return Request(
        prompt=str(prompt["id"]),
        prompt_tokens=meta.get("prompt_tokens", len(prompt["input_ids"])),
        completion_tokens=meta.get("completion_tokens", 0),
        cached_tokens=meta.get("cached_tokens"),
        finish=reason.get("type"),
        error=error,
        sent=sent,
        first=first,
        end=time.perf_counter() - begun,
        verify_ct=meta.get("spec_verify_ct"),
        proposed=meta.get("spec_num_proposed_drafts"),
        correct=meta.get("spec_num_correct_drafts"),
        histogram=meta.get("spec_correct_drafts_histogram"),
        output_ids=tuple(last.get("output_ids", ())),
    )


async def _get(url: str, path: str, timeout_s: float) -> Any:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
        session.get(url + path) as response,
    ):
        response.raise_for_status()
        return await response.json()


def server_info(url: str, timeout_s: float = 30) -> dict[str, Any]:
    """The server's own account (/server_info), with the engine's rank reports and counts under
    "draft_tp".

    Raises: Hung when it does not answer in time; ServerFailed when nobody listens.
    """
    try:
        info = _run(_get(url, "/server_info", timeout_s))
    except asyncio.TimeoutError:
        raise Hung(
            f"hung: no answer to /server_info for {timeout_s:g} s while the server was up"
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerFailed(
            f"the server does not answer /server_info ({type(error).__name__})"
        ) from None
    state = (info.get("internal_states") or [{}])[0]
    return {**info, "draft_tp": state.get("draft_tp", {}), "internal_states": None}


async def _post(url: str, path: str, body: Mapping[str, Any], timeout_s: float) -> tuple[int, Any]:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url + path, json=body) as response,
    ):
        return response.status, await response.json(content_type=None)


def switch(url: str, arm: str, timeout_s: float) -> dict[str, Any]:
    """Make an arm that the server holds active; returns the server's own account of it
    ("draft_tp", as in ``server_info``).

    timeout_s: how long to wait for requests in work to end; they are served to their end by the arm
        they began under. Nothing else should
    send requests meanwhile: what comes in between keeps the server busy. 0 is not to wait.
    Raises: ServerFailed with the reason when the server refuses, and then the active arm is the
        old one on every rank; or when it does not answer (Hung, while it is up).
    """
    try:
        status, said = _run(
            _post(url, "/draft_tp/arm", {"arm": arm, "timeout": timeout_s}, timeout_s + 30)
        )
    except asyncio.TimeoutError:
        raise Hung(
            f"hung: no answer to a switch to {arm} for {timeout_s + 30:g} s while the server was up"
        ) from None
    except (aiohttp.ClientError, OSError, json.JSONDecodeError) as error:
        raise ServerFailed(
            f"the server does not answer a switch to {arm} ({type(error).__name__})"
        ) from None
    if status != 200:
        raise ServerFailed(
            f"the server did not switch to {arm}:"
            f" {said.get('refused') or said if isinstance(said, dict) else said}"
        )
    return said["draft_tp"]


def start_profile(url: str, folder: Path, engine: str) -> str:
    """Start SGLang's profiler on every rank (/start_profile); returns why it does not start, empty
    when it does.

    folder: where the server, which is on this machine, writes one trace a rank. Neither stacks nor
        shapes: they are most of a trace's size.
    """
    activities = ["CPU"] if engine == "cpu" else ["CPU", "GPU"]
    return _profile(
        url,
        "start",
        {
            "output_dir": str(folder.resolve()),
            "profile_id": "cycles",
            "activities": activities,
            "with_stack": False,
            "record_shapes": False,
        },
    )


def stop_profile(url: str) -> str:
    """Stop SGLang's profiler and have its traces written; returns why not, empty when they are."""
    return _profile(url, "stop", {})


def _profile(url: str, verb: str, body: Mapping[str, Any], timeout_s: float = 120) -> str:
    async def post() -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/{verb}_profile", json=body) as response,
        ):
            return response.status, (await response.text()).strip()

    try:
        status, text = _run(post())
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        return f"/{verb}_profile was not answered within {timeout_s:g} s ({type(error).__name__})"
    return "" if status == 200 else f"/{verb}_profile was refused with HTTP {status}: {text[:200]}"
