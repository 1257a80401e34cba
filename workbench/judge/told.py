"""What a judged run says: the verdict, its answer in one sentence, and its content for a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.experiment.arms import Arm
from workbench.experiment.metrics import IN_WORDS
from workbench.judge.comparisons import Comparison
from workbench.judge.refusal import Refusal
from workbench.judge.token_parity import Parity
from workbench.judge.verdict_file import (
    SCHEMA,
    ArmEntry,
    ComparisonEntry,
    ControlEntry,
    ParityEntry,
    ReasonEntry,
    VerdictFile,
    Yardstick,
)

CPU_CAVEAT = "Measured on the CPU engine, which proves function, not GPU speed."


@dataclass(frozen=True)
class Verdict:
    """What a run says. arms: {experiment: {arm: facts}}; parity: by experiment and arm; notes: in
    words, no refusals.
    """

    profile: str
    source: str
    engine: str
    arms: dict[str, dict[str, ArmEntry]]
    comparisons: tuple[Comparison, ...]
    controls: tuple[Comparison, ...]
    parity: dict[str, dict[str, Parity]]
    reasons: tuple[Refusal, ...]
    notes: tuple[str, ...]

    @property
    def valid(self) -> bool:
        return not self.reasons

    @property
    def file(self) -> VerdictFile:
        """The content of verdict.json: "arms" has each arm from the headline's experiment, else
        from the one that measured it most; "control" is the headline's.
        """
        headline = _headline(self)
        about = headline.experiment if headline else None
        controls = sorted(
            self.controls,
            key=lambda c: (c.experiment != about, bool(headline) and c.metric != headline.metric),
        )
        return VerdictFile(
            version=SCHEMA,
            profile=self.profile,
            source=self.source,
            engine=self.engine,
            valid=self.valid,
            sentence=sentence(self),
            reasons=tuple(map(ReasonEntry.of, self.reasons)),
            notes=self.notes,
            arms=_most_measured(self.arms, about),
            experiments=self.arms,
            comparisons=tuple(ComparisonEntry.of(c, self._yardstick(c)) for c in self.comparisons),
            control=ControlEntry.of(controls[0]) if controls else None,
            controls=tuple(map(ControlEntry.of, self.controls)),
            parity={arm: _worst(results) for arm, results in self._results().items()},
            parity_counts=tuple(
                ParityEntry(experiment=experiment, sentence=p.sentence, **vars(p))
                for experiment, found in self.parity.items()
                for p in found.values()
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """The content of verdict.json, of plain types; unknown numbers are None."""
        return self.file.to_json()

    def _results(self) -> dict[str, list[str]]:
        """{arm: its parity in each experiment that compared its answers}."""
        found: dict[str, list[str]] = {}
        for parities in self.parity.values():
            for arm, parity in parities.items():
                found.setdefault(arm, []).append(parity.result)
        return found

    def _yardstick(self, comparison: Comparison) -> Yardstick | None:
        """The A/A comparison to hold a difference against: of the same experiment and metric, and
        of the same method where there is one.
        """
        wanted = comparison.experiment, comparison.metric
        fitting = [c for c in self.controls if (c.experiment, c.metric) == wanted and c.interval]
        fitting.sort(key=lambda c: c.method != comparison.method)
        return Yardstick.of(fitting[0]) if fitting else None


def sentence(verdict: Verdict) -> str:
    """The answer in one sentence, with interval and resolution; for the CPU engine a second one
    says what it cannot tell.
    """
    best = _headline(verdict)
    caveat = f" {CPU_CAVEAT}" if verdict.engine == "cpu" else ""
    why = verdict.reasons[0].sentence.rstrip(".") if verdict.reasons else ""
    others = len(verdict.reasons) - 1
    more = f" (and {others} more reason{'s' if others > 1 else ''})" if others > 0 else ""
    if best is None or not best.valid:
        return f"No result: {why}{more}.{caveat}"
    answer = _answer(best, _other_metric(verdict, best))
    return (
        f"{answer}; but the run as a whole is not valid: {why}{more}.{caveat}"
        if verdict.reasons
        else f"{answer}.{caveat}"
    )


def exit_status(verdict: Verdict) -> int:
    """0 for a valid result, 3 for a run that finished without one."""
    return 0 if verdict.valid else 3


def units(c: Comparison) -> str:
    """The starts behind a comparison, and their pairs, in words."""
    if c.method == "paired":
        return f"{c.units[0]} server starts, {c.pairs} pairs of blocks"
    return f"{c.units[0]} and {c.units[1]} server starts"


def interval(c: Comparison) -> str:
    """A comparison's ratio, interval and level, in words."""
    i = c.interval
    return f"ratio {i.ratio:.3f}, {100 * i.level:.3g} % interval {i.low:.3f} to {i.high:.3f}"


