"""A target of Kimi's class (MLA, experts, YaRN) with its LLaMA-like draft: both placements in one server, against the reference.

The reference's tokens are those of the target alone; that the arm none serves the same was tried once and is what the replay checks of any pair.
"""
import pytest
from serving import ask, histogram, memory, per_round, serving

from workbench import client, footprint, profile, reference, server

pytestmark = pytest.mark.engine
PROMPTS, TOKENS = 4, 32


def test_shared_and_own_1_give_the_targets_own_tokens_and_the_references_counts(logfolder, tmp_path):
    kimi = profile.load("cpu-tiny-kimi")
    prompts = list(server.prompts(kimi.workload.prompts))[:PROMPTS]
    decoded = reference.decode(kimi.pair.target, kimi.pair.draft, [p["input_ids"] for p in prompts], TOKENS, 3)
    with serving(kimi, ("shared", "own-1"), logfolder / "kimi") as up:
        assert up.unattested == ()
        held = memory(up, kimi, tmp_path)
        assert len(held) == 11 and held["off (%)"].abs().max() <= footprint.WITHIN, held.to_string()
        for arm, collectives in (("shared", (8, 4)), ("own-1", (1, 0))):
            before = client.switch(up.url, arm, 30)
            alone, together = (ask(up, prompts, concurrency, TOKENS) for concurrency in (1, 4))
            assert [a.output_ids for a in alone] == [a.output_ids for a in together] == [d.output_ids for d in decoded]
            assert histogram(alone) == histogram(together) == reference.total_histogram(decoded)
            rounds = per_round(up, before["counts"])
            assert (rounds["draft"], rounds["draft_extend"]) == collectives
