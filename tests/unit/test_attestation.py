"""Attestation is judged outside the server: every rank, the right group, the right shapes, equal replicas, no planted fault."""
import copy
import json

import pytest

from workbench import attestation
from workbench.arms import Arm

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 128}


def ranks(arm: str, tp: int = 4) -> list[dict]:
    """What four healthy ranks would say."""
    parsed = Arm.parse(arm)
    size = parsed.group or tp
    return [{"rank": r, "agreement": "broadcast", "omitted": [], "corrupt_rank": None, "placements": [{
        "arm": arm, "separated": parsed.placement == "own", "group_ranks": list(range(r // size * size, r // size * size + size)),
        "qkv_shape": [(8 // size + 2 * max(1, 4 // size)) * 16, 256], "kv_heads": max(1, 4 // size), "weights": f"w{r % size}"}]}
        for r in range(tp)]


@pytest.fixture
def draft(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("arm", ["shared", "own-1", "own-2"])
def test_healthy_ranks_attest(arm, draft):
    assert attestation.faults(Arm.parse(arm), ranks(arm), 4, "broadcast", draft) == []


def _without_rank_3(said): said.pop()
def _planted(said): said[2]["corrupt_rank"] = 1
def _omitted(said): said[0]["omitted"] = ["kv_pool"]
def _other_arm(said): said[1]["placements"][0]["arm"] = "shared"
def _not_separated(said): said[1]["placements"][0]["separated"] = False
def _target_group(said): said[1]["placements"][0]["group_ranks"] = [0, 1, 2, 3]
def _other_agreement(said): said[3]["agreement"] = "off"
def _sharded_qkv(said): said[0]["placements"][0]["qkv_shape"] = [64, 256]
def _sharded_pool(said): said[0]["placements"][0]["kv_heads"] = 1
def _other_weights(said): said[2]["placements"][0]["weights"] = "wx"


@pytest.mark.parametrize(("damage", "words"), [
    (_without_rank_3, "attested by ranks"), (_planted, "planted fault"), (_omitted, "planted fault"), (_other_arm, "does not hold own-1"),
    (_not_separated, "not separated"), (_target_group, "group is ranks"), (_other_agreement, "agreement is off"),
    (_sharded_qkv, "QKV has 64 rows"), (_sharded_pool, "KV pool has 1 heads"), (_other_weights, "differ in their weights"),
])
def test_each_fault_is_found_and_named(damage, words, draft):
    said = copy.deepcopy(ranks("own-1"))
    damage(said)
    found = attestation.faults(Arm.parse("own-1"), said, 4, "broadcast", draft)
    assert found and words in " ".join(found)


def test_a_draft_under_none_is_a_fault():
    assert attestation.faults(Arm.parse("none"), [{"rank": r, "placements": []} for r in range(2)], 2, "broadcast") == []
    assert "holds a draft" in attestation.faults(Arm.parse("none"), ranks("shared", 2), 2, "broadcast")[0]
    assert attestation.faults(Arm.parse("none"), [], 2, "broadcast")
