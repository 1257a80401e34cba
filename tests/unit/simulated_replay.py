"""A run folder in which everything is measured already, by simulation: notebooks that run on it
start no server. No measurement of anything.
"""

from __future__ import annotations

from pathlib import Path

from simulated_sweeps import play, steps_of

from workbench.experiment import plans, setting_sweep, sweeps
from workbench.experiment.runlog import Block, Finding, RunLog
from workbench.run.lab import Run, open_lab

LABEL = Finding(
    experiment="simulated",
    name="simulated",
    time="2026-01-01T00:00:00Z",
    value="Made by tests/unit/simulated_replay.py: no measurement.",
)


def measured(folder: Path, profile: str = "cpu-tiny") -> Run:
    """The lab of such a folder. Answers that are compared have no histogram, so that nothing holds
    them against the real pair.
    """
    lab = open_lab(profile, folder)
    chosen, prompts = lab.profile, len(lab.prompts)

    def speed(task):
        return (1.05 if task.planned.arm.startswith("own") else 1.0) * (
            1 - 0.04 * abs(3 - (steps_of(chosen, task) or 3))
        )

    records = [LABEL]
    for plan in (
        lambda _: plans.baseline(chosen, prompts),
        lambda _: plans.draft_tp(chosen, prompts),
        sweeps.steps(chosen, prompts),
        setting_sweep.collectives(chosen, prompts, chosen.sweep.settings),
    ):
        records = play(plan, speed, spread=0.005, noise=0.004, records=records)
    with RunLog(folder / "runs.jsonl") as file:
        for record in records:
            file.append(_unchecked(record) if isinstance(record, Block) else record)
    return lab


def _unchecked(block: Block) -> Block:
    answered = block.role == "parity"
    return block.model_copy(
        update={
            "requests": tuple(
                r.model_copy(
                    update={
                        "finish": "length",
                        "completion_tokens": 24 if answered else 32,
                        **({"histogram": None} if answered else {}),
                    }
                )
                for r in block.requests
            )
        }
    )
