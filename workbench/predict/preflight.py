"""Preflight: everything that can be known to go wrong before a server is started, as a table of
checks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from workbench.engine.orders import SGLANG
from workbench.experiment import communication, plans
from workbench.experiment.arms import Arm
from workbench.experiment.checks import Check, passed, refused
from workbench.experiment.errors import BadInput
from workbench.experiment.profile import Profile
from workbench.predict import (
    compatibility,
    memory,
    plan_size,
    prompt_file,
    quantized,
    server_flags,
)
from workbench.predict.memory_fit import Device, at_once, devices, equal_pools, room
from workbench.predict.model_folder import model, tried
from workbench.predict.model_shape import ModelShape
from workbench.serving import gpu_locks, gpus, nodes
from workbench.serving.supervisor import port_is_free

__all__ = ["Check", "check", "refuse"]
PYTHON = (3, 11)
log = logging.getLogger(__name__)


def check(
    profile: Profile,
    arms: Sequence[Arm] | None = None,
    free_bytes: int | Sequence[int] | None = None,
) -> list[Check]:
    """Check a profile for the given arms (its own where None), in the order in which things can go
    wrong.

    free_bytes: memory of each rank's device, in bytes; measured where None. Nothing is started
        and nothing is raised.
    """
    checks: list[Check] = []
    try:
        for found in _findings(
            profile, tuple(profile.arms if arms is None else arms), free_bytes, checks
        ):
            checks.append(found)
    except BadInput as error:  # a flag that is no number: it may stand in the table already
        found = refused(error.field, error.problem, error.mend)
        checks += [found] if found not in checks else []
    return checks


def _findings(
    profile: Profile, arms: tuple[Arm, ...], free_bytes, so_far: list[Check]
) -> Iterator[Check]:
    """The checks one by one; ``so_far`` is where the caller keeps them."""
    yield from tried(lambda: versions(profile))
    yield from tried(lambda: server_flags.check(profile))
    yield from plan_size.check(profile)
    yield from tried(lambda: port(profile))
    yield from tried(lambda: unlocked(profile))
    yield from tried(lambda: nodes.check(profile))
    for arm in arms:
        if arm.speculates:
            yield from tried(
                lambda: [compatibility.group(profile, arm), compatibility.tree(profile, arm)]
            )
    for name in dict.fromkeys(arm.comm for arm in arms if arm.comm):
        if why := communication.SETTINGS[name].why_not(gpus.facts(profile)):
            yield refused(
                f"arms +comm={name}", f"cannot be tried here: {why}", "leave that setting out"
            )
    target, found = model(profile, "target")
    yield from found
    draft, found = model(profile, "draft") if any(arm.speculates for arm in arms) else (None, [])
    yield from found
    if target is not None:
        yield from _fit(profile, target, draft, arms)
    longest, found = prompt_file.check(profile, target)
    yield from found
    ranks, found = devices(profile, free_bytes)
    yield from found
    # Memory is predicted from shapes, so it means nothing while these do not fit.
    if all(c.status != "refused" for c in so_far):
        least = Device(
            min(device.free for device in ranks[: profile.tp]),
            min(device.total for device in ranks[: profile.tp]),
        )
        static = memory.static_bytes(profile, least.free, target, least.total)
        needs = {arm: memory.predict(profile, target, draft, arm) for arm in arms}
        served = [
            memory.together({arm: needs[arm] for arm in held})
            for held in plans.servers(profile, arms)
        ]
        heaviest = max(served, key=lambda need: need.weights)
        for arm in arms:
            yield room(profile, needs[arm], arm, least, static, longest, heaviest)
        for need, held in zip(served, plans.servers(profile, arms)):
            if need not in needs.values():
                widest = max(held, key=lambda arm: profile.speculation.of(arm).draft_tokens)
                yield room(profile, need, widest, least, static, longest, heaviest)
        yield from equal_pools(profile, served, static)
        yield from at_once(profile, served, static)


def refuse(checks: Iterable[Check]) -> None:
    """Stop at the first refused check.

    Raises: BadInput with its field, problem and mend.
    """
    for found in checks:
        if found.status == "refused":
            raise BadInput(found.name, found.detail, found.mend)
        if found.status == "warned":
            log.warning("%s: %s; %s.", found.name, found.detail, found.mend)


def versions(profile: Profile) -> Iterator[Check]:
    """The interpreter, and the SGLang release whose source the patch was written against."""
    if sys.version_info < PYTHON:
        yield refused(
            "python", f"is {sys.version.split()[0]}", f"use {PYTHON[0]}.{PYTHON[1]} or newer"
        )
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = None
    if found != SGLANG:
        problem = (
            f"is {found}, and the patch is written for {SGLANG}" if found else "is not installed"
        )
        yield refused("sglang", problem, f"install sglang=={SGLANG}")
    else:
        yield passed("versions", f"Python {sys.version.split()[0]}, SGLang {found}")


def port(profile: Profile) -> Iterator[Check]:
    """A port that the profile names must be free; without one the workbench takes a free port
    itself.
    """
    named = profile.number("port")
    if named is None:
        return
    if profile.server.at_once > 1:
        yield refused(
            "server.flags.port",
            f"is given for {profile.server.at_once} servers at once",
            "leave it out, or set server.at_once to 1",
        )
        return
    if port_is_free(int(named)):
        yield passed("server.flags.port", f"{named:.0f} is free")
    else:
        yield refused(
            "server.flags.port",
            f"{named:.0f} is in use or cannot be opened",
            "leave it out, or name a free port",
        )


def unlocked(profile: Profile) -> Iterator[Check]:
    """No other run holds the GPUs that this profile takes."""
    for index, holder in gpu_locks.holders(profile).items():
        error = gpu_locks.refusal(index, holder)
        yield refused(error.field, error.problem, error.mend)


def _fit(
    profile: Profile, target: ModelShape, draft: ModelShape | None, arms: Sequence[Arm]
) -> Iterator[Check]:
    for shape in (target, draft):
        if shape is not None:
            yield from quantized.served(profile, shape)
    yield compatibility.kernels(profile, target)
    yield compatibility.rotary(profile, target)
    yield compatibility.heads(profile, target, profile.tp, "tp")
    if draft is not None:
        if draft.mla:
            yield compatibility.rotary(profile, draft)
        for rule in compatibility.PAIR_RULES:
            yield from tried(lambda: [rule(profile, target, draft)])
        for group in dict.fromkeys(arm.group for arm in arms if arm.speculates):
            if not group or profile.tp % group == 0:
                yield compatibility.heads(
                    profile, draft, group or profile.tp, f"plan.arms own-{group}" if group else "tp"
                )
    for shape in (target, draft):
        if shape is not None:
            yield compatibility.stored_weights(shape)
