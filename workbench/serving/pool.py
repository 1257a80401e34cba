"""The servers in use during a run: which are up, which arm is active, and one block measured on
them into the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from workbench.experiment import plans, runlog
from workbench.experiment.arms import Arm
from workbench.experiment.errors import Hung, ServerFailed
from workbench.experiment.plans import Task
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Failure, Finding, RunLog, Start, now
from workbench.experiment.schedule import Planned
from workbench.serving import attestation, client, faults, server_log, stacks
from workbench.serving import server as servers
from workbench.serving.faults import Cause
from workbench.serving.server import Server

log = logging.getLogger(__name__)
TRACES = "traces"  # in a run's folder: one folder an arm


class Pool:
    """The servers in use: each kept while it holds the next block's arm in the same start group,
    else replaced by the next ones of the plan.

    A context manager, at whose end all of them end. folder: of the run; file: its log, open; held:
    descriptors of the locks on GPUs, which the servers' supervisors hold on to.
    """

    def __init__(
        self,
        profile: Profile,
        prompts: Sequence[Mapping[str, Any]],
        folder: Path,
        file: RunLog,
        held: Sequence[int] = (),
    ):
        self.profile = profile
        self.prompts = prompts
        self.folder = folder
        self.file = file
        self.held = held
        self.start = max(
            (r.start for r in runlog.read(folder / "runs.jsonl") if isinstance(r, Start)),
            default=-1,
        )
        self.up: dict[tuple, tuple[int, Server]] = {}
        self.server: Server | None = None
        self.number = self.start  # of the server in use
        self.log: Path | None = None
        self.failed: ServerFailed | None = None  # the last failure that the plan went on after
        self.failing: tuple[Arm, ...] = ()  # arms of the server that did not start
        self.cold: dict[tuple, list[tuple[int, Task]]] = {}
        self.max_concurrency: dict[tuple, int] = {}  # by group
        self.stack = ExitStack()

    def plan(self, tasks: Sequence[Task], left: Sequence[Task]) -> None:
        """Which server each task needs. Of all tasks, not of those that are left: a resumed run
        serves what the first one did.
        """
        planned: dict[tuple, list[Arm]] = {}
        for task in tasks:
            planned.setdefault(task.group, []).append(Arm.parse(task.planned.arm))
        held = {
            (group, arm): (group, arms)
            for group, wanted in planned.items()
            for arms in plans.together(self.profile, wanted)
            for arm in arms
        }
        self.needed = {
            (task.group, arm): held[task.group, arm]
            for task in tasks
            for arm in [Arm.parse(task.planned.arm)]
        }
        # A later part of the plan goes on with the server of its group where that holds what it
        # needs.
        self.up = {
            next(
                (
                    key
                    for key in self.needed.values()
                    if key[0] == group and set(key[1]) <= set(server.arms)
                ),
                (group, arms),
            ): (number, server)
            for (group, arms), (number, server) in self.up.items()
        }
        self.order = list(
            dict.fromkeys(self.needed[task.group, Arm.parse(task.planned.arm)] for task in left)
        )
        for task in tasks:
            largest = self.max_concurrency.get(task.group, 0)
            self.max_concurrency[task.group] = max(task.concurrency, largest)
        # What warmed up a server that is gone warms up the one in its place.
        self.cold = {key: [] for key in self.order if key not in self.up}
        for index, task in plans.numbered(tasks):
            key = self.needed[task.group, Arm.parse(task.planned.arm)]
            if task.planned.role == "warmup" and task not in left and key in self.cold:
                self.cold[key].append((index, task))

    def starts_left(self, left: Sequence[Task]) -> int:
        """Servers that these tasks need and that are not up."""
        return len(
            {self.needed[task.group, Arm.parse(task.planned.arm)] for task in left} - self.up.keys()
        )

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.__exit__(*error)

    def run(self, index: int, task: Task) -> None:
        """Measure one block into the log. A server that a resumed run starts again is warmed up
        again first.
        """
        said = self._reach(task)
        again = self.cold.pop(self.needed[task.group, Arm.parse(task.planned.arm)], [])
        for warmup in again:
            self._block(*warmup, self._reach(warmup[1]))
        self._block(index, task, self._reach(task) if again else said)

    def _block(self, index: int, task: Task, said: Mapping[str, Any]) -> None:
        planned, arm, profile = task.planned, Arm.parse(task.planned.arm), self.profile
        before, asked = said["counts"], profile.speculation.of(arm)
        begun, at = time.perf_counter(), now()
        with self._profiled(planned) if planned.role == "trace" else nullcontext():
            requests = client.send(
                self.server.url,
                [self.prompts[i] for i in planned.prompts],
                concurrency=task.concurrency,
                max_new_tokens=task.max_new_tokens,
                deadline_s=profile.server.token_within_s,
                alive=self.server.alive,
            )
        seconds = time.perf_counter() - begun
        said = client.server_info(self.server.url)["draft_tp"]
        rounds, collectives, spent, timed = _difference(said["counts"], before)
        inactive = [
            *self.server.unattested,
            *attestation.inactive_on(arm, said["active"], profile.tp, asked),
            *attestation.miscounted(
                arm, asked, requests, rounds, _less(said["counts"]["verified"], before["verified"])
            ),
        ]
        if inactive:
            log.warning("block %d of %s is not attested: %s", index, arm.name, "; ".join(inactive))
        self.file.append(
            Block(
                block=index,
                experiment=planned.experiment,
                role=planned.role,
                arm=planned.arm,
                start=self.number,
                pair=planned.pair,
                position=planned.position,
                seed=planned.seed,
                concurrency=task.concurrency,
                time=at,
                seconds=seconds,
                server=said["server"],
                arm_in_force=(
                    said["arm"]
                    if arm.speculates or said["arm"] != "none"
                    else arm.configuration.name
                ),
                attested=not inactive,
                prompts_from="random" if profile.workload.prompts == "random" else "heldout",
                requests=tuple(requests),
                rounds=rounds,
                collectives=collectives,
                stage_seconds=spent,
                stage_timed=timed,
                load=task.load,
            )
        )

    @contextmanager
    def _profiled(self, planned: Planned) -> Iterator[None]:
        """SGLang's profiler over the requests inside; its traces, one file a rank, go to
        traces/ARM. Without them, why is a finding.
        """
        refused = client.start_profile(
            self.server.url, self.folder / TRACES / planned.arm, self.profile.engine
        )
        try:
            yield
        finally:
            if refused := refused or client.stop_profile(self.server.url):
                log.warning("%s was not profiled: %s", planned.arm, refused)
                self.file.append(
                    Finding(
                        experiment="cycle",
                        name=f"trace {planned.arm}",
                        time=now(),
                        value={"why": refused},
                    )
                )

    def _reach(self, task: Task) -> Mapping[str, Any]:
        """The active arm, by a switch where a server in use holds it and by a start where not;
        returns the server's own account.
        """
        arm = Arm.parse(task.planned.arm)
        wanted = self.needed[task.group, arm]
        if wanted not in self.up:
            self._restart(self.order.index(wanted), task.planned.experiment)
        self.number, self.server = self.up[wanted]
        self.log = self.server.log
        said = client.server_info(self.server.url)["draft_tp"]
        if said["arm"] == (arm.name if arm.speculates else "none"):
            return said
        return client.switch(self.server.url, arm.name, self.profile.server.token_within_s)

    def _restart(self, first: int, experiment: str) -> None:
        """End the servers in use and start the plan's next ones, as many at once as the profile
        allows: their starts overlap.
        """
        self.stack.close()
        self.up, self.server, self.failing = {}, None, ()
        chosen = self.order[first : first + self.profile.server.at_once]
        numbers = [self.start + place for place, _ in enumerate(chosen, 1)]
        self.start += len(chosen)
        if len(chosen) == 1:  # without a thread, which an interrupt would wait for
            found = [self._serve(numbers[0], chosen[0])]
        else:
            with ThreadPoolExecutor(len(chosen)) as pool:
                found = list(pool.map(self._serve, numbers, chosen))
        for key, number, server in zip(chosen, numbers, found):
            self._keep(key, number, server, experiment)

    def _serve(self, number: int, needed: tuple) -> Server:
        group, arms = needed
        at_once = self.max_concurrency[group]
        context = servers.serve(
            self.profile, arms, self._log(number, arms), at_once, locks=self.held
        )
        try:
            server = context.__enter__()
        except ServerFailed:
            self.log, self.failing = self._log(number, arms), arms
            raise
        # One that is up is ended with the others, also where another does not start.
        self.stack.push(context)
        return server

    def _log(self, number: int, arms: tuple[Arm, ...]) -> Path:
        return (
            self.folder
            / "logs"
            / f"{number:03d}-{arms[0].name}{'-and-others' if arms[1:] else ''}.log"
        )

    def _keep(self, key: tuple, number: int, server: Server, experiment: str) -> None:
        names = tuple(arm.name for arm in server.arms)
        self.up[key] = number, server
        self.file.append(
            Start(
                start=number,
                experiment=experiment,
                arms=names,
                time=now(),
                seconds=server.seconds,
                server=server.launch.server,
                attestation=server.attestation,
                **servers.describe(server.launch),
            )
        )
        if server.unattested:
            log.warning("%s: not attested: %s", ", ".join(names), "; ".join(server.unattested))
        log.info("%s: up after %.0f s", ", ".join(names), server.seconds)

    def goes_on(self, task: Task, failure: ServerFailed) -> bool:
        """Write a failure down. Whether the plan goes on, which it does without the arms of a
        server that failed where they are optional.
        """
        found, arm = self._failure(task, failure), Arm.parse(task.planned.arm)
        failing, what = self.failing or (self.server.arms if self.server else ()), "setting"
        if self.profile.plan.on_failure == "go_on" and not task.optional:
            failing, what, self.failed = self.failing or (arm,), found.what, failure
        elif not task.optional or arm not in failing:
            failing = ()
        if not failing:
            self.file.append(found)
            return False
        for arm in failing:
            self.file.append(found.model_copy(update={"arm": arm.name, "what": what}))
        log.warning("%s: left out: %s", ", ".join(arm.name for arm in failing), found.reason)
        self.stack.close()
        self.up, self.server = {}, None
        return True

    def _failure(self, task: Task, failure: ServerFailed) -> Failure:
        text = str(failure)
        if isinstance(failure, Hung) and self.server:  # while its processes live
            text = f"{text} ({stacks.save(self.server.launch.server, self.server.log)})"
        fault = faults.first(self.log) if self.log else None
        if fault and fault.cause is Cause.DISAGREED:
            what = "disagreed"
        elif isinstance(failure, Hung):
            what = "hung"
        else:
            what = "start" if self.server is None else "block"
        reason = text.splitlines()[0]
        if fault and fault.text not in text:
            reason += f" ({fault.sentence})"
        return Failure(
            experiment=task.planned.experiment,
            arm=task.planned.arm,
            time=now(),
            what=what,
            reason=server_log.clean(reason),
            log_tail=server_log.tail(self.log) if self.log else (),
        )


def _difference(
    after: Mapping[str, Any], before: Mapping[str, Any]
) -> tuple[dict, dict, dict, dict]:
    """The server's counts over a block: rounds by stage, collectives by stage and kind, seconds by
    stage, rounds timed by stage.
    """
    collectives = {
        stage: _less(kinds, before["collectives"].get(stage, {}))
        for stage, kinds in after["collectives"].items()
    }
    rounds = _less(after["rounds"], before["rounds"])
    # A stage that ran and is listed without a collective made none; one that is not listed was not
    # counted.
    return (
        rounds,
        {stage: kinds for stage, kinds in collectives.items() if kinds or stage in rounds},
        _less(after["seconds"], before["seconds"]),
        _less(after["timed"], before["timed"]),
    )


def _less(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value - old.get(key, 0) for key, value in new.items() if value != old.get(key, 0)}
