"""What a profile's cycle should take, before anything is measured there: every stage, tokens/s, and
from which latency on a draft of its own pays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from workbench.experiment.arms import Arm
from workbench.experiment.profile import SIMULATED_ACCEPTANCE, Profile
from workbench.predict import by_hand, cycle_time
from workbench.predict.cycle_time import Prediction
from workbench.predict.machine import Machine
from workbench.predict.model_shape import ModelShape


@dataclass(frozen=True)
class Estimate:
    """Predicted cycles of none, shared and every own-N of a profile.

    accept_length: tokens a cycle, the same for every arm; None where nobody said one.
    """

    profile: Profile
    target: ModelShape
    draft: ModelShape
    machine: Machine
    arms: Mapping[str, Prediction]
    accept_length: float | None


def estimate(profile: Profile, target: ModelShape, draft: ModelShape, machine: Machine) -> Estimate:
    """The device's part alone: what the host needs between two graphs is not in it.

    Raises: BadInput where a size or an input of the machine is not known.
    """
    how = {"context": profile.workload.max_new_tokens / 2}
    arms = {
        "none": cycle_time.predict(profile, target, None, Arm("none"), machine, **how)
    } | cycle_time.by_placement(profile, target, draft, machine, **how)
    length = profile.reported.accept_length if profile.reported else _simulated(profile)
    return Estimate(profile, target, draft, machine, arms, length)


def _simulated(profile: Profile) -> float | None:
    held = profile.server.environment.get(SIMULATED_ACCEPTANCE)
    return float(held) if profile.acceptance_simulated else None


def stages(found: Estimate) -> pd.DataFrame:
    """One row a stage of an arm, in milliseconds a cycle, by what takes them."""
    rows = [
        (
            arm,
            stage,
            1e3 * cost.work_s,
            1e3 * cost.collective_s,
            1e3 * cost.launch_s,
            1e3 * cost.total_s,
        )
        for arm, prediction in found.arms.items()
        for stage, cost in prediction.stages.items()
    ]
    columns = ["arm", "stage", "weights and KV", "collectives", "launches", "all (ms)"]
    return pd.DataFrame(rows, columns=columns)


def arms(found: Estimate) -> pd.DataFrame:
    """One row an arm: its cycle, tokens/s at the accept length, and the accept length at which it
    is as fast as none. Beside it what the profile's story measured.
    """
    plain = found.arms["none"].device_s
    told = found.profile.reported
    rows = []
    for arm, prediction in found.arms.items():
        cycle, speculates = prediction.device_s, arm != "none"
        tokens = found.accept_length if speculates else 1.0
        rows.append(
            {
                "arm": arm,
                "cycle (ms)": 1e3 * cycle,
                "tokens/s": tokens / cycle if tokens else None,
                "breaks even at": cycle / plain if speculates else None,
                "own-N wins from (us)": wins_from_us(found, arm),
                "reported cycle (ms)": told.cycle_ms(arm) if told else None,
                "reported tokens/s": told.rate(arm) if told else None,
            }
        )
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def wins_from_us(found: Estimate, arm: str) -> float | None:
    """Microseconds of one collective from which own-N's cycle is shorter than shared's; None for
    other arms, and where it never is.

    Both cycles are straight lines in the latency, so two points of each tell where they cross.
    """
    if Arm.parse(arm).placement != "own":
        return None
    how = {"context": found.profile.workload.max_new_tokens / 2}

    def behind(latency: float) -> float:
        inputs = {"collective_latency": latency}
        machine = by_hand.machine(found.machine, found.machine.ranks, inputs)
        own, shared = (
            cycle_time.predict(found.profile, found.target, found.draft, one, machine, **how)
            for one in (Arm.parse(arm), Arm("shared"))
        )
        return own.device_s - shared.device_s

    first, second = behind(1e-6), behind(2e-6)
    if second >= first:  # it makes no fewer collectives
        return None
    return max(0.0, 1 + first / (first - second))


def sentences(found: Estimate, source: str, given: Mapping[str, float]) -> list[str]:
    """What the tables stand on, and what they say."""
    table = arms(found).set_index("arm")
    best = min((arm for arm in found.arms if arm != "none"), key=lambda a: found.arms[a].device_s)
    shared = found.arms["shared"]
    said = [f"Inputs: {source}."]
    if given:
        values = ", ".join(f"{name} {value:g}" for name, value in given.items())
        said.append(f"Given by hand: {values}.")
    said.append(
        "What the host needs between two graphs is not in these cycles; a measured cycle is longer"
        " by what of it the device waits for."
    )
    least = 1e3 * found.arms[best].device_s
    said.append(
        f"The shortest cycle of a draft is {best}'s, {least:.1f} ms"
        + ("." if best == "shared" else f", where shared's is {1e3 * shared.device_s:.1f} ms.")
    )
    if "own-N wins from (us)" in table:
        crossings = table["own-N wins from (us)"].dropna()
        said.append(
            "Below that latency a draft of its own loses to shared: "
            + ", ".join(f"{arm} {at:.0f} us" for arm, at in crossings.items())
            + "."
        )
    if told := found.profile.reported:
        gap = told.cycle_ms("shared") - 1e3 * shared.device_s
        said.append(
            f"Reported was a cycle of {told.cycle_ms('shared'):.1f} ms, by {told.source}:"
            f" {gap:.1f} ms more than the device's work explains."
        )
    return said
