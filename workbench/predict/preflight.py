"""Preflight: everything that can be known to go wrong before a server is started, as a table of
checks.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil

from workbench.engine.orders import SGLANG
from workbench.experiment import communication, plans
from workbench.experiment.arms import Arm
from workbench.experiment.checks import Check, passed, refused, warned
from workbench.experiment.errors import BadInput
from workbench.experiment.profile import Profile
from workbench.predict import compatibility, memory, server_flags
from workbench.predict.model_shape import ModelShape, read
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

    free_bytes: free memory of each rank's device, in bytes; measured where None. Nothing is started
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
    yield from _tried(lambda: versions(profile))
    yield from _tried(lambda: server_flags.check(profile))
    yield from _tried(lambda: port(profile))
    yield from _tried(lambda: unlocked(profile))
    yield from _tried(lambda: nodes.check(profile))
    for arm in arms:
        if arm.speculates:
            yield from _tried(
                lambda: [compatibility.group(profile, arm), compatibility.tree(profile, arm)]
            )
    for name in dict.fromkeys(arm.comm for arm in arms if arm.comm):
        if why := communication.SETTINGS[name].why_not(gpus.facts(profile)):
            yield refused(
                f"arms +comm={name}", f"cannot be tried here: {why}", "leave that setting out"
            )
    target, found = _model(profile, "target")
    yield from found
    draft, found = _model(profile, "draft") if any(arm.speculates for arm in arms) else (None, [])
    yield from found
    if target is not None:
        yield from _fit(profile, target, draft, arms)
    longest, found = _prompts(profile, target)
    yield from found
    free, found = _free(profile, free_bytes)
    yield from found
    # Memory is predicted from shapes, so it means nothing while these do not fit.
    if all(c.status != "refused" for c in so_far):
        needs = {arm: memory.predict(profile, target, draft, arm) for arm in arms}
        served = [
            memory.together({arm: needs[arm] for arm in held})
            for held in plans.servers(profile, arms)
        ]
        for arm in arms:
            yield room(profile, needs[arm], arm, min(free[: profile.tp]), longest)
        for need, held in zip(served, plans.servers(profile, arms)):
            if need not in needs.values():
                yield room(
                    profile,
                    need,
                    max(held, key=lambda arm: profile.speculation.of(arm).draft_tokens),
                    min(free[: profile.tp]),
                    longest,
                )
        yield from equal_pools(profile, served, min(free[: profile.tp]))
        yield from at_once(profile, served, min(free[: profile.tp]))


def refuse(checks: Iterable[Check]) -> None:
    """Stop at the first refused check.

    Raises: BadInput with its field, problem and mend.
    """
    for found in checks:
        if found.status == "refused":
            raise BadInput(found.name, found.detail, found.mend)
        if found.status == "warned":
            log.warning("%s: %s; %s.", found.name, found.detail, found.mend)


def _tried(rule: Callable[[], Iterable[Check]]) -> list[Check]:
    found = []
    try:
        found.extend(rule())
    except BadInput as error:
        found.append(refused(error.field, error.problem, error.mend))
    return found


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


def _model(profile: Profile, which: str) -> tuple[ModelShape | None, list[Check]]:
    field, folder = f"pair.{which}", getattr(profile.pair, which)
    try:
        shape = read(folder, field)
    except BadInput as error:
        return None, [refused(error.field, error.problem, error.mend)]
    return shape, list(weights(profile, shape)) + list(remote_code(profile, shape))


def weights(profile: Profile, shape: ModelShape) -> Iterator[Check]:
    """Weights are there unless dummies are asked for, and in a format that runs no code of
    strangers when it is opened.
    """
    named = str(profile.flag("load-format", "auto"))
    if shape.field == "pair.draft":
        named = str(profile.flag("speculative-draft-load-format", None) or named)
    if named == "dummy" or shape.tensors:
        return
    others = sorted(
        p.name
        for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf")
        for p in shape.folder.glob(pattern)
    )
    if others and named == "auto":
        yield refused(
            shape.field,
            f"holds {others[0]} and no safetensors, and opening it can run code",
            "convert it to safetensors, or name its format in server.flags.load-format",
        )
    elif not others:
        yield refused(
            shape.field,
            "has no *.safetensors",
            "take a complete model folder, or set server.flags.load-format to dummy",
        )
    else:
        yield warned(
            shape.field,
            f"is loaded as {named}, whose weights cannot be checked beforehand",
            "convert it to safetensors",
        )


def remote_code(profile: Profile, shape: ModelShape) -> Iterator[Check]:
    """Code that a folder brings is needed where neither SGLang nor transformers knows its model or
    tokenizer.
    """
    if profile.server.trust_remote_code:
        return
    config = json.loads((shape.folder / "config.json").read_text())
    tokenizer = shape.folder / "tokenizer_config.json"
    own_tokenizer = (
        tokenizer.is_file()
        and "auto_map" in tokenizer.read_text()
        and not (shape.folder / "tokenizer.json").exists()
    )
    asks = []
    if "auto_map" in config and not _known_model_type(str(config.get("model_type"))):
        asks.append("its configuration class")
    if (
        own_tokenizer
        and shape.field == "pair.target"
        and not profile.flag("skip-tokenizer-init", False)
    ):
        asks.append("its tokenizer")
    if asks:
        yield refused(
            "server.trust_remote_code",
            f"is off, and {shape.field} brings code for {' and '.join(asks)}",
            "read that code, then set it",
        )


@cache
def _known_model_type(name: str) -> bool:
    """Whether SGLang or transformers has a configuration class of this model_type, by their source:
    importing them takes seconds.
    """
    quoted = re.compile(rf"""["']{re.escape(name)}["']""")
    for package, under in (("transformers", "models/auto"), ("sglang", "srt/configs")):
        spec = find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            if any(quoted.search(path.read_text()) for path in (Path(root) / under).glob("*.py")):
                return True
    return False


def _fit(
    profile: Profile, target: ModelShape, draft: ModelShape | None, arms: Sequence[Arm]
) -> Iterator[Check]:
    yield compatibility.kernels(profile, target)
    yield compatibility.rotary(profile, target)
    yield compatibility.heads(profile, target, profile.tp, "tp")
    if draft is not None:
        if draft.mla:
            yield compatibility.rotary(profile, draft)
        for rule in compatibility.PAIR_RULES:
            yield from _tried(lambda: [rule(profile, target, draft)])
        for group in dict.fromkeys(arm.group for arm in arms if arm.speculates):
            if not group or profile.tp % group == 0:
                yield compatibility.heads(
                    profile, draft, group or profile.tp, f"plan.arms own-{group}" if group else "tp"
                )
    for shape in (target, draft):
        if shape is not None:
            yield compatibility.stored_weights(shape)


def _prompts(profile: Profile, target: ModelShape | None) -> tuple[int, list[Check]]:
    """Tokens of the longest prompt (0 where unknown), and what is wrong with the prompts."""
    field, path = "workload.prompts", profile.workload.prompts
    if str(path) == "random":
        return 0, [
            warned(
                field,
                "are random tokens, which say nothing of accept rates",
                "give a file of held-out text",
            )
        ]
    try:
        prompts = json.loads(Path(path).read_text())
        lengths = [len(p["input_ids"]) for p in prompts]
        highest = max(max(p["input_ids"]) for p in prompts)
    except OSError:
        return 0, [
            refused(
                field,
                f"{path} cannot be read",
                'give a JSON file of {"id", "input_ids"}, or random',
            )
        ]
    except (ValueError, TypeError, KeyError):
        return 0, [
            refused(
                field,
                f'{Path(path).name} is no list of {{"id", "input_ids"}} with tokens in each',
                "write it so, or use random",
            )
        ]
    if target is not None and highest >= target.vocab_size:
        return 0, [
            refused(
                field,
                f"hold token {highest} where the target has {target.vocab_size}",
                "take prompts of this pair's tokenizer",
            )
        ]
    needed = max(lengths) + profile.workload.max_new_tokens
    if target is not None and needed > (served := profile.number("context-length", target.context)):
        return 0, [
            refused(
                "workload.max_new_tokens",
                f"make {needed} tokens with the longest prompt where the target takes {served:.0f}",
                f"lower it to {max(1, int(served) - max(lengths))}",
            )
        ]
    return max(lengths), [
        passed(field, f"{len(prompts)} of {min(lengths)} to {max(lengths)} tokens")
    ]


def _free(profile: Profile, given: int | Sequence[int] | None) -> tuple[list[int], list[Check]]:
    needed = (
        profile.tp if profile.engine == "cpu" else profile.ranks_a_node
    )  # of other machines nothing is known here
    if given is not None:
        free = [given] * profile.tp if isinstance(given, int) else list(given)
    elif profile.engine == "cuda":
        free = [gpu.free for gpu in gpus.ours(profile)]
    else:
        free = [psutil.virtual_memory().available // profile.tp] * profile.tp
    if len(free) < needed:
        asked = f"{profile.tp}{f', {needed} on this node' if needed < profile.tp else ''}"
        return [], [
            refused(
                "tp",
                f"is {asked}, but {len(free) or 'no'} GPU{'s are' if len(free) != 1 else ' is'}"
                " visible",
                "lower it, use a machine with more GPUs or a profile of the CPU engine",
            )
        ]
    least = min(free[:needed])
    here = "of this node " if needed < profile.tp else ""
    return free, [
        passed(
            "engine",
            f"{profile.engine}: {needed} devices {here}with at least {memory.gib(least)} free each",
        )
    ]


def equal_pools(profile: Profile, needs: Sequence[memory.ArmMemory], free: int) -> Iterator[Check]:
    """Arms are compared with KV pools of one size; left alone, SGLang gives an arm what its weights
    leave.
    """
    tokens = [need.tokens(memory.static_bytes(profile, free)) for need in needs]
    if profile.number("max-total-tokens") is None and tokens and min(tokens) < max(tokens):
        yield warned(
            "server.flags.max-total-tokens",
            f"is not set, so the arms' KV pools hold {min(tokens)} to {max(tokens)} tokens",
            f"set it to {min(tokens)} or less, the same for every arm",
        )


def at_once(profile: Profile, needs: Sequence[memory.ArmMemory], free: int) -> Iterator[Check]:
    """Servers that are up together share the ``free`` bytes of a rank, and each must leave the
    others theirs.

    Each finds its static share of what was free before it loaded (kv_cache_configurator.py:3007),
    with all of them loading.
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
    static = memory.static_bytes(profile, free)
    said = (
        f"{count} servers take up to {memory.gib(taken)} of the {memory.gib(static)} static on a"
        " rank, beside graphs and contexts"
    )
    yield (
        passed("server.at_once", said)
        if taken < static
        else refused("server.at_once", said, "lower it, or raise mem-fraction-static")
    )


def room(
    profile: Profile, needs: memory.ArmMemory, arm: Arm, free: int, longest_prompt: int
) -> Check:
    """Whether an arm's weights and KV pools fit the ``free`` bytes of one rank, for the workload at
    hand.

    SGLang fills its static share with KV tokens, up to max-total-tokens
    (kv_cache_configurator.py:3096).
    """
    field, static, limit = (
        f"memory {needs.arm}",
        memory.static_bytes(profile, free),
        profile.number("max-total-tokens"),
    )
    draft_tokens = profile.speculation.of(arm).draft_tokens if arm.speculates else 1
    # A request holds its prompt, its answer, and one round of drafts more than it keeps
    # (mem_cache/allocation_sizing.py:53).
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
            "raise server.flags.mem-fraction-static or tp, or take a smaller pair",
        )
    if capacity < wanted:
        return doubt(
            field,
            f"has room for {capacity} tokens where the workload needs {wanted} ({said})",
            "raise server.flags.max-total-tokens or mem-fraction-static, or lower"
            " workload.concurrency",
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
