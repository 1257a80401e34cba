"""Hooks that are active or stop the server: SGLang only logs a hook that it cannot apply
(plugins/hook_registry.py:166 logger.exception).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version

from workbench.engine.orders import SGLANG


class Refused(RuntimeError):
    """What was ordered is not to be had: one sentence. Ends the process, and with it the server."""


@dataclass(frozen=True)
class Hook:
    """One hook. target: dotted path in SGLang; function: called as SGLang's hook of that kind;
    parameters: the target's parameter names in this release, so that a changed signature is seen
    before it is misused; kind: around, before or after.
    """

    target: str
    function: Callable
    parameters: tuple[str, ...]
    kind: str = "around"


def install(hooks: Iterable[Hook]) -> tuple[str, ...]:
    """Register and apply the hooks by SGLang's plugin mechanism and make sure that each is in
    force; returns their targets.

    Of two around one target the earlier is outside: SGLang would have it inside, and warns of both.
    Raises: Refused for another SGLang release, a missing target, a changed signature, or a hook
        that was not applied.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = _joined(hooks)
    found = version("sglang")
    if found != SGLANG:
        raise Refused(
            f"this workbench patches SGLang {SGLANG} and found {found}: install sglang=={SGLANG}"
        )
    for hook in hooks:
        _check(hook)
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    with _propagated_at_once():
        HookRegistry.apply_hooks()
    for hook in hooks:
        # functools.wraps leaves the original behind: a target without it was not wrapped.
        if not hasattr(_resolve(hook.target), "__wrapped__"):
            raise Refused(
                f"the hook on {hook.target} was not applied: see the log above for SGLang's reason"
            )
    return tuple(dict.fromkeys(hook.target for hook in hooks))


@contextmanager
def _propagated_at_once() -> Iterator[None]:
    """Inside, SGLang looks once for names bound to what it patches, instead of once a target.

    Each look reads every name of every module, which costs a rank that is forked a copy of the
    memory that they lie in: together as much as the rest of its start.
    """
    from sglang.srt.plugins import hook_registry

    each, patched = hook_registry._propagate_patch, {}

    def later(original: object, wrapped: object, source: object) -> int:
        patched[id(original)] = original, wrapped, source
        return 0

    hook_registry._propagate_patch = later
    try:
        yield
    finally:
        hook_registry._propagate_patch = each
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in patched and module is not patched[id(value)][2]:
                    setattr(module, name, patched[id(value)][1])


def _joined(hooks: Iterable[Hook]) -> tuple[Hook, ...]:
    joined: dict[tuple, Hook] = {}
    for hook in hooks:
        key = (hook.target,) if hook.kind == "around" else (hook.target, hook.kind, hook.function)
        joined[key] = (
            replace(joined[key], function=_around(joined[key].function, hook.function))
            if key in joined
            else hook
        )
    return tuple(joined.values())


def _around(outer: Callable, inner: Callable) -> Callable:
    def both(original, *args, **kwargs):
        return outer(functools.partial(inner, original), *args, **kwargs)

    return both


def _resolve(target: str) -> Callable:
    owner, _, name = target.rpartition(".")
    module = re.match(r"[a-z0-9_.]+(?=\.|$)", owner)[0]  # classes begin with a capital
    importlib.import_module(module)  # pkgutil would hide why an import failed
    return getattr(pkgutil.resolve_name(owner), name)


def _check(hook: Hook) -> None:
    # Resolving imports the module, so that names imported from it elsewhere are patched too
    # (hook_registry.py:_propagate_patch).
    try:
        target = _resolve(hook.target)
    except (ImportError, AttributeError) as error:
        raise Refused(
            f"{hook.target} is missing in this SGLang ({error}): install sglang=={SGLANG} as"
            " published"
        ) from None
    found = tuple(inspect.signature(target).parameters)
    if found != hook.parameters:
        raise Refused(
            f"{hook.target} takes {', '.join(found)} where {', '.join(hook.parameters)} was"
            f" expected: install sglang=={SGLANG} as published"
        )
