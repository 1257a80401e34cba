"""Sweeps without servers: a plan that depends on the log, played block by block with known speeds.
No measurement of anything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import simulated_runs
from simulated_runs import TIME

from workbench.experiment import plans
from workbench.experiment.arms import Arm
from workbench.experiment.plans import Task
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Failure, Line, Start


def play(
    plan: Callable[[Sequence[Line]], list[Task]],
    speed: Callable[[Task], float],
    *,
    noise: float = 0.01,
    spread: float = 0.0,
    failing: Sequence[str] = (),
    records: Sequence[Line] = (),
    most: int = 10**9,
    seed: int = 8,
) -> list[Line]:
    """The log of a plan as Run.measure would write it. speed: how many times as fast as the
    simulated cycle; noise, spread: of a block's and a start's log time; failing: arms whose
    server does not start; most: blocks after which it is interrupted.
    """
    records, group, start, factor = (
        list(records),
        None,
        max((r.start for r in records if isinstance(r, Start)), default=-1),
        1.0,
    )
    while most > 0:
        tasks = plan(records)
        done = {(r.experiment, r.block) for r in records if isinstance(r, Block)}
        out = {(r.experiment, r.arm) for r in records if isinstance(r, Failure)}
        left = [
            (i, t)
            for i, t in plans.numbered(tasks)
            if (t.planned.experiment, i) not in done
            and (t.planned.experiment, t.planned.arm) not in out
        ]
        if not left:
            break
        for i, task in left[:most]:
            p = task.planned
            if p.arm in failing:
                records += [
                    Failure(
                        experiment=p.experiment,
                        arm=p.arm,
                        time=TIME,
                        what="setting",
                        reason="it hangs",
                    )
                ]
                break
            if task.group != group:
                group, start = task.group, start + 1
                factor = math.exp(spread * random.Random(f"{seed} start {task.group}").gauss(0, 1))
                held = tuple(dict.fromkeys(t.planned.arm for t in tasks if t.group == group))
                records.append(
                    Start(
                        start=start,
                        experiment=p.experiment,
                        arms=held,
                        time=TIME,
                        seconds=15.0,
                        command=("simulated",),
                        environment={},
                        server=f"s{start}",
                        attestation=({"rank": 0}, {"rank": 1}),
                    )
                )
            own = math.exp(noise * random.Random(f"{seed} {p.experiment} {i}").gauss(0, 1))
            block = simulated_runs.block(
                p, i, factor * own / speed(task), 0.0, task.concurrency, start
            )
            records.append(block.model_copy(update={"start": start, "server": f"s{start}"}))
            most -= 1
    return records


def steps_of(profile: Profile, task: Task) -> int:
    arm = Arm.parse(task.planned.arm)
    return profile.speculation.of(arm).steps if arm.speculates else 0
