"""What is to be known of a comparison beside its interval: few starts, pairs that cluster or drift,
looks that were paid for.
"""

from __future__ import annotations

from collections.abc import Sequence

from scipy import special

from workbench.experiment.metrics import RunView
from workbench.judge import levels
from workbench.judge.clustering import SURE
from workbench.judge.comparisons import Comparison

ENOUGH = 6  # starts; from here on Student's factor is within a third of that of many


def of(run: RunView, compared: Sequence[Comparison]) -> tuple[str, ...]:
    """One sentence a fact, for the comparisons that carry a claim."""
    claims = [c for c in compared if c.claims and c.valid]
    notes = []
    for experiment in dict.fromkeys(c.experiment for c in claims):
        here = [c for c in claims if c.experiment == experiment]
        notes += [*_few(here), *_looked(run, experiment, here)]
        notes += [note for c in here for note in (_clustered(c), _drifting(c)) if note]
    return tuple(notes)


def _few(here: Sequence[Comparison]) -> list[str]:
    least = min(here, key=lambda c: min(c.units))
    n = min(least.units)
    if n >= ENOUGH:
        return []
    df = n - 1 if least.method == "paired" else sum(least.units) - 2
    factor, many = (float(special.stdtrit(k, (1 + least.level) / 2)) for k in (df, 1e6))
    return [
        f"{least.experiment}: with {n} server starts an interval is wide ({factor:.2g} standard"
        f" errors either way, where many starts have {many:.2g}); more starts narrow it, more pairs"
        " of the same starts hardly do."
    ]


def _looked(run: RunView, experiment: str, here: Sequence[Comparison]) -> list[str]:
    stopped, watched = levels.by_hand(run, experiment), levels.watched(run, experiment)
    if not (stopped or watched):
        return []
    how = " and ".join(
        ["stopped by hand"] * stopped + ["watched while its interval was shown"] * watched
    )
    claim = min(here, key=lambda c: c.level)
    return [
        f"{experiment} was {how}, and whoever sees an interval may stop for what it says: its"
        f" intervals have paid for a look after each start (level {100 * claim.level:.4g} %)."
    ]


def _clustered(c: Comparison) -> str | None:
    if not c.alike.high:
        return None
    told = [
        f"intraclass correlation {c.alike.icc:.2f}"
        + ("" if c.alike.p < SURE else ", which chance explains")
        if c.alike.icc is not None
        else "",
        f"of neighbours {c.alike.lag1:.2f}" if c.alike.lag1 is not None else "",
    ]
    return (
        f"{c.experiment}: the {c.pairs} pairs of {c.a} against {c.b} resemble each other within a"
        f" start ({'; '.join(filter(None, told))}), so that its {min(c.units)} starts count and"
        " its pairs do not."
    )


def _drifting(c: Comparison) -> str | None:
    if not c.alike.drifts:
        return None
    ps = {"while a start goes on": c.alike.trend, "from start to start": c.alike.change}
    known = {when: p for when, p in ps.items() if p is not None}
    when = min(known, key=known.get)
    return (
        f"{c.experiment}: the ratio of {c.a} to {c.b} moves {when} (p = {known[when]:.1g}): one arm"
        " changed and the other did not, so that the interval speaks of this run's mean and not of"
        " the next run."
    )
