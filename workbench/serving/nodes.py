"""The nodes of a server: which ranks lie where, how a node's part is started and kept there, and
what does not go together.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence

from workbench.experiment.checks import Check, passed, refused, warned
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import ROOT, Node


def flags(profile: Profile, node: int, port: int) -> dict[str, str | int]:
    """SGLang's flags of one node's part; none of a server on one node. port: where the ranks find
    each other, on the first node.
    """
    if len(profile.nodes) == 1:
        return {}
    return {
        "nnodes": len(profile.nodes),
        "node-rank": node,
        "dist-init-addr": f"{profile.nodes[0].address}:{port}",
    }


def environment(profile: Profile) -> dict[str, str]:
    """Gloo looks for an interface by the host's own name, which on loopback need not resolve."""
    return {"GLOO_SOCKET_IFNAME": "lo"} if len(profile.nodes) > 1 and profile.on_loopback else {}


def supervisor_command(
    node: Node, environment_: Mapping[str, str], command: Sequence[str]
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The command that runs a supervisor on a node, and the environment to start it with here.

    A node that is reached takes one shell command, as ssh does; the supervisor there holds the same
    pipe, through that connection. The repository, its environment and the folder of the logs must
    have one path on every node.
    """
    kept = [sys.executable, "-m", "workbench.serving.supervisor", *command]
    if not node.reach:
        return tuple(kept), environment_
    words = ["env", *(f"{key}={value}" for key, value in environment_.items()), *kept]
    return (*node.reach, f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(words)}"), {}


def check(profile: Profile) -> Iterator[Check]:
    """Whether the ranks can be spread over the nodes, and every node can be reached; nothing for a
    server on one node.
    """
    first, *others = profile.nodes
    if not others:
        return
    if profile.tp % len(profile.nodes):
        yield refused(
            "nodes",
            f"are {len(profile.nodes)}, which does not divide TP {profile.tp}",
            "give as many as divide it",
        )
        return
    if len({node.name for node in profile.nodes}) < len(profile.nodes):
        yield refused("nodes", "have one name twice", "give each a name of its own")
    if first.reach:
        yield refused(
            "nodes",
            f"begin with {first.name}, which is to be reached",
            "name the machine that the workbench runs on first",
        )
    beside = [node.name for node in others if not node.reach]
    if beside and profile.engine == "cuda":
        yield refused(
            "nodes",
            f"of GPUs are machines of their own, and there is no way to reach {beside[0]}",
            "give its reach, e.g. [ssh, gpu2]",
        )
    if profile.on_loopback and any(node.reach for node in others):
        yield warned(
            "nodes",
            f"begin with {first.address}, which only this machine can reach",
            "give the first one's address if others are elsewhere",
        )
    yield passed("nodes", sentence(profile))


def sentence(profile: Profile) -> str:
    """The nodes in words: names, ranks, and how the further ones are reached."""
    each = profile.ranks_a_node
    told = [
        f"{node.name}{f' by {shlex.join(node.reach)}' if node.reach else ''}"
        for node in profile.nodes
    ]
    return f"{len(told)} of {each} rank{'s' * (each > 1)} each: {', '.join(told)}"
