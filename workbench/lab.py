"""The lab of one run: its folder, its log, and the loop that measures planned blocks on servers that it owns."""
from __future__ import annotations

import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench import attestation, client, locks, logs, pace, plans, preflight, provenance, recording, runlog, stacks, stopping, verdict
from workbench import server as servers
from workbench.arms import Arm
from workbench.checks import Check
from workbench.errors import BadInput, Hung, ServerFailed
from workbench.plans import Task
from workbench.profile import Profile, load
from workbench.runlog import Block, Failure, Finding, Line, RunLog, Start
from workbench.schedule import Planned
from workbench.server import Server

log = logging.getLogger(__name__)
GIVEN_BACK_WITHIN_S, GIVEN_BACK_BYTES = 30, 64 << 20     # a driver frees a process's memory a moment after its end
TRACES = "traces"      # in a run's folder: one folder an arm
NARRATED = "· "        # marks progress among a notebook's other output, for a terminal that replays it


@dataclass(frozen=True)
class Lab:
    """One run: a profile and the folder that everything measured under it is written to.

    The replay of a recording is a run too, to which nothing is added: no server starts, no finding is computed where one is kept.
    """

    profile: Profile
    folder: Path

    @cached_property
    def provenance(self) -> Mapping[str, Any]:
        kept = self.folder / "provenance.json"
        return json.loads(kept.read_text()) if kept.exists() else {}

    @property
    def recording(self) -> str | None:
        """The name of the recording that this is a replay of; None for a run that was measured here."""
        return self.provenance.get("recording")

    @property
    def records(self) -> list[Line]:
        return runlog.read(self.folder / "runs.jsonl")

    @property
    def verdict(self) -> verdict.Verdict:
        """The verdict of what is in the log now."""
        return verdict.judge(self.profile, self.records, "recorded" if self.recording else "live", self.profile.plan.resolution)

    @cached_property
    def prompts(self) -> Sequence[Mapping[str, Any]]:
        """The workload's prompts: held-out text from a file, or random ids of the target's vocabulary (never for accept claims).

        Raises: BadInput when they cannot be read.
        """
        if self.recording:
            return json.loads((self.folder / "prompts.json").read_text())
        try:
            if self.profile.workload.prompts != "random":
                return json.loads(Path(self.profile.workload.prompts).read_text())
            size = json.loads((self.profile.pair.target / "config.json").read_text()).get("vocab_size", 1000)
            rng = random.Random(self.profile.plan.seed)
            return [{"id": f"random-{n}", "input_ids": [rng.randrange(3, size) for _ in range(rng.randrange(16, 65))]} for n in range(256)]
        except OSError as error:
            raise BadInput("workload.prompts", f"cannot be read ({error.strerror})", 'give a JSON file of {"id", "input_ids"}, or random') from None

    @property
    def longest_prompt(self) -> int:
        """Tokens of the workload's longest prompt."""
        return max((len(prompt["input_ids"]) for prompt in self.prompts), default=0)

    def preflight(self) -> list[Check]:
        """The preflight of this profile, kept in the log; of a recording the one that it was measured under, empty where none was kept."""
        if self.recording:
            return [Check(**check) for check in self.finding("preflight") or ()]
        found = preflight.check(self.profile)
        self.find("baseline", "preflight", [vars(check) for check in found])
        return found

    def find(self, experiment: str, name: str, value: Any) -> Any:
        """Keep a notebook's computed answer in the log, once; returns what the log holds. Nothing is added to a recording."""
        kept = next((r for r in self.records if isinstance(r, Finding) and (r.experiment, r.name) == (experiment, name)), None)
        if kept is not None:
            return kept.value
        if not self.recording:
            with RunLog(self.folder / "runs.jsonl") as file:
                file.append(Finding(experiment=experiment, name=name, time=_now(), value=value))
        return value

    def finding(self, name: str) -> Any:
        """The value of a finding; None when no notebook has found it."""
        return next((r.value for r in self.records if isinstance(r, Finding) and r.name == name), None)

    def measure(self, plan: Sequence[Task] | Callable[[Sequence[Line]], Sequence[Task]]) -> None:
        """Run the planned blocks that are not in the log yet, each on a server that serves its arm.

        plan: tasks, or a function that gives all those that the log has decided on; it is asked again when they are done, until it gives
            no more. A function of the log alone decides the same in a resumed run.
        Raises: BadInput from the preflight, or while another run holds the GPUs; ServerFailed when a server does not start, hangs or dies:
            what was measured stays in the log, and so does the failure; WorkbenchError when a recording does not hold the experiment's
            blocks. Where the server of an optional task fails, its arms are left out instead; with ``plan.on_failure: go_on`` so is any arm
            that fails (all arms of a server that does not start), unless nothing is measured then.
        """
        decide = plan if callable(plan) else lambda _: plan
        if self.recording:
            for experiment in dict.fromkeys(task.planned.experiment for task in decide(self.records)):
                recording.refuse_absent(self.recording, self.provenance["blocks"], self.records, experiment)
            return
        if not self.left(tasks := decide(self.records)):
            return
        rule = None if callable(plan) else stopping.rule(self.profile, tasks)
        preflight.refuse(preflight.check(self.profile, [Arm.parse(name) for name in dict.fromkeys(task.planned.arm for task in tasks)]))
        if rule:
            self.find(rule.experiment, stopping.CHECKPOINTS, {"looks": list(rule.checkpoints.looks)})
        with locks.held(self.profile, self.folder) as held, servers.imported_once(self.profile), RunLog(self.folder / "runs.jsonl") as file, \
                _gpus_given_back(self.profile, file), _Bench(self, file, held) as bench:
            while left := self.left(tasks := decide(self.records)):
                bench.plan(tasks, [task for _, task in left])
                if not self._measure(bench, file, left, tasks, rule):
                    break
            if bench.failed and not any(isinstance(r, Block) and r.role == "measure" and r.experiment == tasks[0].planned.experiment
                                        for r in self.records):
                raise bench.failed

    def _measure(self, bench: _Bench, file: RunLog, left: Sequence[tuple[int, Task]], tasks: Sequence[Task], rule: stopping.Rule | None) -> bool:
        """Run what is left of these tasks; whether the plan is to be asked again. Raises: ServerFailed."""
        before, old = self.records, len(file.added)         # read once: a long log takes longer to read than a block to run
        for place, (index, task) in enumerate(left):
            now = [*before, *file.added[old:]]
            why = rule.ends(now, task) if rule else "seconds" if stopping.overspent(self.profile, now, tasks, task) else None
            if why:
                about = rule.experiment if rule else task.planned.experiment
                if not any(isinstance(r, Finding) and (r.experiment, r.name) == (about, stopping.STOPPED) for r in now):
                    file.append(Finding(experiment=about, name=stopping.STOPPED, time=_now(), value={"why": why, "blocks_left": len(left) - place}))
                if rule is None:
                    return False
                continue
            rest = [task for _, task in left[place:]]
            log.info("%s: block %d of %d on %s%s", task.planned.experiment, len(tasks) - len(left) + place + 1, len(tasks), task.planned.arm,
                     pace.words(pace.left_s(now, rest, bench.starts_left(rest))))
            try:
                bench.run(index, task)
            except ServerFailed as failure:
                if not bench.goes_on(task, failure):
                    raise
                return True
        return rule is None

    def stopped(self, why: str) -> None:
        """Write down that whoever ran this stopped it, after which block."""
        last = next((r for r in reversed(self.records) if isinstance(r, Block)), None)
        if last is not None and not self.recording:
            with RunLog(self.folder / "runs.jsonl") as file:
                file.append(Failure(experiment=last.experiment, arm=last.arm, time=_now(), what="stopped", reason=f"stopped {why}"))

    def left(self, tasks: Sequence[Task]) -> list[tuple[int, Task]]:
        """The tasks that are not in the log, each with its number; without those of arms that the run goes on without."""
        records = self.records
        done = {(r.experiment, r.block) for r in records if isinstance(r, Block)}
        out = {(r.experiment, r.arm) for r in records if isinstance(r, Failure)
               and (r.what == "setting" or self.profile.plan.on_failure == "go_on" and r.what != "stopped")}
        return [(number, task) for number, task in self.numbered(tasks) if (task.planned.experiment, number) not in done
                and (task.planned.experiment, task.planned.arm) not in out]

    @staticmethod
    def numbered(tasks: Sequence[Task]) -> list[tuple[int, Task]]:
        """Each task with its number in its experiment, by which the log knows its block."""
        numbers: Counter[str] = Counter()
        found = []
        for task in tasks:
            found.append((numbers[task.planned.experiment], task))
            numbers[task.planned.experiment] += 1
        return found


