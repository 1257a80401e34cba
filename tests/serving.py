"""Helpers of the engine tests: a server for a profile and its arms, answers, counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from workbench.answers import memory_check
from workbench.experiment import profile
from workbench.experiment.arms import Arm
from workbench.experiment.runlog import Request, RunLog, Start
from workbench.run.lab import Run
from workbench.serving import client, server

TOKENS = 32


@contextmanager
def serving(
    chosen: profile.Profile, arms: str | Sequence[str], folder: Path, **orders
) -> Iterator[server.Server]:
    names = (arms,) if isinstance(arms, str) else tuple(arms)
    log = folder / f"{names[0]}{'-and-others' if names[1:] else ''}-tp{chosen.tp}.log"
    with server.serve(chosen, [Arm.parse(name) for name in names], log, **orders) as up:
        yield up


def ask(
    up: server.Server, prompts: list[dict], concurrency: int = 1, tokens: int = TOKENS
) -> list[Request]:
    answers = client.send(
        up.url, prompts, concurrency=concurrency, max_new_tokens=tokens, deadline_s=60
    )
    assert [a.error for a in answers] == [None] * len(prompts)
    return answers


def histogram(answers: list[Request], steps: int = 3) -> tuple[int, ...]:
    total = [0] * (steps + 1)
    for answer in answers:
        for correct, rounds in enumerate(answer.histogram):
            total[correct] += rounds
    return tuple(total)


def per_round(up: server.Server, before: dict | None = None) -> dict[str, float]:
    """Collectives a round by stage since the server's start, or since the counts ``before``."""
    counts = client.server_info(up.url)["draft_tp"]["counts"]
    earlier = before or {"collectives": {}, "rounds": {}}

    def collectives(said: dict, stage: str) -> int:
        return sum(said["collectives"].get(stage, {}).values())

    return {
        stage: (
            (collectives(counts, stage) - collectives(earlier, stage))
            / (rounds - earlier["rounds"].get(stage, 0))
        )
        for stage, rounds in counts["rounds"].items()
        if rounds > earlier["rounds"].get(stage, 0)
    }


def memory(up: server.Server, chosen: profile.Profile, folder: Path) -> pd.DataFrame:
    """The server's attested memory beside what the preflight predicts for its arms
    (workbench.answers.memory_check).
    """
    with RunLog(folder / "runs.jsonl") as log:
        log.append(
            Start(
                start=0,
                experiment="test",
                arms=tuple(arm.name for arm in up.arms),
                time="",
                seconds=up.seconds,
                server=up.launch.server,
                attestation=up.attestation,
                **server.describe(up.launch),
            )
        )
    return memory_check.table(Run(chosen, folder))
