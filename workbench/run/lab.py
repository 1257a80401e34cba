"""The lab of one run: its folder, its log, and what it says."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.experiment import findings, plans, runlog
from workbench.experiment.arms import Arm
from workbench.experiment.checks import Check
from workbench.experiment.errors import BadInput
from workbench.experiment.findings import T
from workbench.experiment.plans import Task
from workbench.experiment.profile import Profile, load
from workbench.experiment.runlog import Block, Failure, Finding, Line, RunLog, now
from workbench.judge import levels, stopping, told, verdict
from workbench.judge.findings import PlannedLooks
from workbench.predict import model_shape, preflight
from workbench.run import measuring, provenance, recording

log = logging.getLogger(__name__)
NARRATED = "· "  # marks progress among a notebook's other output, for a terminal that replays it


@dataclass(frozen=True)
class Run:
    """One run: a profile and the folder that everything measured under it is written to.

    The replay of a recording is a run too, to which nothing is added: no server starts, no finding
    is computed where one is kept.
    """

    profile: Profile
    folder: Path

    @cached_property
    def provenance(self) -> Mapping[str, Any]:
        kept = self.folder / "provenance.json"
        return json.loads(kept.read_text()) if kept.exists() else {}

    @property
    def recording(self) -> str | None:
        """The name of the recording that this is a replay of; None for a run that was measured
        here.
        """
        return self.provenance.get("recording")

    @cached_property
    def _log(self) -> runlog.Reader:
        return runlog.Reader(self.folder / "runs.jsonl")

    @property
    def records(self) -> list[Line]:
        """What the log holds now; what was read before is neither read nor checked again."""
        return self._log.records()

    @property
    def verdict(self) -> told.Verdict:
        """The verdict of what is in the log now."""
        return verdict.judge(
            self.profile,
            self.records,
            "recorded" if self.recording else "live",
            self.profile.plan.resolution,
        )

    @cached_property
    def prompts(self) -> Sequence[Mapping[str, Any]]:
        """The workload's prompts: held-out text from a file, or random ids of the target's
        vocabulary (never for accept claims).

        Raises: BadInput when they cannot be read.
        """
        if self.recording:
            return json.loads((self.folder / "prompts.json").read_text())
        try:
            if self.profile.workload.prompts != "random":
                path = Path(self.profile.workload.prompts)
                return json.loads(path.read_text(encoding="utf-8-sig"))
            size = model_shape.vocabulary(self.profile.pair.target, "pair.target")
            rng = random.Random(self.profile.plan.seed)
            return [
                {
                    "id": f"random-{n}",
                    "input_ids": [rng.randrange(3, size) for _ in range(rng.randrange(16, 65))],
                }
                for n in range(256)
            ]
        except OSError as error:
            raise BadInput(
                "workload.prompts",
                f"cannot be read ({error.strerror})",
                'give a JSON file of {"id", "input_ids"}, or random',
            ) from None

    @property
    def longest_prompt(self) -> int:
        """Tokens of the workload's longest prompt."""
        return max((len(prompt["input_ids"]) for prompt in self.prompts), default=0)

    def preflight(self) -> list[Check]:
        """The preflight of this profile, kept in the log; of a recording the one that it was
        measured under, empty where none was kept.
        """
        if self.recording:
            return self.finding("preflight", list[Check]) or []
        found = preflight.check(self.profile)
        self.record_finding("baseline", "preflight", found, list[Check])
        return found

    def record_finding(self, experiment: str, name: str, value: T, kind: Any = None) -> T:
        """Keep a notebook's computed answer in the log, once; returns what the log holds. Nothing
        is added to a recording.

        kind: the type of the value where its class does not say it all, as list[Check].
        """
        kept = next(
            (
                r
                for r in self.records
                if isinstance(r, Finding) and (r.experiment, r.name) == (experiment, name)
            ),
            None,
        )
        if kept is not None:
            return findings.read(kept, kind or type(value))
        if not self.recording:
            with RunLog(self.folder / "runs.jsonl") as file:
                held = findings.plain(value, kind)
                file.append(Finding(experiment=experiment, name=name, time=now(), value=held))
        return value

    def finding(self, name: str, kind: type[T]) -> T | None:
        """The value of a finding; None when no notebook has found it."""
        return next(
            (
                findings.read(r, kind)
                for r in self.records
                if isinstance(r, Finding) and r.name == name
            ),
            None,
        )

    def measure(self, plan: Sequence[Task] | Callable[[Sequence[Line]], Sequence[Task]]) -> None:
        """Run the planned blocks that are not in the log yet, each on a server that serves its arm.

        plan: tasks, or a function that gives all those that the log has decided on; it is asked
            again when they are done, until it gives no more. A function of the log alone decides
            the same in a resumed run.
        Raises: BadInput from the preflight, or while another run holds the GPUs; ServerFailed when
            a server does not start, hangs or dies: what was measured stays in the log, and so does
            the failure; WorkbenchError when a recording does not hold the experiment's blocks.
            Where the server of an optional task fails, its arms are left out instead; with
            ``plan.on_failure: go_on`` so is any arm that fails (all arms of a server that does not
            start), unless nothing is measured then.
        """
        decide = plan if callable(plan) else lambda _: plan
        if self.recording:
            asked = dict.fromkeys(task.planned.experiment for task in decide(self.records))
            expected = self.provenance["blocks"]
            for experiment in asked:
                recording.refuse_absent(self.recording, expected, self.records, experiment)
        elif self.left(tasks := decide(self.records)):
            rule = None if callable(plan) else stopping.rule(self.profile, tasks)
            arms = [Arm.parse(name) for name in plans.arms_of(tasks)]
            preflight.refuse(preflight.check(self.profile, arms))
            if rule and rule.checkpoints:
                looks = PlannedLooks(looks=list(rule.checkpoints.looks))
                self.record_finding(rule.experiment, levels.CHECKPOINTS, looks)
            measuring.measure(self.profile, self.folder, self.prompts, decide, rule)

    def stopped(self, why: str) -> None:
        """Write down that whoever ran this stopped it, after which block."""
        last = next((r for r in reversed(self.records) if isinstance(r, Block)), None)
        if last is not None and not self.recording:
            with RunLog(self.folder / "runs.jsonl") as file:
                file.append(
                    Failure(
                        experiment=last.experiment,
                        arm=last.arm,
                        time=now(),
                        what="stopped",
                        reason=f"stopped {why}",
                    )
                )

    def left(self, tasks: Sequence[Task]) -> list[tuple[int, Task]]:
        """The tasks that are not in the log, each with its number (``plans.left``)."""
        return plans.left(self.profile, self.records, tasks)


