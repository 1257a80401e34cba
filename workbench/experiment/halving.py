"""Successive halving on a paired statistic: which of many settings is best, with most of the time
spent on the good ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np

Logs = Mapping[
    str, Mapping[Hashable, float]
]  # candidate -> unit (a pair of blocks, a round of starts) -> log of its speed there


def standing(logs: Logs) -> dict[str, float]:
    """Mean log speed of each candidate over the units that all of them have, less the mean of all:
    what moves a whole unit cancels.

    Raises: ValueError where no unit has them all.
    """
    units = set.intersection(*(set(found) for found in logs.values())) if logs else set()
    if not units:
        raise ValueError(f"no unit has all of {', '.join(logs) or 'nothing'}")
    means = {name: float(np.mean([found[unit] for unit in units])) for name, found in logs.items()}
    middle = float(np.mean(list(means.values())))
    return {name: mean - middle for name, mean in means.items()}


def effects(logs: Logs) -> dict[str, float]:
    """Log speed of each candidate less that of the best, by all units, also those that few
    candidates have: least squares of one effect a candidate and one a unit (two-way additive, as
    for incomplete blocks: Yates, Ann. Eugenics 7 (1936) 121).
    """
    names, units = (
        list(logs),
        list(dict.fromkeys(unit for found in logs.values() for unit in found)),
    )
    rows = [
        (i, units.index(unit), log)
        for i, name in enumerate(names)
        for unit, log in logs[name].items()
    ]
    design = np.zeros((len(rows), len(names) + len(units)))
    for row, (i, unit, _) in zip(design, rows):
        row[i] = row[len(names) + unit] = 1.0
    found = (
        np.linalg.lstsq(design, np.array([log for *_, log in rows]), rcond=None)[0][: len(names)]
        if rows
        else np.zeros(len(names))
    )
    return {name: float(value - found.max()) for name, value in zip(names, found)}


def better_half(logs: Logs, keep: int | None = None) -> tuple[str, ...]:
    """The candidates that go on: the better half of them (the larger one of an odd number), best
    first; of equals the one named first.

    Each rung measures the survivors as often again as they were before, so that a rung costs as
    much as the last and a field of n takes log2(n) of them (Karnin, Koren & Somekh, ICML 2013;
    Jamieson & Talwalkar, AISTATS 2016). Who wins is no estimate of how
    much better it is: that is measured afresh, since the best of many looks better than it is.
    """
    found = standing(logs)
    return tuple(sorted(found, key=found.get, reverse=True)[: keep or (len(found) + 1) // 2])
