"""Is the ordered arm in force on every rank? Judged outside the server, from what each rank attested and from the draft's own config."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.arms import Arm


def faults(arm: Arm, attestation: Sequence[Mapping], tp: int, agreement: str, draft: Path | None = None) -> list[str]:
    """Why the arm is not attested, one sentence each; empty when it is in force on every rank.

    attestation: one entry a rank (workbench/engine/attest.py). draft: the draft's folder, whose config gives the expected shapes.
    """
    ranks = sorted(entry.get("rank", -1) for entry in attestation)
    if ranks != list(range(tp)):
        return [f"attested by ranks {ranks} of {tp}"]
    found = []
    for entry in attestation:
        where = f"rank {entry['rank']}"
        if entry.get("omitted") or entry.get("corrupt_rank") is not None:
            found.append(f"{where} runs with a planted fault")
        placements = {p["arm"]: p for p in entry.get("placements", ())}
        if not arm.speculates:
            if placements:
                found.append(f"{where} holds a draft under the arm none")
            continue
        name = arm.configuration.name
        if name not in placements:
            found.append(f"{where} does not hold {name}")
            continue
        found += [f"{where}: {problem}" for problem in _placement(arm, placements[name], entry, tp, agreement, draft)]
    return found + (_replicas(arm, attestation) if arm.speculates and not found else [])


def _placement(arm: Arm, placed: Mapping, entry: Mapping, tp: int, agreement: str, draft: Path | None) -> list[str]:
    size = arm.group or tp
    first = entry["rank"] // size * size
    expected = list(range(first, first + size))
    found = []
    if placed["separated"] != (arm.placement == "own"):
        found.append(f"the draft is {'' if placed['separated'] else 'not '}separated")
    if placed["group_ranks"] != expected:
        found.append(f"the draft's group is ranks {placed['group_ranks']} where {expected} were ordered")
    if arm.placement == "own" and entry["agreement"] != agreement:
        found.append(f"agreement is {entry['agreement']} where {agreement} was ordered")
    if draft is not None:
        config = json.loads((draft / "config.json").read_text())
        heads, kv = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
        width = config.get("head_dim") or config["hidden_size"] // heads
        # A KV head is replicated where there are more ranks than heads (SGLang's QKVParallelLinear, layers/linear.py).
        rows = (heads // size + 2 * max(1, kv // size)) * width
        if placed["qkv_shape"][0] != rows:
            found.append(f"the draft's QKV has {placed['qkv_shape'][0]} rows where TP {size} needs {rows}")
        if placed["kv_heads"] != max(1, kv // size):
            found.append(f"the draft's KV pool has {placed['kv_heads']} heads where TP {size} needs {max(1, kv // size)}")
    return found


def _replicas(arm: Arm, attestation: Sequence[Mapping]) -> list[str]:
    """Ranks at the same place of their groups must hold equal weights (field report F20: ranks that decided apart)."""
    digests: dict[int, set[str]] = {}
    for entry in attestation:
        placed = next(p for p in entry["placements"] if p["arm"] == arm.configuration.name)
        digests.setdefault(placed["group_ranks"].index(entry["rank"]), set()).add(placed["weights"])
    return [f"replicas of the draft's shard {place} differ in their weights" for place, seen in digests.items() if len(seen) > 1]
