"""06_collectives: which setting of the communication layer is best, from a run's log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from workbench.answers.steps import best_of, caveat, searched
from workbench.experiment import communication, halving, metrics, setting_sweep
from workbench.experiment.arms import Arm
from workbench.experiment.communication import Facts
from workbench.experiment.names import COLLECTIVES
from workbench.experiment.profile import Profile
from workbench.experiment.runlog import Block, Line
from workbench.judge.findings import SettingTried
from workbench.report import tables
from workbench.report.tables import SPEED
from workbench.run.lab import Run
from workbench.serving import gpus


def facts(run: Run) -> Facts:
    """The facts of the machine that a run is measured on, kept in its log; of a recording that
    holds none, only what its profile says.
    """
    kept = run.finding("communication", Facts)
    if kept is not None:
        return kept
    if run.recording:
        return Facts(run.profile.engine, run.profile.tp)
    found = gpus.facts(run.profile)
    # What rules look at; the rest of the environment is nobody's business.
    asked = ("NCCL_", "TORCH_SYMM_MEM_")
    public = {name: value for name, value in found.environment.items() if name.startswith(asked)}
    return run.record_finding("collectives", "communication", replace(found, environment=public))


def settings_map(
    profile: Profile, records: Sequence[Line], facts: communication.Facts
) -> pd.DataFrame:
    """One row a setting of the communication layer: what it is made of, whether it was tried, and
    its speed beside the best one's.

    Speed is that of the search, by rounds of server starts; of a single setting there is none.
    """
    tried, skipped = communication.choose(facts, profile.sweep.settings)
    broken, arms = setting_sweep.failed(records), setting_sweep.settings_arms(profile)
    logs: dict[str, dict[int, float]] = {}
    for b in searched(records, COLLECTIVES):
        if (comm := Arm.parse(b.arm).comm) and (speed := metrics.tokens_per_s([b])):
            logs.setdefault(comm, {})[b.pair, b.arm.removesuffix(f"+comm={comm}")] = math.log(speed)
    told = halving.effects(logs)
    compared = {
        Arm.parse(b.arm).comm
        for b in records
        if isinstance(b, Block) and (b.experiment, b.role) == (COLLECTIVES, "measure")
    }
    rows = []
    for name in [*tried, *skipped]:
        setting = communication.SETTINGS[name]
        made = (
            " ".join(
                [
                    *(f"{key}={value}" for key, value in setting.environment.items()),
                    *(f"--{flag}" for flag in setting.flags),
                ]
            )
            or "nothing"
        )
        state = (
            skipped.get(name)
            and f"skipped: {skipped[name]}"
            or broken.get(name)
            and f"failed: {broken[name].splitlines()[0]}"
            or ("compared" if name in compared else "searched" if name in logs else "not tried yet")
        )
        rows.append(
            (
                name,
                made,
                state,
                100 * math.exp(told[name]) if name in told else math.nan,
                len({pair for pair, _ in logs.get(name, ())}),
                setting.about,
            )
        )
    return pd.DataFrame(
        rows,
        columns=[
            "setting",
            "made of",
            "state",
            SPEED,
            f"blocks of {' and of '.join(arms)}",
            "about",
        ],
    )


def kept_settings(run: Run, facts: Facts) -> pd.DataFrame:
    """``settings_map`` as the run's log keeps it, from now on."""
    found = settings_map(run.profile, run.records, facts).to_dict("records")
    tried = [SettingTried.model_validate(row) for row in found]
    return tables.settings(run.record_finding(COLLECTIVES, "settings", tried, list[SettingTried]))


def collectives_answer(lab: Run, facts: communication.Facts) -> str:
    """06's answer: the best setting of the communication layer with its interval against none, and
    how many could not be tried.
    """
    profile = lab.profile
    tried, skipped = communication.choose(facts, profile.sweep.settings)
    rows = [
        c
        for c in lab.verdict.comparisons
        if c.experiment == COLLECTIVES
        and Arm.parse(c.a).comm
        and not Arm.parse(c.b).comm
        and Arm.parse(c.a).placement == Arm.parse(c.b).placement
    ]
    said = (
        [
            best_of(
                rows,
                profile,
                "The best by a setting of the communication layer is",
                "No setting of the communication layer",
                "the same arm without",
            )
        ]
        if tried
        else ["No setting of the communication layer can be tried here."]
    )
    broken = setting_sweep.failed(lab.records)
    said.append(
        f"{len(tried)} setting{'s' * (len(tried) != 1)} tried, {len(skipped)} skipped,"
        f" {len(broken)} failed."
    )
    return " ".join([*said, *caveat(profile)])
