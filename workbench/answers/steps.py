"""What the sweeps of 05_steps and 06_collectives found: their tables and answers, from a run's log."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from workbench import accept, communication, crossover, halving, measures, sweeps, tables, width
from workbench.arms import Arm
from workbench.comparisons import Comparison
from workbench.lab import Lab
from workbench.profile import Profile
from workbench.runlog import Block, Line
from workbench.stats import Interval
from workbench.sweeps import COLLECTIVES, STEPS, crossing
from workbench.width import Choice

SPEED = "speed (% of the best)"


def sweep_map(profile: Profile, records: Sequence[Line]) -> pd.DataFrame:
    """One row a candidate of 05's search: what it drafts, its speed beside the best one's, and how many pairs of blocks it was given.

    Speed is by all pairs, whose own ups and downs cancel (halving.effects); the best of many looks better than it is, so how much it gains
    is told by fresh blocks alone.
    """
    rows = []
    for field in sweeps.fields(profile):
        blocks = [b for b in _searched(records, STEPS) if b.arm in field.names]
        told = halving.effects({name: _logs(blocks, name) for name in field.names if _logs(blocks, name)})
        for place, names in field.arms.items():
            for name in names:
                spec, own = profile.speculation.of(Arm.parse(name)), [b for b in blocks if b.arm == name]
                shape = place if spec.topk == 1 else f"{place}, tree of topk {spec.topk}, {spec.draft_tokens} tokens"
                rows.append((shape, name, spec.steps, 100 * math.exp(told[name]) if name in told else math.nan,
                             measures.tokens_per_s(own) or math.nan, len(own)))
    return pd.DataFrame(rows, columns=["shape", "arm", "steps", SPEED, "throughput (tokens/s)", "pairs of blocks"])


def settings_map(profile: Profile, records: Sequence[Line], facts: communication.Facts) -> pd.DataFrame:
    """One row a setting of the communication layer: what it is made of, whether it was tried, and its speed beside the best one's.

    Speed is that of the search, by rounds of server starts; of a single setting there is none.
    """
    tried, skipped = communication.choose(facts, profile.sweep.settings)
    broken, arms = sweeps.failed(records), sweeps.settings_arms(profile)
    logs: dict[str, dict[int, float]] = {}
    for b in _searched(records, COLLECTIVES):
        if (comm := Arm.parse(b.arm).comm) and (speed := measures.tokens_per_s([b])):
            logs.setdefault(comm, {})[b.pair, b.arm.removesuffix(f"+comm={comm}")] = math.log(speed)
    told = halving.effects(logs)
    compared = {Arm.parse(b.arm).comm for b in records if isinstance(b, Block) and (b.experiment, b.role) == (COLLECTIVES, "measure")}
    rows = []
    for name in [*tried, *skipped]:
        setting = communication.SETTINGS[name]
        made = " ".join([*(f"{key}={value}" for key, value in setting.environment.items()), *(f"--{flag}" for flag in setting.flags)]) or "nothing"
        state = skipped.get(name) and f"skipped: {skipped[name]}" or broken.get(name) and f"failed: {broken[name].splitlines()[0]}" \
            or ("compared" if name in compared else "searched" if name in logs else "not tried yet")
        rows.append((name, made, state, 100 * math.exp(told[name]) if name in told else math.nan,
                     len({pair for pair, _ in logs.get(name, ())}), setting.about))
    return pd.DataFrame(rows, columns=["setting", "made of", "state", SPEED, f"blocks of {' and of '.join(arms)}", "about"])


def by_load(comparisons: Sequence[Comparison]) -> dict[tuple[str, str], dict[int, Interval]]:
    """{(a, b): {requests at once: ratio of tokens/s}} of 05's comparisons that have a result."""
    found: dict[tuple[str, str], dict[int, Interval]] = {}
    for c in comparisons:
        if c.valid and c.metric == "tokens_per_s" and c.experiment.startswith(crossing("")):
            found.setdefault((c.a, c.b), {})[int(c.experiment.removeprefix(crossing("")))] = c.interval
    return found


