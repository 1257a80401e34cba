"""One SGLang server: how it is started for an arm, when it is ready, whose it is, and that all of
it ends.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from workbench.engine.cpu.paths import python_path
from workbench.engine.orders import VARIABLE, Orders, Placement
from workbench.experiment import communication, plans
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput, Hung, ServerFailed
from workbench.experiment.profile import ROOT, Node, Profile
from workbench.experiment.runlog import NodeStart
from workbench.serving import attestation, client, forkserver, nodes, server_log, stacks, supervisor

log = logging.getLogger(__name__)
LOCAL, EVERYWHERE = (
    "127.0.0.1",
    (
        "0.0.0.0",
        "::",
    ),
)  # a server listens on this machine alone unless the profile names a host
ENDED_WITHIN_S = 90
PORTS = range(20_000, 32_768)  # from there on are the ephemeral ones (net.ipv4.ip_local_port_range)
# After a worker's death SGLang waits a minute for core dumps that nothing writes
# (managers/tokenizer_manager.py:3495), and its requests with it.
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


@dataclass(frozen=True)
class Server:
    """A server that is up: it answered a real completion. arms: those it serves, the first in force
    at start.

    unattested: why it does not hold them as ordered on every rank; empty when it does.
    alive: whether its launchers and keepers still run.
    """

    launch: Launch
    arms: tuple[Arm, ...]
    seconds: float
    log: Path
    attestation: tuple[dict[str, Any], ...]
    unattested: tuple[str, ...]
    alive: Callable[[], bool]

    @property
    def url(self) -> str:
        return self.launch.url


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
        else {
            "cuda-graph-max-bs-decode": max(
                concurrency, profile.workload.concurrency, *plans.PARITY_CONCURRENCY
            )
        }
    )
    flags |= profile.flags | dict(comm.flags if comm else {})
    if profile.server.trust_remote_code:
        flags["trust-remote-code"] = True
    if held:
        # The largest of all arms: buffers are sized by them (managers/overlap_utils.py:373,
        # runtime_context.py:1982).
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


def _command(flags: Mapping[str, Any]) -> tuple[str, ...]:
    words = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return tuple(words)


def _cpu_environment(profile: Profile, node: int) -> dict[str, str]:
    # A field for each rank of a node, which SGLang counts by itself on every node
    # (distributed/bootstrap.py:85).
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


@contextmanager
def serve(
    profile: Profile,
    arms: Arm | Sequence[Arm],
    logfile: Path,
    concurrency: int = 0,
    *,
    locks: Sequence[int] = (),
    **orders: Any,
) -> Iterator[Server]:
    """Own a server of one or several arms: started on all of its nodes, ready, attested; whatever
    happens inside, all of its processes end.

    logfile: of the first node; a further one's lies beside it under its name.
    locks: file descriptors that the keepers here hold as long as processes of the server may live.
    Raises: BadInput for arms that one server cannot hold; ServerFailed when it dies, is not ready
        within the profile's deadline (Hung, where it takes requests), or somebody else answers on
        its port. The message carries the log's first failure.
    """
    arms = (arms,) if isinstance(arms, Arm) else tuple(arms)
    launch = plan(
        profile,
        arms,
        port=int(profile.flag("port", 0)) or free_port(),
        server=uuid.uuid4().hex[:12],
        concurrency=concurrency,
        **orders,
    )
    logfile.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    keepers: dict[Path, subprocess.Popen] = {}

    def alive() -> bool:
        return all(kept_by.poll() is None for kept_by in keepers.values())

    try:
        for number, part in enumerate(launch.parts):
            log_ = logfile.with_name(f"{logfile.stem}-{part.node.name}.log") if number else logfile
            keepers[log_] = _keep(launch.server, part, log_, launch.host, locks)
        _wait_ready(launch, keepers, alive, profile.server.ready_within_s)
        said = client.server_info(launch.url)["draft_tp"]
        if said.get("server") != launch.server:
            raise ServerFailed(
                f"another server answered on port {launch.port}: stop it, or free the port"
            )
        unattested = [
            fault
            for arm in arms
            for fault in attestation.faults(
                arm,
                said["attestation"],
                profile.tp,
                profile.speculation.of(arm).agreement,
                profile.pair.draft if arm.speculates else None,
                len(profile.nodes),
            )
        ]
        unattested += attestation.communication_faults(arms[0].comm, said["attestation"])
        yield Server(
            launch,
            arms,
            time.monotonic() - begun,
            logfile,
            tuple(said["attestation"]),
            tuple(dict.fromkeys(unattested)),
            alive,
        )
    finally:
        _release(list(keepers.values()), launch)


@contextmanager
def imported_once(profile: Profile) -> Iterator[None]:
    """Inside, the CPU servers of this process and of those it starts share one import of SGLang; on
    GPUs there is nothing to share.
    """
    if profile.engine == "cpu":
        with forkserver.owned(plan(profile, Arm.parse("none"), port=1, server="").environment):
            yield
    else:
        yield


def _keep(
    server: str, part: Part, logfile: Path, host: str = LOCAL, locks: Sequence[int] = ()
) -> subprocess.Popen | forkserver.Kept:
    command, environment = nodes.keeper(
        part.node,
        part.environment,
        (server, str(logfile.resolve()), f"{host}:{part.port}", *part.command),
    )
    if (
        not part.node.reach
        and not locks
        and (kept_by := forkserver.keep(command, environment, ROOT))
    ):
        return kept_by
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        pass_fds=tuple(locks),
        env={**os.environ, **environment},
    )


def describe(launch: Launch) -> dict[str, Any]:
    """What a Start says of a launch: {"command", "environment", "further"}, without this machine's
    folders.
    """

    def public(text: str) -> str:
        return server_log.clean(str(text).replace(sys.executable, "python").replace(str(ROOT), "."))

    def described(part: Part) -> dict[str, Any]:
        return {
            "command": tuple(map(public, part.command)),
            "environment": {
                key: server_log.HIDDEN if server_log.is_secret(key) else public(value)
                for key, value in part.environment.items()
            },
        }

    first, *others = launch.parts
    return described(first) | {
        "further": tuple(NodeStart(name=part.node.name, **described(part)) for part in others)
    }


def _wait_ready(
    launch: Launch,
    keepers: Mapping[Path, subprocess.Popen],
    alive: Callable[[], bool],
    deadline_s: float,
) -> None:
    """Until a real completion came back: /health can be green while the first use of a communicator
    deadlocks (field report F26).
    """
    end, logfile = time.monotonic() + deadline_s, next(iter(keepers))
    while time.monotonic() < end:
        if not alive():
            raise ServerFailed(f"the server died while starting: {_why(launch, keepers)}")
        try:
            with socket.create_connection((urlsplit(launch.url).hostname, launch.port), timeout=1):
                pass
        except OSError:
            time.sleep(0.2)
            continue
        left = max(1.0, end - time.monotonic())
        try:
            answer = client.send(
                launch.url,
                [{"id": "ready", "input_ids": [1, 2, 3]}],
                concurrency=1,
                max_new_tokens=8,
                deadline_s=left,
                alive=alive,
            )
        except Hung as hung:
            raise Hung(
                f"the server accepts requests but no completion came within {deadline_s:g} s"
                f" ({hung}; {stacks.save(launch.server, logfile)}): {_last(logfile)}"
            ) from None
        except ServerFailed:
            continue  # it died meanwhile
        if answer[0].error is None:
            return
        time.sleep(0.5)
    raise ServerFailed(
        f"the server was not ready within {deadline_s:g} s:"
        f" {_first_failure(keepers) or _last(logfile)} (raise server.ready_within_s if it was still"
        " loading)"
    )


def _why(launch: Launch, keepers: Mapping[Path, subprocess.Popen]) -> str:
    """Why a server that has ended did."""
    log_, kept_by = next(
        (log_, kept_by) for log_, kept_by in keepers.items() if kept_by.poll() is not None
    )
    if kept_by.returncode < 0:
        return f"its keeper was ended by signal {-kept_by.returncode}, and the server with it"
    if not supervisor.port_is_free(launch.port, launch.host) and any(
        "address already in use" in kept.read_text(errors="replace") for kept in keepers
    ):
        return (
            f"port {launch.port} was taken by another process: start again, or name a free one in"
            " server.flags.port"
        )
    if failure := _first_failure(keepers):
        *before, last = failure.splitlines()  # what it came to, then how
        return "\n".join([last, *before])
    return _last(log_)


def _first_failure(logfiles: Iterable[Path]) -> str | None:
    return next(filter(None, map(server_log.first_failure, logfiles)), None)


def _last(logfile: Path) -> str:
    return "its last lines were\n" + "\n".join(server_log.tail(logfile, 8))


def _release(keepers: Sequence[subprocess.Popen], launch: Launch) -> None:
    for kept_by in keepers:  # all at once: a node's ranks wait for those of the others
        with suppress(OSError):
            kept_by.stdin.close()  # the order to end the server
        kept_by.stdin = None
    left = []
    for kept_by in keepers:
        try:
            said, _ = kept_by.communicate(timeout=ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            kept_by.kill()
            said, _ = kept_by.communicate()
        told = supervisor.account(said)
        if told is None:  # the keeper itself was ended: its work is left to us
            ended, alive = supervisor.end(launch.server)
            left += alive
            log.warning(
                "a keeper of server %s was ended before its server; %d processes were ended here",
                launch.server,
                len(ended),
            )
        else:
            left += told["left"]
            if told["gpus_free"] is False:
                log.warning(
                    "the GPUs still list processes of server %s, which have ended: their memory may"
                    " be taken for a while",
                    launch.server,
                )
    if left:
        raise ServerFailed(
            f"processes {left} of server {launch.server} could not be ended: end them by hand"
        )
