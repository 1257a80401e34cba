"""Nodes: how a server's parts are started on each, which groups would straddle them, and what is
refused before anything starts.
"""

import os
import sys
import time

import fake_gpus
import pytest

from tests.simulated import PROFILE, records
from workbench.experiment import profile
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput, ServerFailed
from workbench.experiment.profile_sections import ROOT, Node
from workbench.experiment.runlog import NodeStart, Start
from workbench.predict import preflight
from workbench.report import report
from workbench.serving import launch_command, nodes, server, supervisor
from workbench.serving.attestation import faults
from workbench.serving.launch_command import Part

# In each process of these tests another server's.
FAR = f"far-server-{os.getpid()}"


def spread(given, **changes) -> profile.Profile:
    return profile.load("cpu-tiny", {"nodes": given, **changes})


def flags_of(part: Part) -> dict[str, str]:
    return dict(zip(part.command, part.command[1:]))


def said(found, name: str = "nodes") -> list[tuple[str, str]]:
    return [(check.status, check.detail) for check in found if check.name == name]


def test_a_number_stands_for_as_many_on_loopback_and_survives_being_written_down(tmp_path):
    two = spread(2)
    assert [node.name for node in two.nodes] == ["node-0", "node-1"] and {
        node.address for node in two.nodes
    } == {"127.0.0.1"}
    (tmp_path / "profile.json").write_text(two.model_dump_json())
    assert profile.load(tmp_path / "profile.json") == two
    with pytest.raises(BadInput, match="nodes: give a number from 1 to 64 or a list"):
        spread(0)


def test_a_server_on_one_node_is_started_as_ever():
    [part] = launch_command.plan(spread(1), Arm("shared"), port=7, server="x").parts
    assert (
        not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(part.command)
        and "GLOO_SOCKET_IFNAME" not in part.environment
    )
    assert nodes.supervisor_command(part.node, part.environment, part.command) == (
        (sys.executable, "-m", "workbench.serving.supervisor", *part.command),
        part.environment,
    )
    assert list(nodes.check(spread(1))) == []


def test_each_node_gets_its_part_and_its_own_port():
    launch = launch_command.plan(spread(2, tp=4), Arm("own", 2), port=7, server="x")
    first, second = map(flags_of, launch.parts)
    assert (first["--nnodes"], first["--node-rank"], second["--node-rank"]) == ("2", "0", "1")
    assert first["--dist-init-addr"] == second["--dist-init-addr"] and first[
        "--dist-init-addr"
    ].startswith("127.0.0.1:")
    assert first["--port"] == "7" != second["--port"] and first["--tp"] == second["--tp"] == "4"
    assert all(part.environment["GLOO_SOCKET_IFNAME"] == "lo" for part in launch.parts)
    # SGLang counts the ranks of a node from 0 on every node.
    assert [
        len(part.environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) for part in launch.parts
    ] == [2, 2]
    assert (
        launch.parts[0].environment["DRAFT_TP_ORDERS"]
        == launch.parts[1].environment["DRAFT_TP_ORDERS"]
    )
    told = server.describe(launch)
    assert told["command"][0] == "python" and [part.name for part in told["further"]] == ["node-1"]


def test_elsewhere_gloo_is_not_told_to_use_loopback():
    far = spread([{"name": "a", "address": "10.0.0.1"}, {"name": "b", "reach": ["ssh", "b"]}])
    assert all(
        "GLOO_SOCKET_IFNAME" not in part.environment
        for part in launch_command.plan(far, Arm("shared"), port=7, server="x").parts
    )
    assert flags_of(launch_command.plan(far, Arm("shared"), port=7, server="x").parts[1])[
        "--dist-init-addr"
    ].startswith("10.0.0.1:")


