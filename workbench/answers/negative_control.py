"""The negative control: a server that holds one rank with a corrupted draft must be caught, on the
machine that measures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workbench.experiment.arms import Arm
from workbench.experiment.errors import Hung, ServerFailed
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import NEGATIVE
from workbench.judge.findings import CorruptedRank, corrupted_ranks
from workbench.run.lab import Run
from workbench.serving import client, faults, server_log
from workbench.serving import server as servers
from workbench.serving.faults import Cause, Fault

READY_WITHIN_S, TOKEN_WITHIN_S = (
    200.0,
    20.0,
)  # a hang is what is expected here, so it is waited for no longer than it takes to tell
ROUNDS, TOKENS = 4, 64  # of requests that a corrupted rank may pass before it counts as unnoticed


def corrupted_rank(lab: Run) -> list[str]:
    """A sentence for each way the ranks' drafts are kept alike: was the last rank, its draft tokens
    shifted on purpose, caught?

    Nothing is started without ``plan.negative_control``, for what the log holds already, or in a
    recording. ``check`` compares the drafts, so it must name the rank. ``off`` compares nothing:
    the ranks then verify different trees and no longer finish together. That is owed only where
    SGLang does not hold the accept length, which would keep them together.
    Raises: ServerFailed when a server failed for another reason, which proves nothing; what the
        others did is kept.
    """
    kept = known(lab)
    if not lab.recording and (wanted := missing(lab)):
        failed = None
        with (
            servers.imported_once(lab.profile),
            ThreadPoolExecutor(min(len(wanted), lab.profile.server.at_once)) as pool,
        ):
            for arm, caught in [(arm, pool.submit(_caught, lab, arm)) for arm in wanted]:
                try:
                    kept[arm.name] = lab.record_finding(NEGATIVE, arm.name, caught.result())
                except ServerFailed as failure:
                    failed = failed or failure
        if failed:
            raise failed
    return [found.sentence for found in kept.values()]


def arms(profile: Profile) -> list[Arm]:
    """The first own-N of the plan under each agreement that has to notice."""
    own = next((arm for arm in profile.arms if arm.placement == "own"), None)
    ways = ("check",) if profile.acceptance_simulated else ("check", "off")
    return [Arm.parse(f"own-{own.group}+agreement={way}") for way in ways] if own else []


def known(lab: Run) -> dict[str, CorruptedRank]:
    """{arm: what its corrupted rank did}, from the log."""
    return corrupted_ranks(lab.records)


def missing(lab: Run) -> list[Arm]:
    """The arms whose control is asked for and not in the log."""
    there = known(lab)
    return (
        [arm for arm in arms(lab.profile) if arm.name not in there]
        if lab.profile.plan.negative_control
        else []
    )


def _caught(lab: Run, arm: Arm) -> CorruptedRank:
    limits = {
        "ready_within_s": min(READY_WITHIN_S, lab.profile.server.ready_within_s),
        "token_within_s": TOKEN_WITHIN_S,
    }
    profile = lab.profile.model_copy(
        update={"server": lab.profile.server.model_copy(update=limits)}
    )
    rank, begun, log = (
        profile.tp - 1,
        time.monotonic(),
        lab.folder / "logs" / f"negative-{arm.name}.log",
    )
    who = f"{arm.name}, rank {rank} corrupted on purpose"
    failure, attested = None, None
    try:
        with servers.serve(profile, arm, log, corrupt_rank=rank) as up:
            attested = not up.unattested
            failure = _error(up.url, lab.prompts)
    except ServerFailed as error:
        failure = error
    seconds = time.monotonic() - begun
    # The server's own words, where it died of it.
    fault = faults.first(log) or faults.told_by(str(failure or "").split("\n")[0])
    told = server_log.clean(fault.sentence)
    if failure and not _is_of_the_corruption(arm, rank, failure, fault, log):
        raise ServerFailed(
            f"{who}: its server failed for another reason, which is no evidence"
            f" ({told.rstrip('.')})"
        )
    sentence = (
        f"{who}: caught within {seconds:.0f} s of the start's beginning ({told.rstrip('.')})."
        if failure
        else f"{who}: it served {ROUNDS} rounds of requests unnoticed."
    )
    return CorruptedRank(
        detected=failure is not None,
        sentence=sentence,
        rank=rank,
        within_s=round(seconds, 1),
        attested=attested,
    )


def _is_of_the_corruption(
    arm: Arm, rank: int, failure: ServerFailed, fault: Fault, log: Path
) -> bool:
    """Whether a failure is what the corrupted rank does: under ``check`` it is named, else the
    ranks part over requests that were taken.
    """
    if arm.agreement == "check":
        return fault.cause is Cause.DISAGREED and fault.ranks == (rank,)
    at_work = isinstance(failure, Hung) or server_log.answering(log)
    return at_work and fault.cause is not Cause.OUT_OF_MEMORY


def _error(url: str, prompts: Sequence[Mapping[str, Any]]) -> ServerFailed | None:
    """The first error among a few rounds of requests. Raises: ServerFailed when the server hangs or
    dies.
    """
    for _ in range(ROUNDS):
        answers = client.send(
            url, prompts[:4], concurrency=2, max_new_tokens=TOKENS, deadline_s=TOKEN_WITHIN_S
        )
        if errors := [a.error for a in answers if a.error]:
            return ServerFailed(errors[0])
    return None