def load_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The ratios of tokens/s by requests at once, for ``charts.by_load``. rows: ``tables.comparisons``."""
    here = rows[rows["experiment"].str.startswith(crossing("")) & rows["valid"] & (rows["metric"] == tables.METRIC_NAMES["tokens_per_s"])]
    loads = here["experiment"].str.removeprefix(crossing("")).astype(int)
    return here.assign(**{"requests at once": loads})[["comparison", "requests at once", "ratio", "low", "high"]].sort_values("requests at once")


def candidates(profile: Profile) -> pd.DataFrame:
    """One row a placement and tree or chain of 05's search: the step counts that are tried. Each server's field is searched by itself."""
    rows = [(field.topk, place, ", ".join(str(profile.speculation.of(Arm.parse(name)).steps) for name in names), len(names))
            for field in sweeps.fields(profile) for place, names in field.arms.items()]
    return pd.DataFrame(rows, columns=["topk", "placement", "steps tried", "candidates"])


def loads_sentence(profile: Profile, longest: int = 0) -> str:
    """At which loads the best settings are compared, and why not at others."""
    loads, skipped = sweeps.loads(profile, longest)
    return f"Compared at {', '.join(map(str, loads)) or 'no number of'} requests at once." + "".join(
        f" Not at {load}: {why}." for load, why in skipped.items())


def implied(profile: Profile, records: Sequence[Line]) -> tuple[Choice, ...]:
    """What every number of steps would give by the acceptance at each position of the longest chain, and the cycles measured in the search.

    A chain of n steps accepts what the longest one accepts at its first n positions, so accept lengths are taken from one arm with the most
    rounds behind each position; cycles of step counts that were not measured lie straight between two that were. Empty without a chain.
    """
    chains = next((field for field in reversed(sweeps.fields(profile)) if field.topk == 1), None)
    if chains is None:
        return ()
    names = next(iter(chains.arms.values()))
    blocks = _searched(records, STEPS)
    cycles = {profile.speculation.of(Arm.parse(name)).steps: ms / 1e3 for name in names
              if (ms := measures.cycle_ms([b for b in blocks if b.arm == name]))}
    longest = max((name for name in names), key=lambda name: profile.speculation.of(Arm.parse(name)).steps)
    counted = accept.measure(r for b in blocks if b.arm == longest for r in b.requests)
    if len(cycles) < 2 or counted is None or counted.positions is None:
        return ()
    shares, known = [position.value for position in counted.positions], sorted(cycles)
    return tuple(Choice(n, 1 + sum(shares[:n]), float(np.interp(n, known, [cycles[k] for k in known])))
                 for n in range(known[0], min(known[-1], len(shares)) + 1))


def steps_answer(lab: Lab) -> str:
    """05's answer: the best setting with its interval, what acceptance implies, and where speculation or a placement stops paying."""
    profile, records, found = lab.profile, lab.records, lab.verdict.comparisons
    loads = sweeps.loads(profile, lab.longest_prompt)[0]
    load = min(loads, key=lambda n: abs(n - profile.workload.concurrency), default=profile.workload.concurrency)
    reference = next((arm.name for arm in profile.arms if arm.speculates and arm == Arm(arm.placement, arm.group)), "shared")
    said = [_best([c for c in found if c.experiment == crossing(load) and c.b == reference], profile, f"The best at {load} at once is",
                  f"At {load} at once no setting", f"the profile's own, {reference}")]
    if choices := implied(profile, records):
        best = width.best(choices)
        said.append(f"The acceptance at each position and the measured cycles put the best chain at {best.steps} step{'s' * (best.steps != 1)} "
                    f"(accept length {best.accept_length:.3g}).")
    told = by_load(found)
    said += [crossover.sentence(a, b, ratios) for (a, b), ratios in told.items() if len(ratios) > 1 and b in ("none", reference)]
    return " ".join([*said, *_caveat(profile)])


def collectives_answer(lab: Lab, facts: communication.Facts) -> str:
    """06's answer: the best setting of the communication layer with its interval against none, and how many could not be tried."""
    profile = lab.profile
    tried, skipped = communication.choose(facts, profile.sweep.settings)
    rows = [c for c in lab.verdict.comparisons if c.experiment == COLLECTIVES and Arm.parse(c.a).comm and not Arm.parse(c.b).comm
            and Arm.parse(c.a).placement == Arm.parse(c.b).placement]
    said = [_best(rows, profile, "The best by a setting of the communication layer is", "No setting of the communication layer", "the same arm without")] \
        if tried else ["No setting of the communication layer can be tried here."]
    broken = sweeps.failed(lab.records)
    said.append(f"{len(tried)} setting{'s' * (len(tried) != 1)} tried, {len(skipped)} skipped, {len(broken)} failed.")
    return " ".join([*said, *_caveat(profile)])


def _best(rows: Sequence[Comparison], profile: Profile, won: str, lost: str, beside: str) -> str:
    """The fastest of several comparisons with one reference, in words; their intervals hold together, so that the choice costs nothing."""
    rows = [c for c in rows if c.metric == "tokens_per_s"]
    valid = [c for c in rows if c.valid]
    if not valid:
        why = next((r.sentence.rstrip(".") for c in rows for r in c.reasons), "nothing was compared")
        return f"No answer: {why}."
    c = max(valid, key=lambda c: c.interval.ratio)
    i, drafts = c.interval, tables.drafting(Arm.parse(c.a), profile.model_dump(mode="json"))
    what = f"{c.a} ({drafts})" if Arm.parse(c.a).comm is None else c.a
    size = f"ratio {i.ratio:.3f} of tokens/s, {100 * i.level:.3g} % interval {i.low:.3f} to {i.high:.3f}, {_units(c)}"
    if not i.decided:
        return f"{lost} could be told apart from {beside}; the best is {what} ({size})."
    return f"{won} {what}, {100 * (i.ratio - 1):.2g} % faster than {beside} ({size})." if i.ratio > 1 else \
        f"{lost} beats {beside}; the best other is {what} ({size})."


def _units(c: Comparison) -> str:
    return f"{c.units[0]} pairs of blocks" if c.method == "paired" else f"{c.units[0]} and {c.units[1]} server starts"


def _caveat(profile: Profile) -> list[str]:
    return ["On the CPU engine this says nothing about GPUs."] if profile.engine == "cpu" else []


def _searched(records: Sequence[Line], experiment: str) -> list[Block]:
    return [r for r in records if isinstance(r, Block) and (r.experiment, r.role) == (experiment, "search")]


def _logs(blocks: Sequence[Block], arm: str) -> Mapping[tuple, float]:
    return {(b.start, b.pair): math.log(speed) for b in blocks if b.arm == arm and (speed := measures.tokens_per_s([b]))}
