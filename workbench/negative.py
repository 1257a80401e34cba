"""The negative control: a server that holds one rank with a corrupted draft must be caught, on the machine that measures."""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from workbench import client, logs
from workbench import server as servers
from workbench.arms import Arm
from workbench.errors import ServerFailed
from workbench.lab import Lab
from workbench.profile import Profile
from workbench.runlog import NEGATIVE, Finding

READY_WITHIN_S, TOKEN_WITHIN_S = 200.0, 20.0     # a hang is what is expected here, so it is waited for no longer than it takes to tell
ROUNDS, TOKENS = 4, 64                           # of requests that a corrupted rank may pass before it counts as unnoticed


def corrupted_rank(lab: Lab) -> list[str]:
    """A sentence for each way the ranks' drafts are kept alike: was the last rank, its draft tokens shifted on purpose, caught?

    Nothing is started without ``plan.negative_control``, for what the log holds already, or in a recording. ``check`` compares the
    drafts, so it must name the rank. ``off`` compares nothing: the ranks then verify different trees and no longer finish together. That is owed
    only where SGLang does not hold the accept length, which would keep them together.
    """
    kept = known(lab)
    if not lab.recording and (wanted := missing(lab)):
        with servers.imported_once(lab.profile), ThreadPoolExecutor(min(len(wanted), lab.profile.server.at_once)) as pool:
            for arm, found in zip(wanted, pool.map(lambda arm: _caught(lab, arm), wanted)):
                kept[arm.name] = lab.find(NEGATIVE, arm.name, found)
    return [found["sentence"] for found in kept.values()]


def arms(profile: Profile) -> list[Arm]:
    """The first own-N of the plan under each agreement that has to notice."""
    own = next((arm for arm in profile.arms if arm.placement == "own"), None)
    ways = ("check",) if profile.acceptance_simulated else ("check", "off")
    return [Arm.parse(f"own-{own.group}+agreement={way}") for way in ways] if own else []


def known(lab: Lab) -> dict[str, dict[str, Any]]:
    """{arm: what its corrupted rank did}, from the log."""
    return {r.name: r.value for r in lab.records if isinstance(r, Finding) and r.experiment == NEGATIVE}


def missing(lab: Lab) -> list[Arm]:
    """The arms whose control is asked for and not in the log."""
    there = known(lab)
    return [arm for arm in arms(lab.profile) if arm.name not in there] if lab.profile.plan.negative_control else []


def _caught(lab: Lab, arm: Arm) -> dict[str, Any]:
    limits = {"ready_within_s": min(READY_WITHIN_S, lab.profile.server.ready_within_s), "token_within_s": TOKEN_WITHIN_S}
    profile = lab.profile.model_copy(update={"server": lab.profile.server.model_copy(update=limits)})
    rank, begun, log = profile.tp - 1, time.monotonic(), lab.folder / "logs" / f"negative-{arm.name}.log"
    how, attested = None, None
    try:
        with servers.serve(profile, arm, log, corrupt_rank=rank) as up:
            attested = not up.unattested
            how = _error(up.url, lab.prompts)
    except ServerFailed as failure:
        how = str(failure)
    seconds = time.monotonic() - begun
    told = logs.clean((logs.first_failure(log) or how).splitlines()[-1]) if how else ""       # the server's own words where it died of it
    sentence = (f"{arm.name}, rank {rank} corrupted on purpose: caught within {seconds:.0f} s of the start's beginning ({told.rstrip('.')})."
                if how else f"{arm.name}, rank {rank} corrupted on purpose: it served {ROUNDS} rounds of requests unnoticed.")
    return {"detected": how is not None, "sentence": sentence, "rank": rank, "within_s": round(seconds, 1), "attested": attested}


def _error(url: str, prompts: Sequence[Mapping[str, Any]]) -> str | None:
    """The first error among a few rounds of requests. Raises: ServerFailed when the server hangs or dies."""
    for _ in range(ROUNDS):
        answers = client.send(url, prompts[:4], concurrency=2, max_new_tokens=TOKENS, deadline_s=TOKEN_WITHIN_S)
        if errors := [a.error for a in answers if a.error]:
            return errors[0]
    return None
