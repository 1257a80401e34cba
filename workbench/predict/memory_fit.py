"""Whether what an arm holds fits the memory of the ranks' devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from workbench.experiment.arms import Arm
from workbench.experiment.checks import Check, passed, refused, warned
from workbench.experiment.profile import Profile
from workbench.predict import memory, static_fraction
from workbench.serving import gpus


@dataclass(frozen=True)
class Device:
    """The memory of one rank's device, in bytes.

    free: what nothing else holds.
    total: of all of it, by which SGLang chooses its defaults.
    """

    free: int
    total: int


def devices(
    profile: Profile, given: int | Sequence[int] | None
) -> tuple[list[Device], list[Check]]:
    """The device of each rank, by what is measured here.

    given: bytes of each rank's device instead, of one or of all.
    """
    needed = (
        profile.tp if profile.engine == "cpu" else profile.ranks_a_node
    )  # of other machines nothing is known here
    if given is not None:
        sizes = [given] * profile.tp if isinstance(given, int) else list(given)
        found = [Device(size, size) for size in sizes]
    elif profile.engine == "cuda":
        found = [Device(gpu.free, gpu.total) for gpu in gpus.ours(profile)]
    else:
        memory_ = psutil.virtual_memory()
        share = Device(memory_.available // profile.tp, memory_.total // profile.tp)
        found = [share] * profile.tp
    if len(found) < needed:
        asked = f"{profile.tp}{f', {needed} on this node' if needed < profile.tp else ''}"
        return [], [
            refused(
                "tp",
                f"is {asked}, but {len(found) or 'no'} GPU{'s are' if len(found) != 1 else ' is'}"
                " visible",
                "lower it, use a machine with more GPUs or a profile of the CPU engine; to reckon"
                f" with GPUs that are elsewhere: workbench check --gpus {profile.tp}x80GiB",
            )
        ]
    least = min(device.free for device in found[:needed])
    here = "of this node " if needed < profile.tp else ""
    return found, [
        passed(
            "engine",
            f"{profile.engine}: {needed} devices {here}with at least {memory.gib(least)} free each",
        )
    ]


def equal_pools(
    profile: Profile, needs: Sequence[memory.ArmMemory], static: float
) -> Iterator[Check]:
    """Arms are compared with KV pools of one size; left alone, SGLang gives an arm what its weights
    leave.
    """
    tokens = [need.tokens(static) for need in needs]
    if profile.number("max-total-tokens") is None and tokens and min(tokens) < max(tokens):
        yield warned(
            "server.flags.max-total-tokens",
            f"is not set, so the arms' KV pools hold {min(tokens)} to {max(tokens)} tokens",
            f"set it to {min(tokens)} or less, the same for every arm",
        )


def at_once(profile: Profile, needs: Sequence[memory.ArmMemory], static: float) -> Iterator[Check]:
    """Servers that are up together share the ``static`` bytes of a rank, and each must leave the
    others theirs.

    Each finds its static share of what was free before it loaded (kv_cache_configurator.py:3007
    mem_fraction_static), with all of them loading.
    """
    count, limit = profile.server.at_once, profile.number("max-total-tokens")
    if count == 1:
        return
    if limit is None:
        yield refused(
            "server.flags.max-total-tokens",
            f"is not set, so the first of {count} servers takes the memory of all",
            "set it, or set server.at_once to 1",
        )
        return
    taken = count * max(need.weights + need.pools(int(limit)) for need in needs)
    said = (
        f"{count} servers take up to {memory.gib(taken)} of the {memory.gib(static)} static on a"
        " rank, beside graphs and contexts"
    )
    yield (
        passed("server.at_once", said)
        if taken < static
        else refused("server.at_once", said, "lower it, or raise mem-fraction-static")
    )


_SMALL_CHUNK = 2048  # prefill tokens in one forward: as few as SGLang's own rule counts with
_MOST = 0.9  # of a device for weights and pools, where a profile is to be mended
_ALLOWANCE = memory.GIB // 4  # for what a multimodal target and a page more take
_STEP = 1024  # tokens, by which a pool is proposed


def flags_that_fit(profile: Profile, needs: memory.ArmMemory, device: Device, wanted: int) -> str:
    """What makes room for ``wanted`` tokens beside the weights, as a mend.

    A larger static share is paid with smaller prefills, by the share that SGLang itself would leave
    for them (static_fraction.py).
    """
    apart = "raise tp, take fewer arms into one server by plan.restart, or take a smaller pair"
    if profile.engine == "cpu":
        return "raise server.flags.mem-fraction-static or tp, or take a smaller pair"
    small = profile.flags | {"chunked-prefill-size": _SMALL_CHUNK}
    small.pop("mem-fraction-static", None)
    trial = profile.model_copy(
        update={"server": profile.server.model_copy(update={"flags": small})}
    )
    kept = static_fraction.reserve(trial, None, device.total) * memory.MIB
    fraction = min(_MOST, int((1 - kept / device.total) * 100) / 100)
    fits = needs.tokens(fraction * device.free - _ALLOWANCE) // _STEP * _STEP
    if fits < wanted:
        return apart
    limit = profile.number("max-total-tokens")
    tokens = fits if limit is None else min(fits, int(limit))
    return (
        f"set server.flags.mem-fraction-static to {fraction:.2f}, chunked-prefill-size to"
        f" {_SMALL_CHUNK} and max-total-tokens to {tokens}, or {apart}"
    )


def room(
    profile: Profile,
    needs: memory.ArmMemory,
    arm: Arm,
    device: Device,
    static: float,
    longest_prompt: int,
    heaviest: memory.ArmMemory | None = None,
) -> Check:
    """Whether an arm's weights and KV pools fit the free bytes of one rank's device, ``static`` of
    them theirs, for the workload at hand.

    heaviest: of the servers of the plan, so that one mend makes room for all of them.

    SGLang fills its static share with KV tokens, up to max-total-tokens
    (kv_cache_configurator.py:3096 max_total_tokens).
    """
    field, limit = f"memory {needs.arm}", profile.number("max-total-tokens")
    free = device.free
    draft_tokens = profile.speculation.of(arm).draft_tokens if arm.speculates else 1
    # A request holds its prompt, its answer, and one round of drafts more than it keeps
    # (mem_cache/allocation_sizing.py:53 spec_tokens).
    wanted = profile.workload.concurrency * (
        longest_prompt + profile.workload.max_new_tokens + draft_tokens
    )
    tokens, page = needs.tokens(static), max(1, int(profile.number("page-size", 1)))
    capacity = int(min(tokens, tokens if limit is None else limit)) // page * page
    taken = needs.weights + needs.pools(capacity, page)
    said = (
        f"weights {memory.gib(needs.weights)} a rank (target {memory.gib(needs.target)}, draft"
        f" {memory.gib(needs.draft)}, copied embedding {memory.gib(needs.embedding)}); KV"
        f" {needs.kv} + {needs.draft_kv} bytes a token, {capacity} tokens in"
        f" {memory.gib(needs.pools(capacity, page))}; {memory.gib(taken)} of {memory.gib(free)}"
        f" free, {memory.gib(static)} static"
    )
    doubt = refused if needs.exact else warned
    if needs.weights >= static:
        share = f"{memory.gib(static)} of the {memory.gib(free)} free on a rank"
        return doubt(
            field,
            f"weights of {memory.gib(needs.weights)} leave no room in {share}",
            flags_that_fit(profile, heaviest or needs, device, wanted),
        )
    if capacity < wanted:
        return doubt(
            field,
            f"has room for {capacity} tokens where the workload needs {wanted} ({said})",
            "raise server.flags.max-total-tokens, or lower workload.concurrency"
            if tokens >= wanted
            else flags_that_fit(profile, heaviest or needs, device, wanted),
        )
    if taken > free:
        most = int((static - needs.weights) // (needs.kv + needs.draft_kv)) - page
        return doubt(
            field,
            f"SGLang prices {needs.priced} bytes a token where {needs.kv + needs.draft_kv} are"
            f" taken ({said})",
            f"set server.flags.max-total-tokens to {most} or less",
        )
    if limit is not None and limit > tokens:
        return warned(
            field,
            f"max-total-tokens {limit:.0f} is cut to {tokens} ({said})",
            f"set it to {tokens} or less, the same for every arm",
        )
    if not needs.exact:
        return warned(
            field,
            f"{said}, a guide only: not every layout of this pair is known",
            "watch the first start",
        )
    return passed(field, said)