def open_lab(profile: str | Path, folder: str | Path, changes: Mapping[str, Any] | None = None, command: Sequence[str] = ()) -> Lab:
    """The lab of a run's folder; made, with its provenance, when it is not there yet. command: what the person typed.

    profile: a name or a file, or ``recorded:NAME``, which lays the recording out in the folder.
    Raises: BadInput for a bad profile or change, or when the folder holds a run under another profile.
    """
    _narrate()
    path = Path(folder)
    if str(profile).startswith(recording.PREFIX):
        if changes:
            raise BadInput("-p", "changes a setting that was recorded", "leave it out, or replay a profile instead of a recording")
        recording.lay_out(str(profile).removeprefix(recording.PREFIX), path)
        profile = path / "profile.json"
    chosen = load(profile, dict(changes or {}))
    kept = path / "profile.json"
    if kept.exists():
        if Profile.model_validate_json(kept.read_text()) != chosen:          # a field that came later has its default in an older run
            raise BadInput("out", f"{path.name} holds a run under another profile or other parameters", "give another --out or the same ones")
    else:
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "provenance.json").write_text(json.dumps(provenance.collect(chosen, command), indent=1))
            kept.write_text(chosen.model_dump_json(indent=1))
        except OSError as error:
            raise BadInput("out", f"{path.name} cannot be written ({error.strerror})", "give a writable folder with --out") from None
    found = Lab(chosen, path)
    if found.recording:
        log.info("%s%s: %s Nothing is measured here.", recording.PREFIX, found.recording, provenance.sentence(found.provenance))
    return found