def open_lab(
    profile: str | Path,
    folder: str | Path,
    changes: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
) -> Run:
    """The lab of a run's folder; made, with its provenance, when it is not there yet. command: what
    the person typed.

    profile: a name or a file, or ``recorded:NAME``, which lays the recording out in the folder.
    Raises: BadInput for a bad profile or change, or when the folder holds a run under another
        profile.
    """
    _narrate()
    path = Path(folder)
    if str(profile).startswith(recording.PREFIX):
        if changes:
            raise BadInput(
                "-p",
                "changes a setting that was recorded",
                "leave it out, or replay a profile instead of a recording",
            )
        recording.lay_out(str(profile).removeprefix(recording.PREFIX), path)
        profile = path / "profile.json"
    chosen = load(profile, dict(changes or {}))
    kept = path / "profile.json"
    if kept.exists():
        if (
            Profile.model_validate_json(kept.read_text()) != chosen
        ):  # a field that came later has its default in an older run
            raise BadInput(
                "out",
                f"{path.name} holds a run under another profile or other parameters",
                "give another --out or the same ones",
            )
    else:
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "provenance.json").write_text(
                json.dumps(provenance.collect(chosen, command), indent=1)
            )
            kept.write_text(chosen.model_dump_json(indent=1))
        except OSError as error:
            raise BadInput(
                "out",
                f"{path.name} cannot be written ({error.strerror})",
                "give a writable folder with --out",
            ) from None
    found = Run(chosen, path)
    if found.recording:
        log.info(
            "%s%s: %s Nothing is measured here.",
            recording.PREFIX,
            found.recording,
            provenance.sentence(found.provenance),
        )
    return found


def reopen(folder: Path) -> Run:
    """The lab of a finished or interrupted run.

    Raises: BadInput when the folder holds no run.
    """
    kept = Path(folder) / "profile.json"
    if not kept.exists():
        raise BadInput(
            "DIR",
            f"{Path(folder).name} holds no run",
            "give the folder of a replay, e.g. one under outputs/",
        )
    return Run(Profile.model_validate_json(kept.read_text()), Path(folder))


def _narrate() -> None:
    """Progress as text in a notebook, whose kernel shows nothing below a warning; a program that
    set up its logging keeps it.
    """
    ours = logging.getLogger("workbench")
    if not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter(f"{NARRATED}%(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
