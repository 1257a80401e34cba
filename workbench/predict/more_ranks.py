"""Predictions for more ranks than a machine was measured with, to be written down before anything
is measured there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from workbench.experiment.arms import Arm
from workbench.experiment.profile import Profile
from workbench.predict import cycle_time, model_shape
from workbench.predict.basis import Basis
from workbench.predict.machine import Machine

LEAST, MOST = "latencies as measured", "latencies by ring steps"


def widened(machine: Machine, ranks: int, by_steps: bool) -> Machine:
    """The machine with ``ranks`` ranks, its latencies extrapolated to every group of them from the
    largest that was measured.

    Bytes, operations and launches are one rank's and stay.
    by_steps: a collective takes as many times longer as a ring has more steps, n - 1 for each pass
        (Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
        MPICH, 2005, section 3), which is much for one hop through a switch; else it takes no longer
        than measured, which is little. The truth is expected between them.
    """
    groups = [n for n in range(2, ranks + 1) if ranks % n == 0]
    latencies = [
        replace(
            t,
            ranks=n,
            points=tuple(
                (size, seconds * ((n - 1) / (t.ranks - 1) if by_steps else 1))
                for size, seconds in t.points
            ),
        )
        for t in machine.latencies
        if t.ranks == machine.ranks
        for n in groups
    ]
    return replace(machine, ranks=ranks, latencies=tuple(latencies))


def table(profile: Profile, found: Basis) -> pd.DataFrame:
    """One row a placement: milliseconds of the device's work in a cycle, and tokens/s over shared's
    by the device alone and with the host as the basis knows it, each with the latencies as
    measured and by ring steps.

    found: the inputs of the machine as measured with fewer ranks. The accept length is the same for
        every arm, so a ratio of tokens/s is that of cycles, turned over.
    """
    target, draft = (
        model_shape.read(getattr(profile.pair, side), f"pair.{side}")
        for side in ("target", "draft")
    )
    columns: dict[str, Mapping[str, float]] = {}
    for how, by_steps in ((LEAST, False), (MOST, True)):
        told = cycle_time.by_placement(
            profile,
            target,
            draft,
            widened(found.inputs, profile.tp, by_steps),
            context=profile.workload.max_new_tokens / 2,
        )
        told = {arm: replace(p, host_s=found.host_s(Arm.parse(arm))) for arm, p in told.items()}
        columns |= {
            f"device (ms), {how}": {arm: 1e3 * p.device_s for arm, p in told.items()},
            f"÷ shared, {how}": {
                arm: told["shared"].device_s / p.device_s for arm, p in told.items()
            },
            f"with the host, {how}": {
                arm: told["shared"].cycle_s / p.cycle_s for arm, p in told.items()
            },
        }
    return pd.DataFrame(columns).rename_axis("arm").reset_index()


def sentence(profile: Profile, found: Basis) -> str:
    """What of the table is extrapolated, in words."""
    host = (
        f"the host needs {1e3 * found.host_s(Arm('shared')):.3g} ms a cycle of shared and"
        f" {1e3 * found.host_s(Arm('own', 1)):.3g} of own-N, as in recorded:{found.host_from}"
        if found.host_from
        else "what the host needs is not known and left out"
    )
    return (
        f"Latencies of groups of up to {profile.tp} ranks are not measured: they are taken as those"
        f" of {found.inputs.ranks} ranks, or with a ring's steps; {host}."
    )
