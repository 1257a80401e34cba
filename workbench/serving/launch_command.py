"""How a server is started: the command and environment of each node's part."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.engine.cpu.paths import python_path
from workbench.engine.orders import VARIABLE, Orders, Placement
from workbench.experiment import communication, plans
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput, ServerFailed
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import Node
from workbench.serving import nodes

LOCAL, EVERYWHERE = (
    "127.0.0.1",
    (
        "0.0.0.0",
        "::",
    ),
)  # a server listens on this machine alone unless the profile names a host


PORTS = range(20_000, 32_768)  # from there on are the ephemeral ones (net.ipv4.ip_local_port_range)


# After a worker's death SGLang waits a minute for core dumps that nothing writes
# (managers/tokenizer_manager.py:3495 SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS), and its requests
# with it.
ENDS_SOON = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0"}


# The CPU engine: SGLang's CPU path with its EAGLE-capable back end, fp32 so that tokens are
# identical.
CPU_FLAGS = {
    "device": "cpu",
    "attention-backend": "intel_amx",
    "dtype": "float32",
    "disable-cuda-graph": True,
    "sleep-on-idle": True,
}  # a rank that polls for work takes the core that the client and the other ranks need


# One thread a rank: nothing binds ranks to cores without the compiled kernels, and two pools of
# threads that spin on two cores cost tenfold.
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}  # with a GPU in sight SGLang imports what only CUDA has


@dataclass(frozen=True)
class Part:
    """One node's part of a server: its command, and the environment it needs beyond the starter's
    own.
    """

    node: Node
    command: tuple[str, ...]
    environment: Mapping[str, str]
    port: int = 0


@dataclass(frozen=True)
class Launch:
    """How one server is started: a part on each of its nodes, the one that answers on ``port``
    first.
    """

    server: str
    port: int
    parts: tuple[Part, ...]
    orders: Orders
    host: str = LOCAL

    @property
    def command(self) -> tuple[str, ...]:
        return self.parts[0].command

    @property
    def environment(self) -> Mapping[str, str]:
        return self.parts[0].environment

    @property
    def url(self) -> str:
        """Where it answers this machine."""
        host = LOCAL if self.host in EVERYWHERE else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def plan(
    profile: Profile,
    arms: Arm | Sequence[Arm],
    *,
    port: int,
    server: str,
    concurrency: int = 0,
    **orders: Any,
) -> Launch:
    """How one or several arms are served under the profile. concurrency: the most requests that it
    will be sent at once, where that is more than the workload's; orders: faults for negative
    controls (engine/orders.py).

    Raises: BadInput for arms that one server cannot hold together.
    """
    arms = (arms,) if isinstance(arms, Arm) else tuple(arms)
    if len(apart := plans.together(profile, arms)) > 1:
        raise BadInput(
            "arms",
            f"{apart[0][0].name} and {apart[1][0].name} cannot be held by one server, which runs"
            " either without a draft or with one topk, by which SGLang sizes its buffers, and with"
            " one setting of the communication layer",
            "serve them one by one",
        )
    comm = communication.SETTINGS.get(arms[0].comm or "")
    held = {arm: profile.speculation.of(arm) for arm in arms if arm.speculates}
    flags: dict[str, Any] = {"model-path": profile.pair.target, "host": LOCAL, "tp": profile.tp}
    # Of CUDA graphs only the batch sizes that the workload reaches: SGLang captures more at every
    # start (model_executor/cuda_graph_config.py).
    flags |= (
        CPU_FLAGS
        if profile.engine == "cpu"
        else {"cuda-graph-max-bs-decode": max(concurrency, most_at_once(profile))}
    )
    flags |= profile.flags | dict(comm.flags if comm else {})
    if profile.server.trust_remote_code:
        flags["trust-remote-code"] = True
    if held:
        # The largest of all arms: buffers are sized by them (managers/overlap_utils.py:373
        # _maybe_init_forward_bufs, runtime_context.py:1982 max_speculative_num_draft_tokens).
        flags |= {
            "speculative-algorithm": profile.speculation.algorithm,
            "speculative-draft-model-path": profile.pair.draft,
            "speculative-num-steps": max(s.steps for s in held.values()),
            "speculative-eagle-topk": held[arms[0]].topk,
            "speculative-num-draft-tokens": max(s.draft_tokens for s in held.values()),
        }
    placements = tuple(
        Placement(
            arm.name, arm.group, arm.replica or 1, s.steps, s.draft_tokens, s.agreement, s.timing
        )
        for arm, s in held.items()
    )
    given = Orders(server=server, arms=placements, cpu=profile.engine == "cpu", **orders)
    environment = {
        "SGLANG_PLUGINS": "draft_tp",
        VARIABLE: given.to_json(),
        "HF_HUB_OFFLINE": "1",
        **ENDS_SOON,
        **nodes.environment(profile),
    }
    asked, meeting = (
        {**profile.server.environment, **(comm.environment if comm else {})},
        (free_port() if len(profile.nodes) > 1 else 0),
    )
    ports = [free_port() if number else port for number, _ in enumerate(profile.nodes)]
    return Launch(
        server,
        port,
        tuple(
            Part(
                node,
                _command(flags | nodes.flags(profile, number, meeting) | {"port": ports[number]}),
                environment
                | (_cpu_environment(profile, number) if profile.engine == "cpu" else {})
                | asked,
                ports[number],
            )
            for number, node in enumerate(profile.nodes)
        ),
        given,
        str(flags["host"]),
    )


def most_at_once(profile: Profile) -> int:
    """The most requests that a run sends a server at once, larger loads of 05_steps apart."""
    return max(profile.workload.concurrency, *plans.PARITY_CONCURRENCY)


def _command(flags: Mapping[str, Any]) -> tuple[str, ...]:
    words = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return tuple(words)


def _cpu_environment(profile: Profile, node: int) -> dict[str, str]:
    # A field for each rank of a node, which SGLang counts by itself on every node
    # (distributed/bootstrap.py:84 init_threads_binding).
    cores, each = sorted(os.sched_getaffinity(0)), profile.ranks_a_node
    return CPU_ENVIRONMENT | {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
            str(cores[rank % len(cores)]) for rank in range(node * each, (node + 1) * each)
        ),
        "PYTHONPATH": os.pathsep.join(
            [*python_path(), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }


def free_port() -> int:
    """A free port below those that Linux hands to outgoing connections, one of which would take it
    before the server is up.

    Raises: ServerFailed when there is none.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((LOCAL, port))
                return port
            except OSError:
                continue
    raise ServerFailed(
        f"no port from {PORTS.start} to {PORTS.stop - 1} is free: name one as server.flags.port"
    )
