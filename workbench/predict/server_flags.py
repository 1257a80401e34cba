"""SGLang's server flags in a profile: which of them the workbench sets itself, which do not go
together, which do not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from workbench.engine import unsupported
from workbench.experiment.checks import Check, passed, refused, warned
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import plain_number
from workbench.serving import server_log

# What the workbench sets from elsewhere in the profile, and the field to use instead.
OWNED = {
    "model-path": "pair.target",
    "model": "pair.target",
    "speculative-draft-model-path": "pair.draft",
    "speculative-draft-model": "pair.draft",
    **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr"), "nodes"),
    "tp": "tp",
    "tp-size": "tp",
    "tensor-parallel-size": "tp",
    "speculative-algorithm": "speculation.algorithm",
    "speculative-num-steps": "speculation.steps",
    "speculative-eagle-topk": "speculation.topk",
    "speculative-num-draft-tokens": "speculation.draft_tokens",
    "trust-remote-code": "server.trust_remote_code",
    "device": "engine",
}
_OWNED_ON_CPU = ("attention-backend", "dtype")
_ENVIRONMENT = {
    "SGLANG_PLUGINS": "which plugins load is the workbench's own order",
    "DRAFT_TP_ORDERS": "it carries the workbench's own orders",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": (
        "the pools must be sized before the draft's group is captured"
    ),
}


@cache
def known() -> frozenset[str]:
    """Every flag that the installed SGLang takes, read off its source without importing it; empty
    where SGLang is not installed.

    Flags are the fields of arg_groups/fields/*.py, with their aliases, and a few that
    server_args.py adds by hand.
    """
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return frozenset()
    source = Path(package.submodule_search_locations[0]) / "srt"
    found: set[str] = set()
    for path in (source / "server_args.py", *(source / "arg_groups" / "fields").glob("*.py")):
        text = path.read_text()
        found |= {
            name.replace("_", "-")
            for name in re.findall(r"^    ([a-z]\w+): A\[", text, re.MULTILINE)
        }
        found |= set(re.findall(r'"--([a-z0-9][a-z0-9-]+)"', text))
    return frozenset(found)


def check(profile: Profile) -> Iterator[Check]:
    """Every finding about the profile's flags and environment; one ``passed`` where there is none.

    Source for pages and trees: arg_groups/speculative_hook.py:1271 _PAGE_TREE_SPEC_BACKENDS of
    SGLang 0.5.23.
    """
    found = [*_names(profile), *_values(profile), *_environment(profile)]
    yield from found or [
        passed(
            "server.flags",
            f"{len(profile.server.flags)} flags, none owned by the workbench, none in conflict",
        )
    ]


def _names(profile: Profile) -> Iterator[Check]:
    for name, value in profile.flags.items():
        field = f"server.flags.{name}"
        if name in OWNED:
            yield refused(field, "is set by the workbench itself", f"give it as {OWNED[name]}")
        elif profile.engine == "cpu" and name in _OWNED_ON_CPU:
            yield refused(field, "is set by the CPU engine itself", "leave it out")
        elif found := unsupported.by_flag(name):
            if str(value) not in map(str, found.harmless):
                yield refused(
                    field, f"switches on {found.what}: not supported here", "leave it out"
                )
        elif known() and name not in known():
            near = get_close_matches(name, known(), 1)
            yield refused(
                field,
                "is no flag of SGLang's server",
                f"write {near[0]}" if near else "leave it out",
            )


def _values(profile: Profile) -> Iterator[Check]:
    topk = max([profile.speculation.topk, *(arm.topk or 1 for arm in profile.arms)])
    page, backend = profile.number("page-size", 1), str(profile.flag("attention-backend", ""))
    if (
        page > 1
        and topk > 1
        and (profile.engine == "cpu" or backend and backend not in ("flashinfer", "fa3", "triton"))
    ):
        yield refused(
            "server.flags.page-size",
            f"{page:.0f} with a tree of topk {topk} is served by flashinfer, fa3 and triton only",
            "use page-size 1 or a chain (topk 1)",
        )
    if topk > 1 and backend == "trtllm_mha":
        yield refused(
            "server.flags.attention-backend",
            "trtllm_mha serves chains only",
            "use another backend or topk 1",
        )
    if profile.flag("speculative-token-map", None):
        yield warned(
            "server.flags.speculative-token-map",
            "is ignored by EAGLE-3, which brings its own map (d2t)",
            "leave it out",
        )
    if not profile.flag("disable-radix-cache", False):
        yield warned(
            "server.flags.disable-radix-cache",
            "is off, so a prompt sent twice is answered from the prefix cache",
            "set it, or expect blocks with cached tokens to be refused",
        )
    # SGLang's default on GPUs is breakable (model_executor/cuda_graph_config.py:119
    # default_prefill_backend).
    if (
        profile.engine == "cuda"
        and any(arm.group for arm in profile.arms)
        and profile.flag("cuda-graph-backend-prefill", "") != "disabled"
        and not profile.flag("disable-cuda-graph", False)
    ):
        yield warned(
            "server.flags.cuda-graph-backend-prefill",
            "lets own-N capture its prefill in CUDA graphs, which was not seen on GPUs yet",
            "set it to disabled unless prefill is in question, which saves most of a first"
            " start too",
        )
    running, wanted = profile.number("max-running-requests"), profile.workload.concurrency
    if running is not None and running < wanted:
        yield warned(
            "server.flags.max-running-requests",
            f"{running:.0f} is less than workload.concurrency {wanted}, so requests queue",
            f"raise it to {wanted} or lower the concurrency",
        )
    if str(host := profile.flag("host", "127.0.0.1")) not in ("127.0.0.1", "localhost", "::1"):
        yield warned(
            "server.flags.host",
            f"{host} lets other machines send requests to the servers, which ask for no key",
            "leave it out unless they are to",
        )
    fraction = profile.number("mem-fraction-static")
    if fraction is not None and not 0 < fraction < 1:
        yield refused(
            "server.flags.mem-fraction-static", f"is {fraction}", "give a fraction between 0 and 1"
        )


def _environment(profile: Profile) -> Iterator[Check]:
    for name, why in _ENVIRONMENT.items():
        if profile.server.environment.get(name):
            yield refused(f"server.environment.{name}", f"must not be set: {why}", "leave it out")
    for name in filter(server_log.is_secret, profile.server.environment):
        yield refused(
            f"server.environment.{name}",
            "looks like a secret, which the profile would keep",
            "set it in the shell that starts the workbench",
        )
    held = profile.server.environment.get("SGLANG_SIMULATE_ACC_LEN")
    simulated = bool(held) and plain_number("server.environment.SGLANG_SIMULATE_ACC_LEN", held) > 0
    dummy = profile.flag("load-format", "auto") == "dummy"
    if simulated:
        yield warned(
            "server.environment.SGLANG_SIMULATE_ACC_LEN",
            "holds the accept length, so nothing is learnt about accept rates",
            "leave it out where the pair itself is in question",
        )
    elif dummy:
        yield warned(
            "server.flags.load-format",
            "dummy weights accept nothing, so a cycle is all that can be measured",
            "set SGLANG_SIMULATE_ACC_LEN in server.environment, or load real weights",
        )
