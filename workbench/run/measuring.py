"""The loop that measures planned blocks: servers as the plan asks for them, one record a block."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.experiment import plans, runlog
from workbench.experiment.errors import ServerFailed
from workbench.experiment.findings import plain
from workbench.experiment.plans import Task
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Finding, Line, RunLog, now
from workbench.judge import levels, stopping
from workbench.judge.findings import GpuMemory, Stopped, Watched
from workbench.run.ticket import Progress, seen, tell_progress
from workbench.serving import gpu_locks, gpus
from workbench.serving import server as servers
from workbench.serving.pool import Pool

log = logging.getLogger(__name__)
# A driver frees a process's memory a moment after its end.
GIVEN_BACK_WITHIN_S, GIVEN_BACK_BYTES = 30, 64 << 20


def measure(
    profile: Profile,
    folder: Path,
    prompts: Sequence[Mapping[str, Any]],
    decide: Callable[[Sequence[Line]], Sequence[Task]],
    rule: stopping.Rule | None,
) -> None:
    """Run what is left of a plan into the folder's log.

    decide: all tasks that the log has decided on; asked again when they are done.
    rule: when the experiment may end before its plan is spent.
    Raises: as ``Run.measure``.
    """
    reader = runlog.Reader(folder / "runs.jsonl")
    with (
        gpu_locks.held(profile, folder) as held,
        servers.imported_once(profile),
        RunLog(folder / "runs.jsonl") as file,
        gpus_given_back(profile, file),
        Pool(profile, prompts, folder, file, held) as pool,
    ):
        while left := plans.left(profile, reader.records(), tasks := decide(reader.records())):
            pool.plan(tasks, [task for _, task in left])
            if not _run(profile, folder, reader.records(), pool, file, left, tasks, rule):
                break
        about = tasks[0].planned.experiment
        measured = [r for r in reader.records() if isinstance(r, Block) and r.role == "measure"]
        if pool.failed and not any(block.experiment == about for block in measured):
            raise pool.failed


def _run(
    profile: Profile,
    folder: Path,
    before: Sequence[Line],
    pool: Pool,
    file: RunLog,
    left: Sequence[tuple[int, Task]],
    tasks: Sequence[Task],
    rule: stopping.Rule | None,
) -> bool:
    """Run what is left of these tasks; whether the plan is to be asked again.

    before: what the log held before: a long log takes longer to read than a block to run.
    Raises: ServerFailed.
    """
    old = len(file.added)
    for place, (index, task) in enumerate(left):
        known = [*before, *file.added[old:]]
        why = (
            rule.ends(known, task)
            if rule
            else "seconds"
            if stopping.overspent(profile, known, tasks, task)
            else None
        )
        if why:
            about = rule.experiment if rule else task.planned.experiment
            if not any(
                isinstance(r, Finding) and (r.experiment, r.name) == (about, stopping.STOPPED)
                for r in known
            ):
                file.append(
                    Finding(
                        experiment=about,
                        name=stopping.STOPPED,
                        time=now(),
                        value=plain(Stopped(why=why, blocks_left=len(left) - place)),
                    )
                )
            if rule is None:
                return False
            continue
        rest = [task for _, task in left[place:]]
        at = Progress(
            task.planned.experiment,
            len(tasks) - len(left) + place + 1,
            len(tasks),
            task.planned.arm,
            plans.left_s(known, rest, pool.starts_left(rest)),
        )
        tell_progress(folder, at)
        _note_watched(folder, known, file)
        log.info(
            "%s: block %d of %d on %s%s",
            at.experiment,
            at.block,
            at.of,
            at.arm,
            plans.left_words(at.left_s),
        )
        try:
            pool.run(index, task)
        except ServerFailed as failure:
            if not pool.goes_on(task, failure):
                raise
            return True
    return rule is None


def _note_watched(folder: Path, known: Sequence[Line], file: RunLog) -> None:
    """Write down that an experiment's interval was shown while it was measured, once."""
    shown = seen(folder)
    if shown is None or any(
        isinstance(r, Finding) and (r.experiment, r.name) == (shown.experiment, levels.WATCHED_BY)
        for r in known
    ):
        return
    value = plain(Watched(starts=shown.starts))
    file.append(
        Finding(experiment=shown.experiment, name=levels.WATCHED_BY, time=now(), value=value)
    )


@contextmanager
def gpus_given_back(profile: Profile, file: RunLog) -> Iterator[None]:
    """Write down each GPU's free memory before the first server and after the last: workers that
    outlive a server keep theirs.
    """
    before = [gpu.free for gpu in gpus.ours(profile)]
    try:
        yield
    finally:
        if before:
            end, back = time.monotonic() + GIVEN_BACK_WITHIN_S, False
            while not back and time.monotonic() < end:
                after = [gpu.free for gpu in gpus.ours(profile)]
                back = all(free >= was - GIVEN_BACK_BYTES for was, free in zip(before, after))
                time.sleep(0 if back else 1)
            if not back:
                log.warning(
                    "the GPUs have %s bytes free where %s were before: something of this run is"
                    " left on them",
                    after,
                    before,
                )
            file.append(
                Finding(
                    experiment="gpus",
                    name="memory",
                    time=now(),
                    value=plain(GpuMemory(free_before=before, free_after=after, given_back=back)),
                )
            )
