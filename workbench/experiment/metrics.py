"""What blocks say: speed, collectives and stage times of an arm, as sums over its blocks divided
once; None where unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from workbench.experiment import findings
from workbench.experiment.arms import Arm
from workbench.experiment.findings import T
from workbench.experiment.profile import SIMULATED_ACCEPTANCE, Profile
from workbench.experiment.runlog import Block, Failure, Finding, Line, Start


@dataclass(frozen=True)
class RunView:
    """A run log with its profile, looked up by experiment and arm. Warm-up blocks are facts of the
    log, never of an arm.
    """

    profile: Profile
    records: Sequence[Line] = field(repr=False)

    @cached_property
    def starts(self) -> dict[int, Start]:
        return {r.start: r for r in self.records if isinstance(r, Start)}

    @cached_property
    def failures(self) -> list[Failure]:
        return [r for r in self.records if isinstance(r, Failure)]

    @cached_property
    def experiments(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(r.experiment for r in self.records if isinstance(r, (Block, Failure)))
        )

    def blocks(self, experiment: str, arm: str | None = None, role: str = "measure") -> list[Block]:
        return [
            r
            for r in self.records
            if isinstance(r, Block)
            and r.experiment == experiment
            and r.role == role
            and arm in (None, r.arm)
        ]

    def arms(self, experiment: str) -> tuple[str, ...]:
        """Every arm that was measured or compared for parity, or was to be and failed: none,
        shared, own-N, replicas last.
        """
        seen = dict.fromkeys(
            r.arm
            for r in self.records
            if r.kind in ("block", "failure")
            and r.experiment == experiment
            and getattr(r, "role", getattr(r, "what", ""))
            not in ("warmup", "search", "setting", "stopped")
        )
        return tuple(sorted(seen, key=_rank))

    def finding(self, experiment: str, name: str, kind: type[T]) -> T | None:
        """The latest finding of that name."""
        return next(
            (
                findings.read(r, kind)
                for r in reversed(self.records)
                if isinstance(r, Finding) and (r.experiment, r.name) == (experiment, name)
            ),
            None,
        )

    def load(self, experiment: str) -> int | None:
        """The requests at once at which 05_steps compares in this experiment; None for others."""
        return next((b.load for b in self.blocks(experiment)), None)

    def acceptance_simulated(self, experiment: str) -> bool:
        """Whether SGLang simulated the accept length: then it says nothing about the pair."""
        values = [
            s.environment.get(SIMULATED_ACCEPTANCE)
            for s in self.starts.values()
            if s.experiment == experiment
        ]
        return self.profile.acceptance_simulated or any(
            value and float(value) > 0 for value in values
        )


def _rank(name: str) -> tuple:
    arm = Arm.parse(name)
    return arm.replica or 0, ("none", "shared", "own").index(arm.placement), arm.group or 0, name


def tokens_per_s(blocks: Iterable[Block]) -> float | None:
    """Completion tokens of all requests over the blocks' seconds, each from its first request sent
    to its last one ended.
    """
    blocks = list(blocks)
    return _over(
        sum(r.completion_tokens for b in blocks for r in b.requests), sum(b.seconds for b in blocks)
    )


def cycle_ms(blocks: Iterable[Block]) -> float | None:
    """Milliseconds from one verify round of a request to the next; for an arm without speculation,
    from one token to the next.

    From a request's first token to its end, so that prefill and queue are left out: the prefill
    makes the first token and each round the next ones. Requests that run at once share their
    rounds, and each sees every round it takes part in.
    """
    seconds = rounds = 0.0
    for block in blocks:
        speculates = Arm.parse(block.arm).speculates
        for r in block.requests:
            taken = r.verify_ct if speculates else r.completion_tokens - 1
            if r.error is None and (r.first is None or taken is None):
                return None
            if r.error is None:
                seconds, rounds = seconds + r.end - r.first, rounds + taken
    ms = _over(1000 * seconds, rounds)
    return ms if ms else None


# What arms are compared by: name -> function of blocks.
METRICS: dict[str, Callable[[Iterable[Block]], float | None]] = {
    "tokens_per_s": tokens_per_s,
    "cycle_ms": cycle_ms,
}
IN_WORDS = {"tokens_per_s": "tokens/s", "cycle_ms": "cycle time"}


def collectives_by_kind(blocks: Sequence[Block]) -> dict[str, dict[str, float]]:
    """{stage: {kind: collectives a round}} of rank 0."""
    stages = dict.fromkeys(stage for b in blocks for stage in b.collectives)
    found: dict[str, dict[str, float]] = {}
    for stage in stages:
        counted = [b for b in blocks if stage in b.collectives]
        rounds = sum(b.rounds.get(stage, 0) for b in counted)
        kinds = dict.fromkeys(kind for b in counted for kind in b.collectives[stage])
        if rounds:
            found[stage] = {
                kind: sum(b.collectives[stage].get(kind, 0) for b in counted) / rounds
                for kind in kinds
            }
    return found


def stage_ms(blocks: Sequence[Block]) -> dict[str, float]:
    """{stage: milliseconds a round}, where stage times were taken."""
    found: dict[str, float] = {}
    for stage in dict.fromkeys(stage for b in blocks for stage in b.stage_seconds):
        timed = [b for b in blocks if stage in b.stage_seconds]
        ms = _over(
            1000 * sum(b.stage_seconds[stage] for b in timed),
            sum(b.stage_timed.get(stage, b.rounds.get(stage, 0)) for b in timed),
        )
        if ms is not None:
            found[stage] = ms
    return found


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
