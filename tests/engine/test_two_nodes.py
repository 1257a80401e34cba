"""A server of two nodes, started SGLang's own way on this machine's loopback: the same tokens,
groups that stay on their node, nothing left.
"""

import pytest
from serving import ask, histogram, memory, per_round, serving

from workbench.answers import memory_check, offline_decoder
from workbench.experiment import profile
from workbench.serving import client, supervisor

pytestmark = pytest.mark.engine
NODES = [
    {"name": "here"},
    {"name": "there", "reach": ["sh", "-c"]},
]  # sh takes the second part as ssh would


def test_shared_and_own_1_on_two_nodes_give_the_targets_own_tokens(
    heldout, decoded, logfolder, tmp_path
):
    two = profile.load("cpu-tiny", {"nodes": NODES})
    with serving(two, ("shared", "own-1"), logfolder / "nodes") as up:
        assert up.unattested == () and [
            (entry["rank"], entry["node"]) for entry in up.attestation
        ] == [(0, 0), (1, 1)]
        assert [
            [placed["group_ranks"] for placed in entry["placements"]] for entry in up.attestation
        ] == [[[0, 1], [0]], [[0, 1], [1]]]
        held = memory(up, two, tmp_path)
        assert len(held) == 11 and held["off (%)"].abs().max() <= memory_check.WITHIN, (
            held.to_string()
        )
        for arm, collectives in (("shared", (8, 4)), ("own-1", (1, 0))):
            before = client.switch(up.url, arm, 30)
            answers = ask(up, heldout[:4]) + ask(up, heldout[:4], concurrency=4)
            assert [a.output_ids for a in answers] == 2 * [d.output_ids for d in decoded[:4]]
            assert histogram(answers[:4]) == offline_decoder.total_histogram(decoded[:4])
            rounds = per_round(up, before["counts"])
            assert (rounds["draft"], rounds["draft_extend"], rounds["verify"]) == (*collectives, 14)
    assert supervisor.processes(up.launch.server) == []
    assert (up.log.with_name(f"{up.log.stem}-there.log")).read_text()
