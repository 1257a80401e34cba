"""Agreement of the ranks' drafts: every rank must verify the same tree, or the target's collectives
deadlock.
"""

from __future__ import annotations

import torch

from workbench.engine import placement
from workbench.engine.hooks import Hook
from workbench.engine.orders import Orders


class RanksDisagreed(RuntimeError):
    """The ranks drafted different trees for the same batch; the server ends."""


def hooks(orders: Orders) -> list[Hook]:
    """One hook on the tail of draft() (eagle_worker_common.py:377 build_eagle_verify_input), where
    each rank still holds its own tree.
    """
    if not orders.separates or (
        orders.corrupt_rank is None and all(arm.agreement == "off" for arm in orders.arms)
    ):
        return []

    def agree(
        original,
        batch,
        draft_input,
        parent_list,
        top_scores_index,
        draft_tokens,
        draft_probs,
        **keywords,
    ):
        tree = parent_list, top_scores_index, draft_tokens
        if not batch.forward_mode.is_idle() and placement.is_separated_now():
            group = placement.target_group()
            if group.rank_in_group == orders.corrupt_rank:
                tree = (*tree[:2], draft_tokens.roll(1, -1) + 1)
            asked = placement.active().agreement
            if asked == "broadcast":
                tree = broadcast(tree, group, chain=keywords["topk"] == 1)
            elif asked == "check":
                check(tree, group)
        return original(batch, draft_input, *tree, draft_probs, **keywords)

    return [
        Hook(
            "sglang.srt.speculative.eagle_worker_common.build_eagle_verify_input",
            agree,
            (
                "batch",
                "draft_input",
                "parent_list",
                "top_scores_index",
                "draft_tokens",
                "draft_probs",
                "target_worker",
                "topk",
                "num_steps",
                "num_draft_tokens",
                "tree_mask_mode",
                "device",
            ),
        )
    ]


def broadcast(tree: tuple[torch.Tensor, ...], group, *, chain: bool) -> tuple[torch.Tensor, ...]:
    """Rank 0's tree on every rank, by one collective.

    A chain (topk 1) has the same parents and order on every rank by construction
    (eagle_worker_v2.py, _rebuild_topk1_chain_buffers), so its tokens are all that has to agree; a
    tree is packed into one int64 tensor.
    """
    parents, order, tokens = tree
    if chain:
        return parents, order, group.broadcast(tokens.contiguous().clone(), src=0)
    packed = group.broadcast(torch.cat([part.reshape(-1).to(torch.int64) for part in tree]), src=0)
    parts = packed.split([part.numel() for part in tree])
    return tuple(new.view(old.shape).to(old.dtype) for new, old in zip(parts, tree))


def check(tree: tuple[torch.Tensor, ...], group) -> None:
    """Raises: RanksDisagreed, on every rank alike, when any rank's tree differs from rank 0's."""
    packed = torch.cat([part.reshape(-1).to(torch.int64) for part in tree]).unsqueeze(0)
    everyone = group.all_gather(packed, dim=0)
    different = (everyone != everyone[:1]).any(dim=1).nonzero().flatten().tolist()
    if different:
        raise RanksDisagreed(
            f"ranks {different} drafted another tree than rank 0: run with agreement broadcast, and"
            " find what differs"
        )
