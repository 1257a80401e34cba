"""One SGLang server: how it is started for an arm, when it is ready, whose it is, and that all of
it ends.
"""

from __future__ import annotations

import logging
import os
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

from workbench.experiment.arms import Arm
from workbench.experiment.errors import Hung, ServerFailed
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import ROOT
from workbench.experiment.runlog import NodeStart
from workbench.serving import (
    attestation,
    client,
    faults,
    forkserver,
    nodes,
    server_log,
    stacks,
    supervisor,
)
from workbench.serving.faults import Fault
from workbench.serving.launch_command import LOCAL, Launch, Part, free_port, plan

log = logging.getLogger(__name__)
ENDED_WITHIN_S = 90


@dataclass(frozen=True)
class Server:
    """A server that is up: it answered a real completion. arms: those it serves, the first active
    at start.

    unattested: why it does not hold them as ordered on every rank; empty when it does.
    alive: whether its launchers and supervisors still run.
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
    """Own a server of one or several arms: started on all of its nodes, ready, checked; whatever
    happens inside, all of its processes end.

    logfile: of the first node; a further one's lies beside it under its name.
    locks: file descriptors that the supervisors here hold as long as processes of the server may
        live.
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
    supervisors: dict[Path, subprocess.Popen] = {}

    def alive() -> bool:
        return all(kept_by.poll() is None for kept_by in supervisors.values())

    try:
        for number, part in enumerate(launch.parts):
            log_ = logfile.with_name(f"{logfile.stem}-{part.node.name}.log") if number else logfile
            supervisors[log_] = _keep(launch.server, part, log_, launch.host, locks)
        _wait_ready(launch, supervisors, alive, profile.server.ready_within_s)
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
        unattested += attestation.launcher_faults(profile, said.get("launcher"))
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
        _release(list(supervisors.values()), launch)


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
    command, environment = nodes.supervisor_command(
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
    supervisors: Mapping[Path, subprocess.Popen],
    alive: Callable[[], bool],
    deadline_s: float,
) -> None:
    """Until a real completion came back: /health can be green while the first use of a communicator
    deadlocks (seen in the field).
    """
    end, logfile = time.monotonic() + deadline_s, next(iter(supervisors))
    while time.monotonic() < end:
        if not alive():
            raise ServerFailed(f"the server died while starting: {_why(launch, supervisors)}")
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
    fault = _first_fault(supervisors)
    why = fault.text if fault else _last(logfile)
    raise ServerFailed(
        f"the server was not ready within {deadline_s:g} s: {why} (raise server.ready_within_s if"
        " it was still loading)"
    )


def _why(launch: Launch, supervisors: Mapping[Path, subprocess.Popen]) -> str:
    """Why a server that has ended did."""
    log_, kept_by = next(
        (log_, kept_by) for log_, kept_by in supervisors.items() if kept_by.poll() is not None
    )
    if kept_by.returncode < 0:
        return f"its supervisor was ended by signal {-kept_by.returncode}, and the server with it"
    if not supervisor.port_is_free(launch.port, launch.host) and any(
        map(faults.port_was_taken, supervisors)
    ):
        return (
            f"port {launch.port} was taken by another process: start again, or name a free one in"
            " server.flags.port"
        )
    if fault := _first_fault(supervisors):
        *before, last = fault.text.splitlines()  # what it came to, then how
        return "\n".join([last, *before])
    return _last(log_)


def _first_fault(logfiles: Iterable[Path]) -> Fault | None:
    return next(filter(None, map(faults.first, logfiles)), None)


def _last(logfile: Path) -> str:
    return "its last lines were\n" + "\n".join(server_log.tail(logfile, 8))


def _release(supervisors: Sequence[subprocess.Popen], launch: Launch) -> None:
    for kept_by in supervisors:  # all at once: a node's ranks wait for those of the others
        with suppress(OSError):
            kept_by.stdin.close()  # the order to end the server
        kept_by.stdin = None
    left = []
    for kept_by in supervisors:
        try:
            said, _ = kept_by.communicate(timeout=ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            kept_by.kill()
            said, _ = kept_by.communicate()
        told = supervisor.account(said)
        if told is None:  # the supervisor itself was ended: its work is left to us
            ended, alive = supervisor.end(launch.server)
            left += alive
            log.warning(
                "a supervisor of server %s was ended before its server; %d processes were ended"
                " here",
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
