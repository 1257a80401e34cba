"""The replay's promises, read from what one whole replay leaves behind."""

import json

import nbformat
import pytest
from replaying import SHORT, replay

from workbench.experiment import runlog
from workbench.experiment.runlog import Block, Finding, Start
from workbench.replay import NOTEBOOKS
from workbench.serving import supervisor

pytestmark = pytest.mark.engine
TREE = "+topk=2+draft_tokens=6"


def test_it_ends_with_a_valid_result(replayed):
    assert replayed.status == 0, replayed.said[-3000:]
    assert replayed.verdict["valid"] and replayed.verdict["reasons"] == []
    assert (replayed.verdict["engine"], replayed.verdict["source"], replayed.verdict["schema"]) == (
        "cpu",
        "live",
        1,
    )
    assert "CPU engine" in replayed.verdict["sentence"]


def test_tokens_are_those_of_the_target_alone(replayed):
    parity = replayed.verdict["parity"]
    assert {
        arm: parity[arm] for arm in ("shared", "own-1", f"shared{TREE}", f"own-1{TREE}")
    } == dict.fromkeys(("shared", "own-1", f"shared{TREE}", f"own-1{TREE}"), "identical")
    counts = {
        entry["arm"]: entry
        for entry in replayed.verdict["parity_counts"]
        if entry["experiment"] == "draft_tp"
    }
    assert all(
        counts[arm]["compared"] >= 24 and counts[arm]["mismatched"] == 0
        for arm in ("shared", "own-1")
    )


def test_at_least_twelve_prompts_one_by_one_and_four_at_once(replayed):
    blocks = [
        r
        for r in runlog.read(replayed.folder / "runs.jsonl")
        if isinstance(r, Block) and r.role == "parity"
    ]
    assert {b.concurrency for b in blocks} == {1, 4}
    assert all(len({r.prompt for r in b.requests}) >= 12 for b in blocks)


def test_accept_lengths_of_shared_and_own_1_are_equal(replayed):
    arms = replayed.verdict["arms"]
    assert arms["shared"]["accept_length"] == arms["own-1"]["accept_length"] >= 3.0
    assert arms["none"]["accept_length"] is None


def test_collectives_of_the_draft_stage(replayed):
    arms = replayed.verdict["arms"]
    assert arms["shared"]["collectives_per_round"]["draft"] == 8
    assert arms["own-1"]["collectives_per_round"]["draft"] == 1
    assert arms["own-1+agreement=off"]["collectives_per_round"]["draft"] == 0
    assert arms["own-1"]["collectives_per_round"]["draft_extend"] == 0
    assert arms["shared"]["collectives_per_round"]["draft_extend"] == 4
    assert (
        arms["shared"]["collectives_per_round"]["verify"]
        == arms["own-1"]["collectives_per_round"]["verify"]
    )


def test_every_arm_passes_the_placement_check_on_every_rank(replayed):
    assert all(facts["attested"] for facts in replayed.verdict["arms"].values())
    starts = [r for r in runlog.read(replayed.folder / "runs.jsonl") if isinstance(r, Start)]
    assert starts and all(
        [entry["rank"] for entry in start.attestation] == [0, 1] for start in starts
    )


def test_differences_carry_interval_control_and_resolution(replayed):
    verdict = replayed.verdict
    compared = {(c["a"], c["b"]) for c in verdict["comparisons"] if c["metric"] == "tokens_per_s"}
    assert {("own-1", "shared"), ("shared", "none"), ("own-1", "none")} <= compared
    assert all(
        c["low"] < c["ratio"] < c["high"] and c["resolution"] > 0 for c in verdict["comparisons"]
    )
    assert verdict["control"] and all(
        c["low"] < 1 < c["high"] or c["valid"] for c in verdict["controls"]
    )


def test_the_pair_is_wired_as_trained(replayed):
    found = next(
        r
        for r in runlog.read(replayed.folder / "runs.jsonl")
        if isinstance(r, Finding) and r.name == "wiring"
    )
    assert found.value["ok"] is True and found.value["server"] == found.value["reference"]


def test_the_folder_holds_what_is_promised(replayed):
    folder = replayed.folder
    assert {
        "runs.jsonl",
        "provenance.json",
        "verdict.json",
        "report.html",
        "notebooks",
        "logs",
    } <= {p.name for p in folder.iterdir()}
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["versions"]["sglang"] == "0.5.23" and all(provenance["hashes"].values())
    for notebook in NOTEBOOKS:
        cells = nbformat.read(folder / "notebooks" / f"{notebook.name}.ipynb", as_version=4).cells
        assert any(cell.get("outputs") for cell in cells) and not any(
            "widget-view" in json.dumps(cell) for cell in cells
        )


def test_nothing_is_left_behind(replayed):
    servers = [
        r.server for r in runlog.read(replayed.folder / "runs.jsonl") if isinstance(r, Block)
    ]
    assert servers and all(supervisor.processes(server) == [] for server in set(servers))


def test_resuming_measures_nothing_again(replayed):
    before = (replayed.folder / "runs.jsonl").read_bytes()
    again = replay(replayed.folder, "--resume", *SHORT)
    assert (
        again.status == replayed.status and (replayed.folder / "runs.jsonl").read_bytes() == before
    )


def test_the_cycle_is_predicted_before_and_explained_after(replayed):
    found = {
        (r.experiment, r.name): r.value
        for r in runlog.read(replayed.folder / "runs.jsonl")
        if isinstance(r, Finding)
    }
    assert (
        found["budget", "machine"]["engine"] == "cpu"
        and found["budget", "machine"]["seconds"] < 120
    )
    assert (
        "A cycle of shared takes" in found["cycle", "answer"]
        and "With nothing taken from the run, the model" in found["cycle", "model"]
    )
    assert all(
        found[notebook, "answer"].endswith("not a statement about GPUs.")
        for notebook in ("budget", "cycle")
    )
