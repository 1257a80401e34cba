"""Attestation is judged outside the server: every rank, the right group, the right shapes, equal
replicas, no planted fault.
"""

import copy
import json
import re

import pytest

from workbench.experiment.arms import Arm
from workbench.experiment.profile_sections import Speculation
from workbench.experiment.runlog import Request
from workbench.serving import attestation

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 128}


def ranks(arm: str, tp: int = 4) -> list[dict]:
    """What four healthy ranks would say."""
    parsed = Arm.parse(arm)
    size = parsed.group or tp
    return [
        {
            "rank": r,
            "omitted": [],
            "corrupt_rank": None,
            "refusing_rank": None,
            "placements": [
                {
                    "arm": arm,
                    "agreement": "broadcast",
                    "separated": parsed.placement == "own",
                    "group_ranks": list(range(r // size * size, r // size * size + size)),
                    "qkv_shape": [(8 // size + 2 * max(1, 4 // size)) * 16, 256],
                    "kv_heads": max(1, 4 // size),
                    "weights": f"w{r % size}",
                }
            ],
        }
        for r in range(tp)
    ]


@pytest.fixture
def draft(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("arm", ["shared", "own-1", "own-2"])
def test_healthy_ranks_attest(arm, draft):
    assert attestation.faults(Arm.parse(arm), ranks(arm), 4, "broadcast", draft) == []


def test_an_mla_draft_shows_its_heads_in_q_and_caches_one_latent(draft):
    (draft / "config.json").write_text(
        json.dumps(CONFIG | {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16})
    )
    said = ranks("own-2")
    assert len(attestation.faults(Arm.parse("own-2"), said, 4, "broadcast", draft)) == 8
    for entry in said:
        entry["placements"][0] |= {"qkv_shape": [4 * 48, 64], "kv_heads": 1}
    assert attestation.faults(Arm.parse("own-2"), said, 4, "broadcast", draft) == []
    said[2]["placements"][0]["qkv_shape"] = [2 * 48, 64]
    assert attestation.faults(Arm.parse("own-2"), said, 4, "broadcast", draft) == [
        "rank 2: the draft's QKV has 96 rows where TP 2 needs 192"
    ]


def _without_rank_3(said):
    said.pop()


def _planted(said):
    said[2]["corrupt_rank"] = 1


def _omitted(said):
    said[0]["omitted"] = ["kv_pool"]


def _other_arm(said):
    said[1]["placements"][0]["arm"] = "shared"


def _not_separated(said):
    said[1]["placements"][0]["separated"] = False


def _target_group(said):
    said[1]["placements"][0]["group_ranks"] = [0, 1, 2, 3]


def _other_agreement(said):
    said[3]["placements"][0]["agreement"] = "off"


def _refusing(said):
    said[3]["refusing_rank"] = 0


def _sharded_qkv(said):
    said[0]["placements"][0]["qkv_shape"] = [64, 256]


def _sharded_pool(said):
    said[0]["placements"][0]["kv_heads"] = 1


def _other_weights(said):
    said[2]["placements"][0]["weights"] = "wx"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without_rank_3, "attested by ranks"),
        (_planted, "planted fault"),
        (_omitted, "planted fault"),
        (_refusing, "planted fault"),
        (_other_arm, "does not hold own-1"),
        (_not_separated, "not separated"),
        (_target_group, "group is ranks"),
        (_other_agreement, "agreement is off"),
        (_sharded_qkv, "QKV has 64 rows"),
        (_sharded_pool, "KV pool has 1 heads"),
        (_other_weights, "differ in their weights"),
    ],
)
def test_each_fault_is_found_and_named(damage, words, draft):
    said = copy.deepcopy(ranks("own-1"))
    damage(said)
    found = attestation.faults(Arm.parse("own-1"), said, 4, "broadcast", draft)
    assert found and words in " ".join(found)


def test_a_draft_under_none_is_a_fault():
    assert (
        attestation.faults(
            Arm.parse("none"), [{"rank": r, "placements": []} for r in range(2)], 2, "broadcast"
        )
        == []
    )
    assert (
        "holds a draft"
        in attestation.faults(Arm.parse("none"), ranks("shared", 2), 2, "broadcast")[0]
    )
    assert attestation.faults(Arm.parse("none"), [], 2, "broadcast")


def test_of_several_arms_each_is_judged_by_its_own_placement(draft):
    said = [
        {**a, "placements": a["placements"] + b["placements"]}
        for a, b in zip(ranks("own-1"), ranks("shared#2"))
    ]
    assert [
        attestation.faults(Arm.parse(arm), said, 4, "broadcast", draft)
        for arm in ("own-1", "shared#2")
    ] == [[], []]
    said[0]["placements"][1]["kv_heads"] = 4
    assert attestation.faults(Arm.parse("own-1"), said, 4, "broadcast", draft) == []
    assert (
        "KV pool has 4 heads"
        in attestation.faults(Arm.parse("shared#2"), said, 4, "broadcast", draft)[0]
    )
    assert (
        "does not hold shared"
        in attestation.faults(Arm.parse("shared"), said, 4, "broadcast", draft)[0]
    )


CHAIN = Speculation(steps=2, draft_tokens=3)


def running(**changes) -> list[dict]:
    """What four ranks say of own-2+steps=2 being active."""
    return [
        {
            "arm": "own-2+steps=2",
            "steps": 2,
            "draft_tokens": 3,
            "topk": 1,
            "agreement": "broadcast",
            "timing": "on",
            "group_ranks": [[0, 1], [2, 3]][r // 2],
        }
        | (changes if r == 3 else {})
        for r in range(4)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"arm": "own-2"}, "arm own-2 where own-2\\+steps=2"),
        ({"steps": 3}, "rank 3 runs with steps 3 where 2"),
        ({"draft_tokens": 4}, "draft_tokens 4 where 3"),
        ({"topk": 2}, "topk 2 where 1"),
        ({"group_ranks": [0, 1, 2, 3]}, "group_ranks"),
        ({"agreement": "off"}, "agreement off where broadcast"),
        ({"timing": "off"}, "timing off where on"),
    ],
)
def test_the_arm_in_force_is_that_of_every_rank(changes, words):
    found = attestation.inactive_on(Arm.parse("own-2+steps=2"), running(**changes), 4, CHAIN)
    assert not found if words is None else len(found) == 1 and re.search(words, found[0])


def test_silent_ranks_and_drafts_under_none_are_inactive_on():
    assert (
        "3 of 4 ranks"
        in attestation.inactive_on(Arm.parse("own-2+steps=2"), running()[:3], 4, CHAIN)[0]
    )
    assert attestation.inactive_on(Arm.parse("none"), [{"arm": "none"}] * 2, 2, CHAIN) == []
    assert len(attestation.inactive_on(Arm.parse("none#2"), running(), 4, CHAIN)) == 4


def request(**changes) -> Request:
    return Request(
        **{
            "prompt": "p",
            "prompt_tokens": 8,
            "completion_tokens": 12,
            "sent": 0,
            "end": 1,
            "verify_ct": 5,
            "proposed": 10,
            "correct": 6,
            "histogram": (1, 2, 2),
        }
        | changes
    )


@pytest.mark.parametrize(
    ("requests", "rounds", "verified", "words"),
    [
        ([request()], {"draft": 5, "verify": 5, "draft_extend": 5}, {"3": 5}, None),
        (
            [request()],
            {"draft": 6, "verify": 6},
            {"3": 6},
            None,
        ),  # the overlap loop drafts one round ahead
        (
            [request(), request()],
            {"draft": 5, "verify": 5},
            {"3": 5},
            None,
        ),  # rounds are shared by a batch
        (
            [request()],
            {"draft": 5, "verify": 5},
            {"3": 4, "2": 1},
            "2 draft tokens were verified at once where 3",
        ),
        ([request()], {"draft": 4, "verify": 5}, {"3": 5}, "4 rounds drafted and 5 verified"),
        (
            [request(proposed=15)],
            {"draft": 5, "verify": 5},
            {"3": 5},
            "15 proposed drafts in 5 rounds of 2",
        ),
        (
            [request(histogram=(1, 2, 1, 1))],
            {"draft": 5, "verify": 5},
            {"3": 5},
            "up to 3 correct drafts",
        ),
        ([request(histogram=(1, 2, 1))], {"draft": 5, "verify": 5}, {"3": 5}, "counts 4 rounds"),
        ([request()], {"draft": 4, "verify": 4}, {"3": 4}, "fewer than one request alone"),
    ],
)
def test_counts_are_those_of_the_arm(requests, rounds, verified, words):
    found = attestation.miscounted(Arm.parse("own-1+steps=2"), CHAIN, requests, rounds, verified)
    assert not found if words is None else len(found) == 1 and words in found[0]


def test_counts_without_drafts():
    idle = Speculation(steps=0, draft_tokens=1)
    unknown = request(verify_ct=None, proposed=None, correct=None, histogram=None)
    assert (
        attestation.miscounted(
            Arm.parse("shared+steps=0"), idle, [unknown], {"verify": 5}, {"1": 5}
        )
        == []
    )
    assert attestation.miscounted(
        Arm.parse("shared+steps=0"), idle, [unknown], {"verify": 5, "draft": 5}, {"1": 5}
    )
    assert attestation.miscounted(Arm.parse("none"), CHAIN, [unknown], {"decode": 12}, {}) == []
    assert attestation.miscounted(Arm.parse("none"), CHAIN, [unknown], {"verify": 12}, {"4": 12})
