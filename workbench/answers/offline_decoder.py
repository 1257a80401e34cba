"""The offline reference: greedy EAGLE-3 decoding in plain torch and transformers, counted round by
round as SGLang 0.5.23 counts.

A mis-wired draft (hidden states of the wrong layers, say) hardly moves the accept length, but it
moves the histogram of correct drafts; on the CPU engine in float32 a server's histogram equals this
one exactly. No SGLang is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.answers.reference_models import Decoded, Reference, trimmed


def total_histogram(decoded: Sequence[Decoded]) -> tuple[int, ...]:
    """Rounds by number of correct drafts, summed over the prompts."""
    return tuple(map(sum, zip(*(d.histogram for d in decoded), strict=True)))


def accept_length(histogram: Sequence[int]) -> float:
    """Tokens a round, bonus token included; histogram: rounds by number of correct drafts."""
    return 1 + sum(correct * rounds for correct, rounds in enumerate(histogram)) / sum(histogram)


def decode(
    target_folder: Path | str,
    draft_folder: Path | str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    steps: int,
    aux_layers: Sequence[int] | None = None,
) -> list[Decoded]:
    """Greedy float32 EAGLE-3 with a chain of ``steps`` drafts, as a server does it with ignore_eos;
    one entry a prompt.

    prompts: token ids.
    aux_layers: ids in place of the draft's eagle_aux_hidden_state_layer_ids (a simulated fault).
    Raises: BadInput for a pair or ids that cannot be decoded.
    """
    return Reference.load(target_folder, draft_folder, aux_layers).decode(
        prompts, max_new_tokens, steps
    )


def diagnose(
    server_histogram: Sequence[int],
    reference_histogram: Sequence[int],
    alternatives: Mapping[str, Sequence[int]],
) -> str:
    """What a server's histogram says about its wiring, in one sentence.

    alternatives: histograms of the reference with a known fault, by a few words that name it ("the
        layer below each aux layer").
    """
    server, reference = trimmed(server_histogram), trimmed(reference_histogram)
    if not sum(server):
        return (
            "The server reported no verify round, so nothing can be said about the draft's wiring."
        )
    if server == reference:
        return (
            "The server's histogram of correct drafts equals the offline reference: the draft is"
            " wired as its config says."
        )
    matching = [name for name, histogram in alternatives.items() if trimmed(histogram) == server]
    lengths = f"accept length {accept_length(server):.2f} against {accept_length(reference):.2f}"
    if matching:
        return (
            "The suspect is wiring: the server's histogram of correct drafts is that of"
            f" {' or '.join(matching)} ({lengths})."
        )
    return (
        "The suspect is wiring: the server's histogram of correct drafts is not the offline"
        f" reference's, nor that of a known fault ({lengths})."
    )
