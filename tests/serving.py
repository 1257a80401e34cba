"""Helpers of the engine tests: a server for a profile and an arm, answers, counts."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench import client, profile, server
from workbench.arms import Arm
from workbench.runlog import Request

TOKENS = 64


@contextmanager
def serving(chosen: profile.Profile, arm: str, folder: Path, **orders) -> Iterator[server.Server]:
    with server.serve(chosen, Arm.parse(arm), folder / f"{arm}-tp{chosen.tp}.log", **orders) as up:
        yield up


def ask(up: server.Server, prompts: list[dict], concurrency: int = 1, tokens: int = TOKENS) -> list[Request]:
    answers = client.send(up.url, prompts, concurrency=concurrency, max_new_tokens=tokens, deadline_s=60)
    assert [a.error for a in answers] == [None] * len(prompts)
    return answers


def histogram(answers: list[Request], steps: int = 3) -> tuple[int, ...]:
    total = [0] * (steps + 1)
    for answer in answers:
        for correct, rounds in enumerate(answer.histogram):
            total[correct] += rounds
    return tuple(total)


def per_round(up: server.Server) -> dict[str, float]:
    """Collectives a round by stage since the server's start."""
    counts = client.server_info(up.url)["draft_tp"]["counts"]
    return {stage: sum(counts["collectives"].get(stage, {}).values()) / rounds for stage, rounds in counts["rounds"].items()}
