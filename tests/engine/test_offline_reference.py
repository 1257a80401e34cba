"""The server's histogram of correct drafts equals the offline reference's: what finds a wiring
fault that accept length hides.
"""

import pytest
from serving import TOKENS, ask, histogram, serving

from workbench.answers import offline_decoder, reference_draft
from workbench.serving import client


def agrees(answers, decoded) -> None:
    assert [a.output_ids for a in answers] == [d.output_ids for d in decoded]
    assert [a.histogram + (0,) * (4 - len(a.histogram)) for a in answers] == [
        d.histogram for d in decoded
    ]
    assert histogram(answers) == offline_decoder.total_histogram(decoded)


@pytest.mark.engine
def test_32_heldout_prompts_on_one_rank(tiny, heldout, decoded, logfolder):
    with serving(tiny.model_copy(update={"tp": 1}), "shared", logfolder) as up:
        agrees(ask(up, heldout[:32]), decoded)


@pytest.mark.engine
def test_32_heldout_prompts_on_two_ranks_shared_and_own(tiny, heldout, decoded, logfolder):
    """Four at once, which takes a third of the time; one by one they are asked on one rank."""
    with serving(tiny, ("shared", "own-1"), logfolder / "two") as up:
        agrees(ask(up, heldout[:32], concurrency=4), decoded)
        client.switch(up.url, "own-1", 30)
        agrees(ask(up, heldout[:32], concurrency=4), decoded)


def test_aux_layers_off_by_one_change_the_histogram(tiny, heldout, decoded):
    trained = reference_draft.Draft.load(tiny.pair.draft).layer_ids
    wrong = offline_decoder.decode(
        tiny.pair.target,
        tiny.pair.draft,
        [p["input_ids"] for p in heldout[:32]],
        TOKENS,
        3,
        [i - 1 for i in trained],
    )
    assert offline_decoder.total_histogram(wrong) != offline_decoder.total_histogram(decoded)
    assert [w.output_ids for w in wrong] == [
        d.output_ids for d in decoded
    ]  # tokens hide it: verification repairs every draft