@pytest.mark.parametrize(
    ("given", "changes", "words"),
    [
        (3, {}, "are 3, which does not divide TP 2"),
        ([{"name": "a"}, {"name": "a"}], {}, "one name twice"),
        (
            [{"name": "a", "reach": ["ssh", "a"]}, {"name": "b"}],
            {},
            "begin with a, which is to be reached",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused(given, changes, words):
    assert any(
        status == "refused" and words in detail
        for status, detail in said(preflight.check(spread(given, **changes)))
    )


def test_nodes_of_gpus_are_machines_that_can_be_reached(monkeypatch):
    def checked(given):
        return said(nodes.check(spread(given).model_copy(update={"engine": "cuda"})))

    assert any(
        "there is no way to reach node-1" in detail
        for status, detail in checked(2)
        if status == "refused"
    )
    found = checked([{"name": "a", "address": "10.0.0.1"}, {"name": "b", "reach": ["ssh", "b"]}])
    assert found == [("passed", "2 of 1 rank each: a, b by ssh b")]
    assert checked([{"name": "a"}, {"name": "b", "reach": ["ssh", "b"]}])[0] == (
        "warned",
        "begin with 127.0.0.1, which only this machine can reach",
    )
    # Only the ranks of this node need a GPU here.
    two = spread(
        [{"name": "a", "address": "10.0.0.1"}, {"name": "b", "reach": ["ssh", "b"]}]
    ).model_copy(update={"engine": "cuda"})
    fake_gpus.install(monkeypatch, ["GPU-a"], [80 << 30])
    assert said(preflight.check(two), "engine") == [
        ("passed", "cuda: 1 devices of this node with at least 80.00 GiB free each")
    ]


def test_a_group_that_would_straddle_nodes_is_refused_in_one_sentence():
    found = preflight.check(spread(2, tp=4, arms=["none", "own-4", "own-2", "own-1"]))
    assert said(found, "plan.arms own-4")[0] == (
        "refused",
        "is a group of 4 that would straddle nodes of 2 ranks",
    )
    assert {
        status for name in ("own-2", "own-1") for status, _ in said(found, f"plan.arms {name}")
    } == {"passed"}
    with pytest.raises(
        BadInput,
        match=r"plan\.arms own-2: is a group of 2 that would straddle nodes of 1 rank; use own-1\.",
    ):
        preflight.refuse(preflight.check(spread(2, arms=["shared", "own-2"])))


@pytest.mark.parametrize("flag", ["nnodes", "node-rank", "dist-init-addr"])
def test_sglangs_own_flags_are_the_profiles(flag):
    tiny = profile.load("cpu-tiny")
    tiny = tiny.model_copy(
        update={"server": tiny.server.model_copy(update={"flags": {**tiny.server.flags, flag: 2}})}
    )
    assert [
        (c.status, c.mend) for c in preflight.check(tiny) if c.name == f"server.flags.{flag}"
    ] == [("refused", "give it as nodes")]


def test_a_rank_on_another_node_is_a_fault():
    attested = [
        {
            "rank": rank,
            "node": node,
            "placements": [
                {"arm": "shared", "separated": False, "group_ranks": [0, 1], "weights": "w"}
            ],
        }
        for rank, node in ((0, 0), (1, 1))
    ]
    assert faults(Arm("shared"), attested, 2, "broadcast", nodes=2) == []
    assert faults(Arm("shared"), attested, 2, "broadcast") == [
        "rank 1 is on node 1 where 0 was ordered"
    ]


def test_a_node_is_reached_by_one_shell_command_and_its_keeper_ends_with_the_pipe(tmp_path):
    """A part behind a connection that takes a shell command, as ssh does, here sh itself; the
    environment and quotes arrive.
    """
    far = Node(name="far", reach=("sh", "-c"))
    code = (
        "import os, sys, time; print(os.environ['ODD'], sys.argv[1], flush=True); time.sleep(600)"
    )
    kept = server._keep(
        FAR,
        Part(far, (sys.executable, "-c", code, "a 'quoted' $word"), {"ODD": 'it\'s "odd" $HOME'}),
        tmp_path / "log",
    )
    until = time.monotonic() + 30
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        assert time.monotonic() < until and kept.poll() is None
        time.sleep(0.05)
    assert (tmp_path / "log").read_text() == "it's \"odd\" $HOME a 'quoted' $word\n"
    said, _ = kept.communicate(timeout=30)
    assert supervisor.account(said)["left"] == [] and kept.returncode == 0
    assert supervisor.processes(FAR) == []


def test_a_node_that_dies_ends_the_server_with_its_own_log(tmp_path, monkeypatch):
    """The second node's part fails; the first one, which would wait for it, is ended too."""
    waits = (sys.executable, "-c", "import time; time.sleep(600)")
    fails = (sys.executable, "-c", "raise SystemExit('draft-tp: the second node failed')")
    parts = tuple(Part(node, command, {}) for node, command in zip(spread(2).nodes, (waits, fails)))
    monkeypatch.setattr(server, "plan", lambda *_, **__: launch_command.Launch(FAR, 1, parts, None))
    with pytest.raises(ServerFailed, match="died while starting: the second node failed"):
        with server.serve(spread(2), Arm("shared"), tmp_path / "x.log"):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-node-1.log", "x.log"]
    assert supervisor.processes(FAR) == []


def test_the_report_names_the_nodes():
    start = next(record for record in records() if isinstance(record, Start)).model_copy(
        update={
            "further": (
                NodeStart(
                    name="gpu2", command=("python", "--node-rank", "1"), environment={"A": "b"}
                ),
            )
        }
    )
    setting = PROFILE | {"nodes": [{"name": "gpu1"}, {"name": "gpu2"}]}
    assert ("target TP", "2 ranks on 2 nodes (gpu1, gpu2)") in report.conditions([], setting)
    assert ("target TP", "2 ranks") in report.conditions([], PROFILE)
    assert report.commands([start], {})[-1] == (
        "Server of shared, own-1 (draft_tp), its part on gpu2",
        "A=b python --node-rank 1",
    )
    assert str(ROOT) not in str(report.commands([start], {}))
