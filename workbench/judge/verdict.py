"""The verdict of a run: arms, comparisons with intervals, controls and parity, or the reasons why
there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.experiment import metrics
from workbench.experiment.arms import Arm
from workbench.experiment.metrics import METRICS, Run
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Line, negative_controls
from workbench.experiment.sweeps import is_sweep
from workbench.judge import accept, after_switch, comparisons, refusals, token_parity
from workbench.judge.accept_checks import Refusal
from workbench.judge.comparisons import Comparison
from workbench.judge.stats import LEVEL
from workbench.judge.token_parity import Parity
from workbench.judge.verdict_file import (
    accept_entry,
    comparison_entry,
    most_measured,
    reason_entry,
    worst,
)

SCHEMA = 1
CPU_CAVEAT = "Measured on the CPU engine, which proves function, not GPU speed."


@dataclass(frozen=True)
class Verdict:
    """What a run says. arms: {experiment: {arm: facts}}; parity: by experiment and arm; notes: in
    words, no refusals.
    """

    profile: str
    source: str
    engine: str
    arms: dict[str, dict[str, dict[str, Any]]]
    comparisons: tuple[Comparison, ...]
    controls: tuple[Comparison, ...]
    parity: dict[str, dict[str, Parity]]
    reasons: tuple[Refusal, ...]
    notes: tuple[str, ...]

    @property
    def valid(self) -> bool:
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """The content of verdict.json (schema 1), of plain types; unknown numbers are None.

        Beyond the schema: "sentence", "reasons", "notes", "controls" (all of them; "control" is the
        headline's), "experiments" (arms by experiment; "arms" has each arm from the headline's
        experiment, else from the one that measured it most) and "parity_counts".
        """
        headline = _headline(self)
        about = headline.experiment if headline else None
        controls = sorted(
            self.controls, key=lambda c: (c.experiment != about, c.metric != "tokens_per_s")
        )
        return {
            "schema": SCHEMA,
            "profile": self.profile,
            "source": self.source,
            "engine": self.engine,
            "valid": self.valid,
            "sentence": sentence(self),
            "reasons": [reason_entry(r) for r in self.reasons],
            "notes": list(self.notes),
            "arms": most_measured(self.arms, about),
            "experiments": self.arms,
            "comparisons": [
                comparison_entry(c) | {"control": self._yardstick(c)} for c in self.comparisons
            ],
            "control": comparison_entry(controls[0]) | {"arm": controls[0].b} if controls else {},
            "controls": [comparison_entry(c) | {"arm": c.b} for c in self.controls],
            "parity": {
                arm: worst([found[arm].result for found in self.parity.values() if arm in found])
                for arm in dict.fromkeys(arm for found in self.parity.values() for arm in found)
            },
            "parity_counts": [
                {"experiment": experiment, "sentence": p.sentence} | vars(p)
                for experiment, found in self.parity.items()
                for p in found.values()
            ],
        }

    def _yardstick(self, comparison: Comparison) -> dict[str, Any] | None:
        """The A/A comparison to hold a difference against: of the same experiment, metric and
        method (else see the difference's own sd).
        """
        fitting = [
            c
            for c in self.controls
            if c.interval
            and (c.experiment, c.metric, c.method)
            == (comparison.experiment, comparison.metric, comparison.method)
        ]
        keys = ("a", "b", "method", "ratio", "low", "high", "level", "sd")
        return {key: comparison_entry(fitting[0])[key] for key in keys} if fitting else None


def judge(
    profile: Profile, records: Sequence[Line], source: str = "live", wished: float | None = None
) -> Verdict:
    """The verdict of a run log; a pure function of it.

    source: "live" or "recorded".
    wished: a ratio difference (0.02 is 2 %): each comparison then says how many pairs or starts in
        all would resolve it.
    Raises: BadInput when the log names an arm that is none, or one that the profile cannot serve.
    """
    run = Run(profile, records)
    reasons, own = refusals.find(run), []  # of arms and experiments; of single comparisons
    found: list[Comparison] = []
    controls: list[Comparison] = []
    answers: dict[str, dict[str, Parity]] = {}
    for experiment in run.experiments:
        # A sweep compares no answers: it runs arms whose answers 04 compared.
        answers[experiment] = (
            {}
            if is_sweep(experiment) and not run.blocks(experiment, role="parity")
            else _parity(run, experiment)
        )
        reasons += [
            Refusal("parity", p.sentence, experiment, (arm,))
            for arm, p in answers[experiment].items()
            if p.owed
        ]
        here, its_controls = _compare_all(run, experiment, wished)
        own += [r for c in here for r in c.reasons]
        reasons += [
            r for c in its_controls for r in c.reasons
        ]  # without its control an experiment has no result
        if here and not its_controls:
            why = "no arm was measured against itself, so nothing says how far equal arms differ"
            reasons.append(Refusal("no_control", f"{experiment}: {why}.", experiment))
        found, controls = found + here, controls + its_controls
    speeds = [c for c in controls if c.metric == "tokens_per_s"]
    reasons += [r for c in speeds if (r := comparisons.outside(run, c, len(speeds)))]
    found = [_judged(c, reasons) for c in found]
    controls = [_judged(c, reasons, spare=("control",)) for c in controls]
    every = {(r.key, r.sentence): r for r in reasons + own}
    if not any(c.metric == "tokens_per_s" for c in found):
        every[""] = Refusal(
            "nothing_compared",
            "No two arms were measured in one experiment, so there is nothing to compare.",
            "",
        )
    arms = {
        experiment: {arm: _facts(run, reasons, experiment, arm) for arm in run.arms(experiment)}
        for experiment in run.experiments
    }
    return Verdict(
        profile.name,
        source,
        profile.engine,
        arms,
        tuple(found),
        tuple(controls),
        answers,
        tuple(every.values()),
        _notes(run, reasons, answers),
    )


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
    answer = _answer(best)
    return (
        f"{answer}; but the run as a whole is not valid: {why}{more}.{caveat}"
        if verdict.reasons
        else f"{answer}.{caveat}"
    )


def exit_status(verdict: Verdict) -> int:
    """0 for a valid result, 3 for a run that finished without one."""
    return 0 if verdict.valid else 3


def _answer(c: Comparison) -> str:
    i, size = c.interval, f"{100 * abs(c.interval.ratio - 1):.2g} %"
    units = (
        f"{c.units[0]} pairs of blocks"
        if c.method == "paired"
        else f"{c.units[0]} and {c.units[1]} server starts"
    )
    detail = (
        f"ratio {i.ratio:.3f}, {100 * i.level:.3g} % interval {i.low:.3f} to {i.high:.3f}, {units}"
    )
    seen = f"{100 * c.resolution:.2g} % would have been seen four times in five"
    if not i.decided:
        return (
            f"No difference between {c.a} and {c.b} could be resolved in tokens/s ({detail}); one"
            f" of {seen}"
        )
    return (
        f"{c.a} is {size} {'faster' if i.ratio > 1 else 'slower'} than {c.b} in tokens/s ({detail};"
        f" a difference of {seen})"
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
            -c.interval.ratio if c.interval else 0.0,
        )

    return min(
        (c for c in verdict.comparisons if c.metric == "tokens_per_s"), key=rank, default=None
    )


def _compare_all(
    run: Run, experiment: str, wished: float | None
) -> tuple[list[Comparison], list[Comparison]]:
    measured = [
        arm
        for arm in run.arms(experiment)
        if run.blocks(experiment, arm) or not run.blocks(experiment, arm, "parity")
    ]
    pairs = comparisons.against_references(measured)
    found = []
    for a, b in pairs:
        level = comparisons.level_of(run, experiment, sum(reference == b for _, reference in pairs))
        found += [
            comparisons.compare(run, experiment, a, b, metric, level, wished) for metric in METRICS
        ]
    controls = [
        comparisons.compare(run, experiment, a, b, metric, lambda *_: LEVEL)
        for a, b in comparisons.replicas(measured)
        for metric in METRICS
    ]
    return [c for c in found if c], [c for c in controls if c]


def _judged(
    comparison: Comparison, reasons: Sequence[Refusal], spare: tuple[str, ...] = ()
) -> Comparison:
    """The comparison, or its reasons; a control that is outside its noise keeps its figures, they
    are the evidence.
    """
    c = comparison
    return c.refused(
        [
            r
            for r in reasons
            if r.concerns(c.experiment, (c.a, c.b), c.metric)
            and r.key not in spare
            and r not in c.reasons
        ]
    )


def _facts(run: Run, reasons: Sequence[Refusal], experiment: str, arm: str) -> dict[str, Any]:
    """The arm's entry in verdict.json. What is not known to be the arm's has no numbers."""
    measured, compared = run.blocks(experiment, arm), run.blocks(experiment, arm, "parity")
    keys = {r.key for r in reasons if r.experiment == experiment and arm in r.arms}
    bad = bool(keys & refusals.NOT_THE_ARM)
    blocks: list[Block] = [] if bad else measured
    counted = blocks or ([] if bad else compared)
    taken = accept.measure(r for b in blocks for r in b.requests)
    told = taken if "random_prompts" not in keys else None
    kinds = metrics.collectives_by_kind(counted)
    return {
        "tokens_per_s": metrics.tokens_per_s(blocks),
        "cycle_ms": metrics.cycle_ms(blocks),
        "accept_length": told.length.value if told else None,
        "accept_rate": told.rate.value if told and told.rate else None,
        "accept": accept_entry(told) if told else None,
        "accept_simulated": run.acceptance_simulated(experiment),
        "collectives_per_round": {stage: sum(found.values()) for stage, found in kinds.items()},
        "collectives_by_kind": kinds,
        "stage_ms": metrics.stage_ms(counted),
        "attested": bool(measured or compared) and "not_attested" not in keys,
        "experiment": experiment,
        "blocks": len(measured),
        "starts": len({b.start for b in measured}),
    }


def _parity(run: Run, experiment: str) -> dict[str, Parity]:
    flags = {
        name.lstrip("-").replace("_", "-"): value
        for name, value in run.profile.server.flags.items()
    }
    exact = run.profile.engine == "cpu" or flags.get("enable-deterministic-inference") is True
    arms = run.arms(experiment)
    plain = [b for b in run.blocks(experiment, role="parity") if not Arm.parse(b.arm).speculates]
    return {
        arm: (
            token_parity.compare(arm, run.blocks(experiment, arm, "parity"), plain, exact=exact)
            if Arm.parse(arm).speculates
            else token_parity.repeated(arm, plain, exact=exact)
        )
        for arm in arms
    }


def _notes(
    run: Run, reasons: Sequence[Refusal], answers: dict[str, dict[str, Parity]]
) -> tuple[str, ...]:
    told = {
        (r.experiment, arm)
        for r in reasons
        if r.key in ("failed", "ranks_disagreed")
        for arm in r.arms
    }
    notes = [
        (
            f"{f.experiment}: {f.reason.rstrip('.')} after a block on {f.arm}; what was measured"
            " until then is judged."
            if f.what == "stopped"
            else (
                f"{f.experiment}: {f.arm} was left out ({f.reason.rstrip('.')})."
                if f.what == "setting"
                else f"{f.experiment}: {f.arm} failed once ({f.what}: {f.reason.rstrip('.')})."
            )
        )
        for f in run.failures
        if (f.experiment, f.arm) not in told
    ]
    notes += [
        f"{experiment}: SGLang held the accept length by simulation, so it says nothing about the"
        " pair."
        for experiment in run.experiments
        if run.acceptance_simulated(experiment)
    ]
    notes += filter(None, (after_switch.note(run, experiment) for experiment in run.experiments))
    # Where identity is not owed, rounding can do this as well as a fault: said, not refused.
    notes += [
        f"{experiment}: {p.sentence}"
        for experiment, found in answers.items()
        for p in found.values()
        if p.result == "differs" and not p.owed
    ]
    notes += [
        f"Negative control: {f.name} with the draft of rank {f.value['rank']} corrupted on purpose"
        f" was caught {f.value['within_s']:.0f} s after its start began."
        for f in negative_controls(run.records)
        if f.value["detected"]
    ]
    return tuple(notes)
