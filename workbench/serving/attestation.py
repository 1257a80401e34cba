"""The placement check: is the ordered arm active on every rank? Judged outside the server: from
what each rank reports, the draft's own config, and counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.experiment import communication
from workbench.experiment.arms import Arm
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import Speculation
from workbench.experiment.runlog import Request


def faults(
    arm: Arm,
    attestation: Sequence[Mapping],
    tp: int,
    agreement: str,
    draft: Path | None = None,
    nodes: int = 1,
) -> list[str]:
    """Why the arm fails the placement check, one sentence each; empty when it passes.

    attestation: one entry a rank (workbench/engine/attest.py).
    draft: the draft's folder, whose config gives the expected shapes.
    nodes: over how many the ranks are spread, consecutive ones on each.
    """
    ranks = sorted(entry.get("rank", -1) for entry in attestation)
    if ranks != list(range(tp)):
        return [f"attested by ranks {ranks} of {tp}"]
    found = []
    for entry in attestation:
        where, node = f"rank {entry['rank']}", entry["rank"] // (tp // nodes)
        if entry.get("node", 0) != node:
            found.append(f"{where} is on node {entry.get('node', 0)} where {node} was ordered")
        if (
            entry.get("omitted")
            or entry.get("corrupt_rank") is not None
            or entry.get("refusing_rank") is not None
        ):
            found.append(f"{where} runs with a planted fault")
        placements = {p["arm"]: p for p in entry.get("placements", ())}
        if not arm.speculates:
            if placements:
                found.append(f"{where} holds a draft under the arm none")
            continue
        if arm.name not in placements:
            found.append(f"{where} does not hold {arm.name}")
            continue
        found += [
            f"{where}: {problem}"
            for problem in _placement(arm, placements[arm.name], entry, tp, agreement, draft)
        ]
    return found + (_replicas(arm, attestation) if arm.speculates and not found else [])


def inactive_on(arm: Arm, active: Sequence[Mapping], tp: int, asked: Speculation) -> list[str]:
    """Why the arm is not the active one on every rank, one sentence each; empty when it is.

    active: one entry a rank, read from the worker that runs (workbench/engine/arm_switch.py).
    asked: what the arm is served with.
    """
    if len(active) != tp:
        return [f"{len(active)} of {tp} ranks said which arm is in force"]
    size, found = arm.group or tp, []
    for rank, said in enumerate(active):
        first = rank // size * size
        expected = (
            {
                "arm": arm.name,
                "steps": asked.steps,
                "draft_tokens": asked.draft_tokens,
                "topk": asked.topk,
                "timing": asked.timing,
                "group_ranks": list(range(first, first + size)),
            }
            if arm.speculates
            else {"arm": "none"}
        )
        found += [
            f"rank {rank} runs with {key} {said.get(key)} where {value} was ordered"
            for key, value in expected.items()
            if said.get(key) != value
        ]
        if arm.placement == "own" and said.get("agreement") != asked.agreement:
            found.append(
                f"rank {rank} runs with agreement {said.get('agreement')} where {asked.agreement}"
                " was ordered"
            )
    return found


def miscounted(
    arm: Arm,
    asked: Speculation,
    requests: Sequence[Request],
    rounds: Mapping[str, int],
    verified: Mapping[str, int],
) -> list[str]:
    """Why a block's counts are not those of the arm: tokens alone cannot tell, since verification
    repairs every draft.

    rounds: of the server by stage.
    verified: its verify rounds by the number of draft tokens of a request, both over the block.
    """
    if not arm.speculates:
        return ["drafts were verified under the arm none"] if rounds.get("verify") else []
    found = []
    if widths := sorted(width for width in verified if int(width) != asked.draft_tokens):
        found.append(
            f"{', '.join(widths)} draft tokens were verified at once where {asked.draft_tokens}"
            " were ordered"
        )
    if rounds.get("draft", 0) != (rounds.get("verify", 0) if asked.steps else 0):
        found.append(
            f"{rounds.get('draft', 0)} rounds drafted and {rounds.get('verify', 0)} verified"
        )
    known = [r for r in requests if r.error is None and r.verify_ct is not None]
    for r in known:
        if r.proposed != r.verify_ct * (asked.draft_tokens - 1):
            found.append(
                f"request {r.prompt} counts {r.proposed} proposed drafts in {r.verify_ct} rounds of"
                f" {asked.draft_tokens - 1}"
            )
        if r.histogram and (sum(r.histogram) != r.verify_ct or len(r.histogram) > asked.steps + 1):
            found.append(
                f"request {r.prompt} counts {sum(r.histogram)} rounds up to {len(r.histogram) - 1}"
                f" correct drafts, and verified {r.verify_ct} of {asked.steps} steps"
            )
    if known and rounds.get("verify", 0) < max(r.verify_ct for r in known):
        found.append(
            f"the server verified {rounds.get('verify', 0)} rounds, fewer than one request alone"
        )
    return found


def _placement(
    arm: Arm, placed: Mapping, entry: Mapping, tp: int, agreement: str, draft: Path | None
) -> list[str]:
    size = arm.group or tp
    first = entry["rank"] // size * size
    expected = list(range(first, first + size))
    found = []
    if placed["separated"] != (arm.placement == "own"):
        found.append(f"the draft is {'' if placed['separated'] else 'not '}separated")
    if placed["group_ranks"] != expected:
        found.append(
            f"the draft's group is ranks {placed['group_ranks']} where {expected} were ordered"
        )
    if arm.placement == "own" and placed["agreement"] != agreement:
        found.append(f"agreement is {placed['agreement']} where {agreement} was ordered")
    if draft is not None:
        rows, kv = _sharded(json.loads((draft / "config.json").read_text()), size)
        if placed["qkv_shape"][0] != rows:
            found.append(
                f"the draft's QKV has {placed['qkv_shape'][0]} rows where TP {size} needs {rows}"
            )
        if placed["kv_heads"] != kv:
            found.append(
                f"the draft's KV pool has {placed['kv_heads']} heads where TP {size} needs {kv}"
            )
    return found


def _sharded(config: Mapping, size: int) -> tuple[int, int]:
    """Rows of the draft's QKV and heads of its KV pool on one of ``size`` ranks, by its
    config.json.

    With MLA the rank's heads show in Q's second projection (models/deepseek_v2.py:2078 q_b_proj),
    and every rank caches the one latent.
    """
    heads, kv = (
        config["num_attention_heads"],
        config.get("num_key_value_heads", config["num_attention_heads"]),
    )
    if config.get("kv_lora_rank"):
        return heads // size * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]), 1
    # A KV head is replicated where there are more ranks than heads (SGLang's QKVParallelLinear,
    # layers/linear.py).
    width, kv = config.get("head_dim") or config["hidden_size"] // heads, max(1, kv // size)
    return (heads // size + 2 * kv) * width, kv


def _replicas(arm: Arm, attestation: Sequence[Mapping]) -> list[str]:
    """Ranks at the same place of their groups must hold equal weights. Ranks that decide
    apart whether to share the embedding have made acceptance collapse.
    """
    digests: dict[int, set[str]] = {}
    for entry in attestation:
        placed = next(p for p in entry["placements"] if p["arm"] == arm.name)
        digests.setdefault(placed["group_ranks"].index(entry["rank"]), set()).add(placed["weights"])
    return [
        f"replicas of the draft's shard {place} differ in their weights"
        for place, seen in digests.items()
        if len(seen) > 1
    ]


def launcher_faults(profile: Profile, launcher: Mapping[str, Any] | None) -> list[str]:
    """Why a server of token ids is not one; empty when it built no tokenizer and no processor, or
    was not asked to do without.

    launcher: what the server's first process says of itself (workbench/engine/token_ids.py).
    """
    if not profile.flag("skip-tokenizer-init", False):
        return []
    if launcher is None:
        return ["the launcher does not say whether it built a tokenizer"]
    return [
        f"the launcher built a {name} from the target's folder under skip-tokenizer-init"
        for name in launcher["built"]
    ]


def communication_faults(name: str | None, attestation: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why a setting is not active on every rank, one sentence each; empty when it is, or when
    nothing was ordered.
    """
    setting, found = communication.SETTINGS.get(name or ""), []
    for entry in attestation if setting else ():
        said, where = entry.get("communication") or {}, f"rank {entry.get('rank')}"
        found += [
            f"{where} runs with {variable}={(said.get('environment') or {}).get(variable)} where"
            f" {name} needs {value}"
            for variable, value in setting.environment.items()
            if (said.get("environment") or {}).get(variable) != value
        ]
        found += [
            f"{where} runs {'without' if wanted else 'with'} the {kind} communicator under {name}"
            for kind, wanted in setting.expects.items()
            if bool(said.get(kind)) != wanted
        ]
    return found
