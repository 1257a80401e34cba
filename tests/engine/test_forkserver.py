"""Servers forked from one import of SGLang: each its own, none that was imported under other
settings, none that outlives what it was forked from.
"""

import signal

import psutil
import pytest
from serving import ask, serving

from workbench.experiment.errors import ServerFailed
from workbench.serving import client, forkserver, server, supervisor

pytestmark = pytest.mark.engine


def forked(name: str) -> bool:
    """Whether a server's launcher descends from a fork server."""
    launcher = next(p for p in supervisor.processes(name) if "sglang.launch_server" in p.cmdline())
    return any("workbench.serving.forkserver" in parent.cmdline() for parent in launcher.parents())


def test_a_forked_server_is_like_a_started_one_and_reads_no_other_servers_environment(
    tiny, heldout, decoded, logfolder
):
    """SGLANG_SIMULATE_ACC_LEN is such a variable (speculative/spec_utils.py:276): from a fork
    server without it nothing would be simulated.
    """
    environment = {"SGLANG_SIMULATE_ACC_LEN": "2.0"}
    other = tiny.model_copy(
        update={"server": tiny.server.model_copy(update={"environment": environment})}
    )
    with serving(tiny, "shared", logfolder / "forked") as up:
        assert forked(up.launch.server) and up.unattested == ()
        names = [" ".join(p.cmdline()).strip() for p in supervisor.processes(up.launch.server)]
        assert {"sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer"} <= set(
            names
        )
        assert [a.output_ids for a in ask(up, heldout[:4])] == [d.output_ids for d in decoded[:4]]
        first, ranks = up.launch.server, up.attestation
    assert (
        supervisor.processes(first) == []
        and supervisor.account(up.log.read_text())["why"] == "released"
    )
    with serving(other, "shared", logfolder / "started") as up:
        assert not forked(up.launch.server) and up.unattested == ()
        assert [entry["placements"] for entry in up.attestation] == [
            entry["placements"] for entry in ranks
        ]


@pytest.mark.long  # tests/engine/test_faults.py kills one under a run
def test_what_a_fork_server_forked_ends_with_it(tiny, logfolder, monkeypatch):
    monkeypatch.delenv(forkserver.VARIABLE)
    there = nurseries()
    with server.imported_once(tiny):
        (own,) = nurseries() - there
        with pytest.raises(ServerFailed, match="the server does not answer"):
            with serving(tiny, "none", logfolder / "orphaned") as up:
                processes = supervisor.processes(up.launch.server)
                assert forked(up.launch.server) and len(processes) >= 4
                own.send_signal(signal.SIGKILL)
                psutil.wait_procs(processes, timeout=20)
                assert supervisor.processes(up.launch.server) == [] and not up.alive()
                client.server_info(up.url)


def nurseries() -> set[psutil.Process]:
    return {
        child
        for child in psutil.Process().children()
        if "workbench.serving.forkserver" in child.cmdline()
    }
