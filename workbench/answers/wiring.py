"""Is the served pair wired as it was trained? The server's histogram of correct drafts against the
offline reference's.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.experiment.errors import BadInput
from workbench.experiment.runlog import Block, Request
from workbench.judge.findings import Wiring
from workbench.run.lab import Run


def check(lab: Run) -> Wiring:
    """What was found; ok is None where it was not checked, with the reason in the sentence.

    What the log holds is not checked again.

    The server's side is the parity prompts of the arm shared, one at a time, as a chain. Exact
    equality is owed in fp32 on the CPU
    engine only: elsewhere rounding moves single drafts.
    """
    if (kept := lab.finding("wiring", Wiring)) is not None:
        return kept
    if lab.recording:  # the pair it was measured with need not be here
        return Wiring(ok=None, sentence="Not checked when this was recorded.")
    profile = lab.profile
    blocks = [
        b
        for b in lab.records
        if isinstance(b, Block) and (b.role, b.arm, b.concurrency) == ("parity", "shared", 1)
    ]
    if not blocks:
        return Wiring(ok=None, sentence="Not checked: the arm shared answered no parity prompts.")
    if profile.engine != "cpu" or profile.speculation.topk != 1:
        return Wiring(
            ok=None,
            sentence="Not checked: exact counts are owed on the CPU engine and for a chain only.",
        )
    requests = blocks[0].requests
    if any(request.error or request.histogram is None for request in requests):
        return Wiring(
            ok=None,
            sentence="Not checked: the server did not report how many drafts were correct.",
        )
    try:
        return _against_reference(lab, requests)
    except BadInput as error:  # a class or an option that the reference does not have
        return Wiring(ok=None, sentence=f"Not checked: {error.field}: {error.problem}.")


def _against_reference(lab: Run, requests: Sequence[Request]) -> Wiring:
    """Raises: BadInput where the pair has no offline reference."""
    from workbench.answers import (
        offline_decoder,  # torch and transformers, seconds that no other case needs
        reference_draft,
    )

    profile = lab.profile
    by_id = {str(prompt["id"]): prompt["input_ids"] for prompt in lab.prompts}
    prompts, tokens, steps = (
        [by_id[r.prompt] for r in requests],
        requests[0].completion_tokens,
        profile.speculation.steps,
    )

    def histogram(layers: list[int] | None = None) -> tuple[int, ...]:
        return offline_decoder.total_histogram(
            offline_decoder.decode(
                profile.pair.target, profile.pair.draft, prompts, tokens, steps, layers
            )
        )

    counts = [0] * (steps + 1)
    for request in requests:
        for correct, rounds in enumerate(request.histogram):
            counts[correct] += rounds
    trained = (
        list(profile.pair.trained_layers)
        if profile.pair.trained_layers
        else list(reference_draft.Draft.load(profile.pair.draft).layer_ids)
    )
    expected, alternatives = histogram(trained), {}
    if tuple(counts) != expected:
        for words, shift in (
            ("the layer below each aux layer", -1),
            ("the layer above each aux layer", 1),
        ):
            try:
                alternatives[words] = histogram([layer + shift for layer in trained])
            except BadInput:
                continue  # there is no such layer
    return Wiring(
        ok=tuple(counts) == expected,
        sentence=offline_decoder.diagnose(counts, expected, alternatives),
        server=counts,
        reference=list(expected),
        alternatives={words: list(found) for words, found in alternatives.items()},
    )
