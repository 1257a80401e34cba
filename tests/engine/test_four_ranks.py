"""TP4 on two cores: own-1, own-2 and shared give the target's own tokens, agree in their drafts and pay their own collectives only."""
import pytest
from serving import ask, histogram, per_round, serving

from workbench.reference import total_histogram

# A draft forward makes 3 all-reduces (embedding, attention output, MLP output) and 1 all-gather of logits on a group of more than one
# rank; 3 steps are 2 forwards in draft and 1 in draft-extend. The agreement of a separated draft is one broadcast.
EXPECTED = {"shared": (8, 4), "own-2": (8 + 1, 4), "own-1": (1, 0)}


@pytest.mark.engine
@pytest.mark.parametrize("arm", EXPECTED)
def test_tokens_drafts_and_collectives(arm, tiny, heldout, decoded, logfolder):
    with serving(tiny.model_copy(update={"tp": 4}), arm, logfolder) as up:
        assert up.unattested == ()
        alone, together = ask(up, heldout[:8]), ask(up, heldout[:8], concurrency=4)
        rounds = per_round(up)
        placed = [entry["placements"][0] for entry in up.attestation]
    assert [a.output_ids for a in alone] == [d.output_ids for d in decoded[:8]]
    assert [a.output_ids for a in together] == [d.output_ids for d in decoded[:8]]
    assert histogram(alone) == total_histogram(decoded[:8])
    assert (rounds["draft"], rounds["draft_extend"]) == EXPECTED[arm]
    size = {"shared": 4, "own-2": 2, "own-1": 1}[arm]
    assert [p["group_ranks"] for p in placed] == [list(range(r // size * size, r // size * size + size)) for r in range(4)]