def reopen(folder: Path) -> Lab:
    """The lab of a finished or interrupted run.

    Raises: BadInput when the folder holds no run.
    """
    kept = Path(folder) / "profile.json"
    if not kept.exists():
        raise BadInput("DIR", f"{Path(folder).name} holds no run", "give the folder of a replay, e.g. one under outputs/")
    return Lab(Profile.model_validate_json(kept.read_text()), Path(folder))


def _narrate() -> None:
    """Progress as text in a notebook, whose kernel shows nothing below a warning; a program that set up its logging keeps it."""
    ours = logging.getLogger("workbench")
    if not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter(f"{NARRATED}%(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)


@contextmanager
def _gpus_given_back(profile: Profile, file: RunLog) -> Iterator[None]:
    """Write down each GPU's free memory before the first server and after the last: workers that outlive a server keep theirs."""
    before = preflight.gpus() if profile.engine == "cuda" else []
    try:
        yield
    finally:
        if before:
            end, back = time.monotonic() + GIVEN_BACK_WITHIN_S, False
            while not back and time.monotonic() < end:
                after = preflight.gpus()
                back = all(now >= was - GIVEN_BACK_BYTES for was, now in zip(before, after))
                time.sleep(0 if back else 1)
            if not back:
                log.warning("the GPUs have %s bytes free where %s were before: something of this run is left on them", after, before)
            file.append(Finding(experiment="gpus", name="memory", time=_now(), value={"free_before": before, "free_after": after, "given_back": back}))


class _Bench:
    """The servers in use: each kept while it holds the next block's arm in the same start group, else replaced by the next ones of the plan."""

    def __init__(self, lab: Lab, file: RunLog, held: Sequence[int] = ()):
        self.lab, self.file, self.held = lab, file, held
        self.start = max((r.start for r in lab.records if isinstance(r, Start)), default=-1)
        self.up: dict[tuple, tuple[int, Server]] = {}
        self.server: Server | None = None
        self.number = self.start        # of the server in use
        self.log: Path | None = None
        self.failed: ServerFailed | None = None     # the last failure that the plan went on after
        self.failing: tuple[Arm, ...] = ()      # arms of the server that did not start
        self.cold: dict[tuple, list[tuple[int, Task]]] = {}
        self.most: dict[tuple, int] = {}        # requests at once, by group
        self.stack = ExitStack()

    def plan(self, tasks: Sequence[Task], left: Sequence[Task]) -> None:
        """Which server each task needs. Of all tasks, not of those that are left: a resumed run serves what the first one did."""
        planned: dict[tuple, list[Arm]] = {}
        for task in tasks:
            planned.setdefault(task.group, []).append(Arm.parse(task.planned.arm))
        held = {(group, arm): (group, arms) for group, wanted in planned.items() for arms in plans.together(self.lab.profile, wanted)
                for arm in arms}
        self.needed = {(task.group, arm): held[task.group, arm] for task in tasks for arm in [Arm.parse(task.planned.arm)]}
        # A later part of the plan goes on with the server of its group where that holds what it needs.
        self.up = {next((key for key in self.needed.values() if key[0] == group and set(key[1]) <= set(server.arms)), (group, arms)):
                   (number, server) for (group, arms), (number, server) in self.up.items()}
        self.order = list(dict.fromkeys(self.needed[task.group, Arm.parse(task.planned.arm)] for task in left))
        for task in tasks:
            self.most[task.group] = max(task.concurrency, self.most.get(task.group, 0))
        # What warmed up a server that is gone warms up the one in its place.
        self.cold = {key: [] for key in self.order if key not in self.up}
        for index, task in self.lab.numbered(tasks):
            key = self.needed[task.group, Arm.parse(task.planned.arm)]
            if task.planned.role == "warmup" and task not in left and key in self.cold:
                self.cold[key].append((index, task))

    def starts_left(self, left: Sequence[Task]) -> int:
        """Servers that these tasks need and that are not up."""
        return len({self.needed[task.group, Arm.parse(task.planned.arm)] for task in left} - self.up.keys())

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.__exit__(*error)

    def run(self, index: int, task: Task) -> None:
        """Measure one block into the log. A server that a resumed run starts again is warmed up again first."""
        said, again = self._reach(task), self.cold.pop(self.needed[task.group, Arm.parse(task.planned.arm)], [])
        for warmup in again:
            self._block(*warmup, self._reach(warmup[1]))
        self._block(index, task, self._reach(task) if again else said)

    def _block(self, index: int, task: Task, said: Mapping[str, Any]) -> None:
        planned, arm, profile = task.planned, Arm.parse(task.planned.arm), self.lab.profile
        before, asked = said["counts"], profile.speculation.of(arm)
        begun, at = time.perf_counter(), _now()
        with self._profiled(planned) if planned.role == "trace" else nullcontext():
            requests = client.send(self.server.url, [self.lab.prompts[i] for i in planned.prompts], concurrency=task.concurrency,
                                   max_new_tokens=task.max_new_tokens, deadline_s=profile.server.token_within_s, alive=self.server.alive)
        seconds = time.perf_counter() - begun
        said = client.server_info(self.server.url)["draft_tp"]
        rounds, collectives, spent, timed = _difference(said["counts"], before)
        faults = [*self.server.unattested, *attestation.not_in_force(arm, said["in_force"], profile.tp, asked),
                  *attestation.miscounted(arm, asked, requests, rounds, _less(said["counts"]["verified"], before["verified"]))]
        if faults:
            log.warning("block %d of %s is not attested: %s", index, arm.name, "; ".join(faults))
        self.file.append(Block(
            block=index, experiment=planned.experiment, role=planned.role, arm=planned.arm, start=self.number, pair=planned.pair,
            position=planned.position, seed=planned.seed, concurrency=task.concurrency, time=at, seconds=seconds, server=said["server"],
            arm_in_force=said["arm"] if arm.speculates or said["arm"] != "none" else arm.configuration.name, attested=not faults,
            prompts_from="random" if profile.workload.prompts == "random" else "heldout", requests=tuple(requests),
            rounds=rounds, collectives=collectives, stage_seconds=spent, stage_timed=timed))

    @contextmanager
    def _profiled(self, planned: Planned) -> Iterator[None]:
        """SGLang's profiler over the requests inside; its traces, one file a rank, go to traces/ARM. Without them, why is a finding."""
        refused = client.start_profile(self.server.url, self.lab.folder / TRACES / planned.arm, self.lab.profile.engine)
        try:
            yield
        finally:
            if refused := refused or client.stop_profile(self.server.url):
                log.warning("%s was not profiled: %s", planned.arm, refused)
                self.file.append(Finding(experiment="cycle", name=f"trace {planned.arm}", time=_now(), value={"why": refused}))

    def _reach(self, task: Task) -> Mapping[str, Any]:
        """The arm in force, by a switch where a server in use holds it and by a start where not; returns the server's own account."""
        arm = Arm.parse(task.planned.arm)
        wanted = self.needed[task.group, arm]
        if wanted not in self.up:
            self._restart(self.order.index(wanted), task.planned.experiment)
        self.number, self.server = self.up[wanted]
        self.log = self.server.log
        said = client.server_info(self.server.url)["draft_tp"]
        if said["arm"] == (arm.name if arm.speculates else "none"):
            return said
        return client.switch(self.server.url, arm.name, self.lab.profile.server.token_within_s)

    def _restart(self, first: int, experiment: str) -> None:
        """End the servers in use and start the plan's next ones, as many at once as the profile allows: their starts overlap."""
        self.stack.close()
        self.up, self.server, self.failing = {}, None, ()
        chosen = self.order[first:first + self.lab.profile.server.at_once]
        numbers = [self.start + place for place, _ in enumerate(chosen, 1)]
        self.start += len(chosen)
        if len(chosen) == 1:                # without a thread, which an interrupt would wait for
            found = [self._serve(numbers[0], chosen[0])]
        else:
            with ThreadPoolExecutor(len(chosen)) as pool:
                found = list(pool.map(self._serve, numbers, chosen))
        for key, number, server in zip(chosen, numbers, found):
            self._keep(key, number, server, experiment)

    def _serve(self, number: int, needed: tuple) -> Server:
        group, arms = needed
        context = servers.serve(self.lab.profile, arms, self._log(number, arms), self.most[group], locks=self.held)
        try:
            server = context.__enter__()
        except ServerFailed:
            self.log, self.failing = self._log(number, arms), arms
            raise
        self.stack.push(context)            # one that is up is ended with the others, also where another does not start
        return server

    def _log(self, number: int, arms: tuple[Arm, ...]) -> Path:
        return self.lab.folder / "logs" / f"{number:03d}-{arms[0].name}{'-and-others' if arms[1:] else ''}.log"

    def _keep(self, key: tuple, number: int, server: Server, experiment: str) -> None:
        names = tuple(arm.name for arm in server.arms)
        self.up[key] = number, server
        self.file.append(Start(start=number, experiment=experiment, arms=names, time=_now(), seconds=server.seconds,
                               server=server.launch.server, attestation=server.attestation, **servers.describe(server.launch)))
        if server.unattested:
            log.warning("%s: not attested: %s", ", ".join(names), "; ".join(server.unattested))
        log.info("%s: up after %.0f s", ", ".join(names), server.seconds)

    def goes_on(self, task: Task, failure: ServerFailed) -> bool:
        """Write a failure down. Whether the plan goes on, which it does without the arms of a server that failed where they are optional."""
        found, arm = self._failure(task, failure), Arm.parse(task.planned.arm)
        failing, what = self.failing or (self.server.arms if self.server else ()), "setting"
        if self.lab.profile.plan.on_failure == "go_on" and not task.optional:
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
        if isinstance(failure, Hung) and self.server:       # while its processes live
            text = f"{text} ({stacks.save(self.server.launch.server, self.server.log)})"
        first = self.log and logs.first_failure(self.log) or ""
        what = "disagreed" if "drafted another tree" in first else "hung" if isinstance(failure, Hung) else \
            "start" if self.server is None else "block"
        reason = text.splitlines()[0] + (f" ({first.splitlines()[-1]})" if first and first not in text else "")
        return Failure(experiment=task.planned.experiment, arm=task.planned.arm, time=_now(), what=what, reason=logs.clean(reason),
                       log_tail=logs.tail(self.log) if self.log else ())


def _difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[dict, dict, dict, dict]:
    """The server's counts over a block: rounds by stage, collectives by stage and kind, seconds by stage, rounds timed by stage."""
    collectives = {stage: _less(kinds, before["collectives"].get(stage, {})) for stage, kinds in after["collectives"].items()}
    rounds = _less(after["rounds"], before["rounds"])
    # A stage that ran and is listed without a collective made none; one that is not listed was not counted.
    return (rounds, {stage: kinds for stage, kinds in collectives.items() if kinds or stage in rounds},
            _less(after["seconds"], before["seconds"]), _less(after["timed"], before["timed"]))


def _less(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value - old.get(key, 0) for key, value in new.items() if value != old.get(key, 0)}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
