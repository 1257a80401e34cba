"""The verdict of a run: arms, comparisons with intervals, controls and parity, or the reasons why
there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.experiment import metrics
from workbench.experiment.arms import Arm
from workbench.experiment.metrics import METRICS, RunView
from workbench.experiment.names import is_sweep
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Line
from workbench.judge import (
    accept,
    after_switch,
    comparisons,
    levels,
    notes,
    refusals,
    token_parity,
)
from workbench.judge.comparisons import Comparison
from workbench.judge.findings import corrupted_ranks
from workbench.judge.refusal import KINDS, Refusal
from workbench.judge.stats import LEVEL
from workbench.judge.token_parity import Parity
from workbench.judge.told import Verdict
from workbench.judge.verdict_file import AcceptEntry, ArmEntry


def judge(
    profile: Profile, records: Sequence[Line], source: str = "live", wished: float | None = None
) -> Verdict:
    """The verdict of a run log; a pure function of it.

    source: "live" or "recorded".
    wished: a ratio difference (0.02 is 2 %): each comparison then says how many starts in all would
        resolve it.
    Raises: BadInput when the log names an arm that is none, or one that the profile cannot serve.
    """
    run = RunView(profile, records)
    reasons, own = refusals.find(run), []  # of arms and experiments; of single comparisons
    found: list[Comparison] = []
    controls: list[Comparison] = []
    answers: dict[str, dict[str, Parity]] = {}
    asked = {
        experiment: comparisons.against_references(comparisons.measured(run, experiment))
        for experiment in run.experiments
    }
    shares = levels.shares(asked)
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
            if p.violations
        ]
        here, its_controls = _compare_all(run, experiment, asked[experiment], shares, wished)
        own += [r for c in here for r in c.reasons]
        reasons += [
            r for c in its_controls for r in c.reasons
        ]  # without its control an experiment has no result
        if here and not its_controls:
            why = "no arm was measured against itself, so nothing says how far equal arms differ"
            reasons.append(Refusal("no_control", f"{experiment}: {why}.", experiment))
        found, controls = found + here, controls + its_controls
    reasons += [r for c in controls if (r := comparisons.outside(run, c, len(controls)))]
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
        _notes(run, reasons, answers) + notes.of(run, found),
    )


def _compare_all(
    run: RunView,
    experiment: str,
    pairs: Sequence[tuple[str, str]],
    shares: Mapping[tuple[bool, str], int],
    wished: float | None,
) -> tuple[list[Comparison], list[Comparison]]:
    found = []
    for a, b in pairs:
        level = levels.level_of(run, experiment, shares[levels.question(experiment, b)])
        found += [
            comparisons.compare(run, experiment, a, b, metric, level, wished) for metric in METRICS
        ]
    controls = [
        comparisons.compare(run, experiment, a, b, metric, lambda _: LEVEL, pooled=False)
        for a, b in comparisons.replicas(comparisons.measured(run, experiment))
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
            for r in dict.fromkeys(reasons)
            if r.concerns(c.experiment, (c.a, c.b), c.metric)
            and r.key not in spare
            and r not in c.reasons
        ]
    )


def _facts(run: RunView, reasons: Sequence[Refusal], experiment: str, arm: str) -> ArmEntry:
    """The arm's entry in verdict.json. What is not known to be the arm's has no numbers."""
    measured, compared = run.blocks(experiment, arm), run.blocks(experiment, arm, "parity")
    keys = {r.key for r in reasons if r.experiment == experiment and arm in r.arms}
    bad = any(KINDS[key].not_the_arm for key in keys)
    blocks: list[Block] = [] if bad else measured
    counted = blocks or ([] if bad else compared)
    taken = accept.measure(r for b in blocks for r in b.requests)
    told = taken if "random_prompts" not in keys else None
    kinds = metrics.collectives_by_kind(counted)
    return ArmEntry(
        tokens_per_s=metrics.tokens_per_s(blocks),
        cycle_ms=metrics.cycle_ms(blocks),
        accept_length=told.length.value if told else None,
        accept_rate=told.rate.value if told and told.rate else None,
        accept=AcceptEntry.of(told) if told else None,
        accept_simulated=run.acceptance_simulated(experiment),
        collectives_per_round={stage: sum(found.values()) for stage, found in kinds.items()},
        collectives_by_kind=kinds,
        stage_ms=metrics.stage_ms(counted),
        attested=bool(measured or compared) and "not_attested" not in keys,
        experiment=experiment,
        blocks=len(measured),
        starts=len({b.start for b in measured}),
    )


def _parity(run: RunView, experiment: str) -> dict[str, Parity]:
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
    run: RunView, reasons: Sequence[Refusal], answers: dict[str, dict[str, Parity]]
) -> tuple[str, ...]:
    told = {
        (r.experiment, arm)
        for r in reasons
        if r.key in ("failed", "ranks_disagreed")
        for arm in r.arms
    }
    said = [
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
    said += [
        f"{experiment}: SGLang held the accept length by simulation, so it says nothing about the"
        " pair."
        for experiment in run.experiments
        if run.acceptance_simulated(experiment)
    ]
    said += filter(None, (after_switch.note(run, experiment) for experiment in run.experiments))
    # Where identity is not owed, rounding can do this as well as a fault: said, not refused.
    said += [
        f"{experiment}: {p.sentence}"
        for experiment, found in answers.items()
        for p in found.values()
        if p.result == "differs" and not p.violations
    ]
    said += [
        f"Negative control: {arm} with the draft of rank {c.rank} corrupted on purpose"
        f" was caught {c.within_s:.0f} s after its start began."
        for arm, c in corrupted_ranks(run.records).items()
        if c.detected
    ]
    return tuple(said)
