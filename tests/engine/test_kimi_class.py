"""A target of Kimi's class (MLA, experts, YaRN), plain and in the published wrapper, with a
LLaMA-like and with an MLA draft: both placements in one server, against the reference.

The reference's tokens are those of the plain target alone. The wrapper's folder brings code that
raises when it is run, and a vision tower that nobody asks for.
"""

import json

import kimi_folders
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


@pytest.fixture(scope="module")
def wrapped(kimi, tmp_path_factory) -> profile.Profile:
    folder = kimi_folders.wrapped(kimi.pair.target, tmp_path_factory.mktemp("kimi") / "wrapped")
    server = kimi.server.model_copy(
        update={"flags": {**kimi.flags, "skip-tokenizer-init": True}, "trust_remote_code": False}
    )
    pair = kimi.pair.model_copy(update={"target": folder})
    return kimi.model_copy(update={"pair": pair, "server": server})


@pytest.fixture(params=["plain", "wrapped"])
def chosen(request, kimi, wrapped) -> profile.Profile:
    return {"plain": kimi, "wrapped": wrapped}[request.param]


def test_shared_and_own_1_give_the_targets_own_tokens_and_the_references_counts(
    chosen, prompts, decoded, logfolder, tmp_path
):
    with serving(chosen, ("shared", "own-1"), logfolder / chosen.pair.target.name) as up:
        assert up.unattested == ()
        held = memory(up, chosen, tmp_path)
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


def test_the_wrapped_target_alone_gives_the_same_tokens(wrapped, prompts, decoded, logfolder):
    with serving(wrapped, "none", logfolder / "wrapped-none") as up:
        assert up.unattested == ()
        assert client.server_info(up.url)["draft_tp"]["launcher"] == {"built": []}
        answers = ask(up, prompts, PROMPTS, TOKENS)
        assert [a.output_ids for a in answers] == [d.output_ids for d in decoded]


def test_a_draft_of_kimis_own_class_is_placed_as_a_llama_like_one(
    wrapped, prompts, decoded, logfolder, tmp_path
):
    """There is no reference of it, so the placements are held against each other: some of its
    drafts are right, and the same ones under both.
    """
    chosen = mla_draft.beside(wrapped, tmp_path / "draft")
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