def _answer(c: Comparison, tokens: Comparison | None) -> str:
    """tokens: the same arms by tokens/s, where the claim rests on the cycle."""
    ratio = c.interval.ratio
    seen = f"{100 * c.resolution:.2g} % would have been seen four times in five"
    detail, by = f"{interval(c)}, {units(c)}", IN_WORDS[c.metric]
    if not c.interval.decided:
        said = f"No difference between {c.a} and {c.b} could be resolved in {by} ({detail}); one"
        return f"{said} of {seen}{_follows(c, tokens)}"
    faster = (ratio > 1) == (c.metric == "tokens_per_s")
    size = f"{100 * abs(ratio - 1):.2g} %"
    if c.metric == "tokens_per_s":
        said = f"{c.a} is {size} {'faster' if faster else 'slower'} than {c.b} in tokens/s"
    else:
        said = (
            f"{c.a} is {'faster' if faster else 'slower'} than {c.b}: its cycle takes {size}"
            f" {'less time' if faster else 'longer'}"
        )
    return f"{said} ({detail}; a difference of {seen}){_follows(c, tokens)}"


def _follows(c: Comparison, tokens: Comparison | None) -> str:
    """What tokens/s say where the cycle carries the claim."""
    if not c.equal or tokens is None or not tokens.valid:
        return ""
    return f"; the accept lengths are {c.equal}, and tokens/s follow ({interval(tokens)})"


def _other_metric(verdict: Verdict, c: Comparison) -> Comparison | None:
    same = (c.experiment, c.a, c.b)
    return next(
        (
            o
            for o in verdict.comparisons
            if (o.experiment, o.a, o.b) == same and o.metric != c.metric
        ),
        None,
    )


def _headline(verdict: Verdict) -> Comparison | None:
    """The project's question, own-N against shared at the profile's setting, from the first
    experiment that has it (of several in it the fastest: their intervals hold together); else
    any own-N against shared, else the first valid comparison.
    """
    order = {experiment: place for place, experiment in enumerate(verdict.arms)}

    def rank(c: Comparison) -> tuple:
        a, b = Arm.parse(c.a), Arm.parse(c.b)
        plain = (a, b) == (Arm(a.placement, a.group), Arm(b.placement, b.group))
        # What runs without agreement is measured to tell its cost: nobody is to serve it.
        return (
            (a.placement, b.placement) != ("own", "shared"),
            a.agreement == "off",
            not plain,
            not c.valid,
            order.get(c.experiment, 0),
            _slowness(c),
        )

    return min((c for c in verdict.comparisons if c.claims), key=rank, default=None)


def _slowness(c: Comparison) -> float:
    if c.interval is None:
        return 0.0
    return -c.interval.ratio if c.metric == "tokens_per_s" else c.interval.ratio


def _most_measured(
    experiments: dict[str, dict[str, ArmEntry]], first: str | None
) -> dict[str, ArmEntry]:
    arms = dict.fromkeys(arm for found in experiments.values() for arm in found)
    return {
        arm: max(
            (found[arm] for found in experiments.values() if arm in found),
            key=lambda facts: (facts.experiment == first, facts.blocks),
        )
        for arm in arms
    }


def _worst(results: Sequence[str]) -> str:
    return next(r for r in ("differs", "identical", "not checked") if r in results)
