"""A target of Kimi's class (MLA, experts, YaRN) with a LLaMA-like and with an MLA draft: both
placements in one server, against the reference.

The reference's tokens are those of the target alone; that the arm none serves the same was tried
once and is what the replay checks of any pair.
"""

import json

import mla_draft
import pytest
from serving import ask, histogram, memory, per_round, serving

from workbench.answers import memory_check, offline_decoder, reference_models
from workbench.experiment import profile
from workbench.serving import client

pytestmark = pytest.mark.engine
PROMPTS, TOKENS = 4, 32


@pytest.fixture(scope="module")
def kimi() -> profile.Profile:
    return profile.load("cpu-tiny-kimi")


@pytest.fixture(scope="module")
def prompts(kimi) -> list[dict]:
    return json.loads(kimi.workload.prompts.read_text())[:PROMPTS]


@pytest.fixture(scope="module")
def decoded(kimi, prompts) -> list[reference_models.Decoded]:
    return offline_decoder.decode(
        kimi.pair.target, kimi.pair.draft, [p["input_ids"] for p in prompts], TOKENS, 3
    )


def test_shared_and_own_1_give_the_targets_own_tokens_and_the_references_counts(
    kimi, prompts, decoded, logfolder, tmp_path
):
    with serving(kimi, ("shared", "own-1"), logfolder / "kimi") as up:
        assert up.unattested == ()
        held = memory(up, kimi, tmp_path)
        assert len(held) == 11 and held["off (%)"].abs().max() <= memory_check.WITHIN, (
            held.to_string()
        )
        for arm, collectives in (("shared", (8, 4)), ("own-1", (1, 0))):
            before = client.switch(up.url, arm, 30)
            alone, together = (ask(up, prompts, concurrency, TOKENS) for concurrency in (1, 4))
            assert (
                [a.output_ids for a in alone]
                == [a.output_ids for a in together]
                == [d.output_ids for d in decoded]
            )
            assert (
                histogram(alone) == histogram(together) == offline_decoder.total_histogram(decoded)
            )
            rounds = per_round(up, before["counts"])
            assert (rounds["draft"], rounds["draft_extend"]) == collectives


def test_a_draft_of_kimis_own_class_is_placed_as_a_llama_like_one(
    kimi, prompts, decoded, logfolder, tmp_path
):
    """There is no reference of it, so the placements are held against each other: some of its
    drafts are right, and the same ones under both.
    """
    chosen = mla_draft.beside(kimi, tmp_path / "draft")
    with serving(chosen, ("shared", "own-1"), logfolder / "kimi-mla") as up:
        assert up.unattested == ()
        held = memory(up, chosen, tmp_path)
        assert len(held) == 11 and held["off (%)"].abs().max() <= memory_check.WITHIN, (
            held.to_string()
        )
        counted = {}
        # fc is split over the draft's group, so draft-extend gathers once more than with a
        # LLaMA-like draft.
        for arm, collectives in (("shared", (8, 5)), ("own-1", (1, 0))):
            before = client.switch(up.url, arm, 30)
            answers = ask(up, prompts, PROMPTS, TOKENS)
            assert [a.output_ids for a in answers] == [d.output_ids for d in decoded]
            rounds, counted[arm] = per_round(up, before["counts"]), histogram(answers)
            assert (rounds["draft"], rounds["draft_extend"]) == collectives
        assert counted["shared"] == counted["own-1"] and sum(counted["shared"][1:]) > 0
