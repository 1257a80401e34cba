"""The notebooks' answers in words, computed from the log."""

from __future__ import annotations

from workbench.experiment import metrics
from workbench.experiment.runlog import Block
from workbench.judge import told
from workbench.run.lab import Run


def baseline(lab: Run) -> str:
    """03_baseline: throughput without speculation, and how far the arm differs from itself."""
    blocks = [
        b
        for b in lab.records
        if isinstance(b, Block) and (b.experiment, b.role) == ("baseline", "measure")
    ]
    controls = [
        c
        for c in lab.verdict.controls
        if (c.experiment, c.metric) == ("baseline", "tokens_per_s") and c.interval
    ]
    if not controls:
        return "No answer: the plain server was not measured against itself."
    i = controls[0].interval
    caveat = (
        " On the CPU engine this says nothing about GPUs." if lab.profile.engine == "cpu" else ""
    )
    return (
        f"Without speculation {metrics.tokens_per_s(blocks):.1f} tokens/s; against itself the plain"
        f" server measures {i.ratio:.3f} ({100 * i.level:g} % interval {i.low:.3f} to {i.high:.3f},"
        f" {told.units(controls[0])}), which is the noise of a difference that servers hold both"
        f" sides of.{caveat}"
    )
