"""Simulated run logs: blocks with a known truth, and the same with one planted defect each. No
measurement of anything.

``python tests/unit/simulated_runs.py`` writes fixtures/refusals/<defect>.jsonl anew; a test holds
the files to this script.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.experiment import schedule
from workbench.experiment.arms import Arm
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import NEGATIVE, Block, Failure, Finding, Line, Request, Start
from workbench.experiment.schedule import Planned

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "refusals"
EXPERIMENT, TIME, TOKENS = "draft_tp", "2026-01-01T00:00:00Z", 24
CYCLE_S = {"none": 0.010, "shared": 0.025}  # own-N and replicas: as shared, times 1 - speedup
COLLECTIVES = {
    "shared": {"all_reduce": 6, "all_gather": 2},
    "own": {"broadcast": 1},
}  # of the draft stage, a round


def profile(engine: str = "cpu", **changes) -> Profile:
    return Profile(
        **{
            "name": "simulated",
            "engine": engine,
            "pair": {"target": "fixtures/none", "draft": "fixtures/none"},
            "workload": {"prompts": "fixtures/none", "max_new_tokens": TOKENS},
            **changes,
        }
    )


def play(
    plan: Sequence[Planned],
    *,
    speedup: float = 0.0,
    noise: float = 0.01,
    drift: float = 0.0,
    spread: float = 0.0,
    seed: int = 7,
    concurrency: int = 1,
    first_start: int = 0,
) -> list[Line]:
    """The run log of a plan. speedup: of own-N's cycle; noise, spread: sd of a block's, a start's
    log time; drift: over the plan.
    """
    rng, records, start_factor = random.Random(seed), [], 1.0
    held = {
        group: tuple(dict.fromkeys(p.arm for p in plan if p.start_group == group))
        for group in {p.start_group for p in plan}
    }
    group = None
    for number, planned in enumerate(plan):
        if planned.start_group != group:
            group, start_factor = planned.start_group, math.exp(spread * rng.gauss(0, 1))
            records.append(
                Start(
                    start=first_start + group,
                    experiment=planned.experiment,
                    arms=held[group],
                    time=TIME,
                    seconds=15.0,
                    command=("simulated",),
                    environment={},
                    server=f"s{first_start + group}",
                    attestation=({"rank": 0}, {"rank": 1}),
                )
            )
        factor = start_factor * math.exp(noise * rng.gauss(0, 1) + drift * number / len(plan))
        records.append(block(planned, number, factor, speedup, concurrency, first_start + group))
    return records


def block(
    planned: Planned, number: int, factor: float, speedup: float, concurrency: int, start: int
) -> Block:
    arm = Arm.parse(planned.arm)
    cycle = (
        CYCLE_S["shared" if arm.speculates else "none"]
        * factor
        * (1 - speedup if arm.placement == "own" else 1)
    )
    requests, clock = [], 0.0
    for prompt in planned.prompts:
        requests.append(request(prompt, cycle, clock, arm.speculates, planned.role == "parity"))
        clock = requests[-1].end
    rounds = sum(r.verify_ct or 0 for r in requests)
    counted = (
        {"draft": COLLECTIVES.get(arm.placement, {}), "verify": {"all_reduce": 9, "all_gather": 1}}
        if arm.speculates
        else {}
    )
    stages = (
        {"draft": round(0.2 * cycle * rounds, 6), "verify": round(0.7 * cycle * rounds, 6)}
        if arm.speculates
        else {}
    )
    return Block(
        block=number,
        experiment=planned.experiment,
        role=planned.role,
        arm=planned.arm,
        start=start,
        pair=planned.pair,
        position=planned.position,
        seed=planned.seed,
        concurrency=concurrency,
        time=TIME,
        seconds=clock,
        server=f"s{start}",
        arm_in_force=planned.arm,
        attested=True,
        requests=tuple(requests),
        rounds=dict.fromkeys(counted, rounds),
        collectives={
            stage: {kind: n * rounds for kind, n in kinds.items()}
            for stage, kinds in counted.items()
        },
        stage_seconds=stages,
    )


def request(prompt: int, cycle: float, sent: float, speculates: bool, answer: bool) -> Request:
    """What a prompt gives is its own, whatever the arm: a greedy answer, and the same drafts
    accepted.
    """
    rng = random.Random(prompt)
    histogram, made = [0, 0, 0, 0], 1
    while made < TOKENS:
        correct = rng.choices(range(4), (1, 2, 3, 4))[0]
        histogram[correct] += 1
        made += correct + 1
    rounds = sum(histogram) if speculates else TOKENS - 1
    counts = (
        dict(
            verify_ct=rounds,
            proposed=3 * rounds,
            correct=sum(k * n for k, n in enumerate(histogram)),
            histogram=tuple(histogram),
        )
        if speculates
        else {}
    )
    first = sent + 0.02
    return Request(
        prompt=f"p{prompt}",
        prompt_tokens=12,
        completion_tokens=TOKENS,
        cached_tokens=0,
        finish="length",
        sent=round(sent, 6),
        first=round(first, 6),
        end=round(first + cycle * rounds, 6),
        output_ids=tuple(rng.randrange(100) for _ in range(6)) if answer else (),
        **counts,
    )


def sound(**how) -> list[Line]:
    """An experiment without a fault: none in four starts, a server that holds the other arms in
    four, and answers compared.
    """
    hot = ("shared", "own-1", "shared#2")
    measured = play(
        schedule.by_starts(EXPERIMENT, ("none", hot), 4, 2, 40, 1, 1, seed=3),
        **{"speedup": 0.06, **how},
    )
    answered = play(
        schedule.parity(EXPERIMENT, ("none", "shared", "own-1"), (0, 1), seed=3), first_start=8
    )
    label = Finding(
        experiment=EXPERIMENT,
        name="simulated",
        time=TIME,
        value="Made by tests/unit/simulated_runs.py: not a measurement.",
    )
    return [label, *measured, *answered]


def is_block(record: Line, arm: str | None = None, role: str | None = None) -> bool:
    return isinstance(record, Block) and arm in (None, record.arm) and role in (None, record.role)


def change(
    records: Sequence[Line],
    wanted: Callable[[Line], bool],
    update: Callable[[Line], dict],
    most: int | None = None,
) -> list[Line]:
    """The records, of which those wanted (at most so many of them) are updated."""
    found = [r for r in records if wanted(r)][:most]
    return [r.model_copy(update=update(r)) if any(r is f for f in found) else r for r in records]


def requests_changed(
    records: Sequence[Line], arm: str | None, role: str, update: Callable[[Request], dict]
) -> list[Line]:
    """The first request of the first block of an arm is updated."""
    return change(
        records,
        lambda r: is_block(r, arm, role),
        lambda b: {
            "requests": (b.requests[0].model_copy(update=update(b.requests[0])), *b.requests[1:])
        },
        1,
    )


def slowed(b: Block, by: float) -> dict:
    return {
        "seconds": b.seconds * by,
        "requests": tuple(
            r.model_copy(update={t: getattr(r, t) * by for t in ("sent", "first", "end")})
            for r in b.requests
        ),
    }


def broken_draft(b: Block) -> dict:
    return {
        "requests": tuple(
            r.model_copy(
                update={
                    "correct": 0,
                    "verify_ct": TOKENS - 1,
                    "proposed": 3 * (TOKENS - 1),
                    "histogram": (TOKENS - 1,),
                }
            )
            for r in b.requests
        )
    }


def failure(what: str, reason: str) -> Failure:
    return Failure(experiment=EXPERIMENT, arm="own-1", time=TIME, what=what, reason=reason)


def speculating(record: Line) -> bool:
    return is_block(record) and Arm.parse(record.arm).speculates


# One a kind of refusal, named after its key: the sound run with that defect and no other.
DEFECTS: dict[str, Callable[[list[Line]], list[Line]]] = {
    "failed": (
        lambda rs: (
            [r for r in rs if not is_block(r, "own-1")]
            + [failure("start", "ValueError: no such group.")]
        )
    ),
    "ranks_disagreed": (
        lambda rs: rs + [failure("disagreed", "rank 1 drafted other tokens than rank 0.")]
    ),
    "not_attested": lambda rs: change(
        rs, lambda r: is_block(r, "own-1", "measure"), lambda _: {"attested": False}, 1
    ),
    "wrong_arm": lambda rs: change(
        rs, lambda r: is_block(r, "own-1", "measure"), lambda _: {"arm_in_force": "shared"}, 1
    ),
    "other_server": lambda rs: change(
        rs, lambda r: is_block(r, "shared", "measure"), lambda _: {"server": "stray"}, 1
    ),
    "request_errors": lambda rs: requests_changed(
        rs, "own-1", "measure", lambda _: {"error": "HTTP 500", "finish": None}
    ),
    "truncated_answers": lambda rs: requests_changed(
        rs, "own-1", "measure", lambda _: {"completion_tokens": 9}
    ),
    "cached_tokens": lambda rs: requests_changed(
        rs, "shared", "measure", lambda _: {"cached_tokens": 8}
    ),
    "warmup_measured": lambda rs: requests_changed(
        rs,
        "own-1",
        "warmup",
        lambda _: {
            "prompt": next(r for r in rs if is_block(r, "own-1", "measure")).requests[0].prompt
        },
    ),
    "pair_broken": lambda rs: change(rs, speculating, broken_draft),
    "random_prompts": lambda rs: change(rs, is_block, lambda _: {"prompts_from": "random"}),
    "accept_moved": lambda rs: requests_changed(
        rs, "own-1", "measure", lambda r: {"correct": r.correct - 1}
    ),
    "control": lambda rs: change(
        rs, lambda r: is_block(r, "shared#2", "measure"), lambda b: slowed(b, 1.08)
    ),
    "no_control": lambda rs: [r for r in rs if not is_block(r, "shared#2")],
    "too_few_starts": lambda rs: [
        r for r in rs if not (is_block(r, "none", "measure") and r.pair > 3)
    ],
    "unequal_prompts": lambda rs: requests_changed(
        rs, "own-1", "measure", lambda _: {"prompt": "p999"}
    ),
    "not_interleaved": lambda rs: change(
        rs, lambda r: is_block(r, "own-1", "measure"), lambda _: {"position": -1}
    ),
    "parity": lambda rs: requests_changed(
        rs, "own-1", "parity", lambda r: {"output_ids": (*r.output_ids[:-1], 100)}
    ),
    "wiring": (
        lambda rs: (
            rs
            + [
                Finding(
                    experiment=rs[-1].experiment,
                    name="wiring",
                    time=rs[-1].time,
                    value={
                        "ok": False,
                        "sentence": (
                            "The suspect is wiring: the server's histogram of correct drafts is not"
                            " the offline reference's."
                        ),
                    },
                )
            ]
        )
    ),
    "negative_control": (
        lambda rs: (
            rs
            + [
                Finding(
                    experiment=NEGATIVE,
                    name="own-1+agreement=check",
                    time=rs[-1].time,
                    value={
                        "detected": False,
                        "rank": 1,
                        "within_s": 59.4,
                        "sentence": (
                            "own-1+agreement=check, rank 1 corrupted on purpose: it served 4 rounds"
                            " of requests unnoticed."
                        ),
                    },
                )
            ]
        )
    ),
    "nothing_compared": lambda rs: [r for r in rs if not is_block(r) or r.arm.startswith("shared")],
}


def lines(records: Sequence[Line]) -> str:
    return "".join(r.model_dump_json(exclude_none=True) + "\n" for r in records)


if __name__ == "__main__":
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name, plant in {"sound": list, **DEFECTS}.items():
        (FIXTURES / f"{name}.jsonl").write_text(lines(plant(sound())))
