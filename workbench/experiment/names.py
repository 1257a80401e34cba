"""What the experiments of the sweeps are called in the log, and what an older log says by the name
alone.
"""

from __future__ import annotations

STEPS, COLLECTIVES = "steps", "collectives"
_AT = f"{STEPS}_at_"


def at_load(load: int) -> str:
    """The experiment in which 05_steps compares the best settings at so many requests at once."""
    return f"{_AT}{load}"


def load_of(experiment: str) -> int | None:
    """The requests at once of such an experiment; None for every other one.

    Verdict files and older logs say it by the name alone: this is their reader.
    """
    load = experiment.removeprefix(_AT)
    return int(load) if load != experiment and load.isdecimal() else None


def is_sweep(experiment: str) -> bool:
    """Whether an experiment is one of 05's or 06's, which compare settings where the others compare
    placements.
    """
    return experiment in (STEPS, COLLECTIVES) or load_of(experiment) is not None
