"""On which metric the claim of a comparison rests: the cycle time where accept lengths are equal,
else tokens/s with the noise of the accept length.
"""

from __future__ import annotations

from workbench.experiment.arms import Arm
from workbench.experiment.metrics import RunView
from workbench.judge.samples import blocks_of

HELD, EQUAL = "held by simulation", "equal in every answer"


def equal_lengths(run: RunView, experiment: str, a: str, b: str) -> str | None:
    """Why two arms have equal accept lengths; None where that is not known, or one drafts nothing.

    Tokens/s is accept length over cycle time, so that with equal lengths the cycle's ratio says
    the same without the noise of the accept length: SGLang holds the length by simulation, or
    every measured prompt took both arms the same rounds to the same number of tokens.
    """
    if not (Arm.parse(a).speculates and Arm.parse(b).speculates):
        return None
    if run.acceptance_simulated(experiment):
        specs = [run.profile.speculation.of(Arm.parse(arm)) for arm in (a, b)]
        # Held at one length whatever is drafted, unless one drafts fewer than are to be accepted.
        return HELD if specs[0].steps == specs[1].steps else None
    ours, theirs = (_counts(run, experiment, arm) for arm in (a, b))
    if not ours or not theirs or None in ours.values() or None in theirs.values():
        return None
    return EQUAL if ours == theirs else None


def _counts(run: RunView, experiment: str, arm: str) -> dict[str, tuple[int, int, int] | None]:
    """{prompt: (tokens, rounds, correct drafts)} of an arm's answers; None for a prompt whose
    answers differ among themselves, or do not say.
    """
    found: dict[str, tuple[int, int, int] | None] = {}
    for r in (r for block in blocks_of(run, experiment, arm) for r in block.requests):
        known = r.error is None and r.verify_ct is not None and r.correct is not None
        counts = (r.completion_tokens, r.verify_ct, r.correct) if known else None
        found[r.prompt] = counts if found.get(r.prompt, counts) == counts else None
    return found
