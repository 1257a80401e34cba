"""EAGLE's token tree in plain torch: build it from the draft's choices, and accept its longest
greedy path.
"""

from __future__ import annotations

import torch

# sglang/kernels/ops/speculative/spec_tree.py:46 TreeMaskMode
FULL_MASK, QLEN_ONLY = 0, 1


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
) -> None:
    """Link the selected draft tokens of each request into a tree under its last committed token
    (node 0).

    With N = draft_token_num, node i > 0 is the candidate numbered ``selected_index[b, i - 1]`` ([B,
    N - 1], ascending). The draft
    numbers its candidates step after step: topk in the first, then topk for each of the topk that
    it kept in the step before (speculative/spec_utils.py:417 _select_top_k_tokens_first). So
    candidate c was drafted from the kept token c // topk, where 0 is node 0 and any other is
    candidate ``parent_list[b, c // topk]`` ([B, topk * (depth - 1) + 1], empty at depth 1).

    Written in place: tree_mask, flat bool, what each node sees (its ancestors and itself; a
    FULL_MASK row starts with the request's prefix, left as it is); positions [B * N], depth in the
    tree plus verified_seq_len [B]; retrive_index [B, N], the node's number in the batch;
    retrive_next_token and retrive_next_sibling [B, N], a node's first child and next sibling (their
    -1, none, is the caller's). A node whose parent was not selected is linked nowhere and sees node
    0 and itself.
    Call site: sglang/kernels/ops/speculative/spec_tree.py:412 sgl_build_tree_kernel_efficient_cpu.
    Raises: NotImplementedError for the bit-packed mask.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            "build_tree_kernel_efficient_cpu: a bit-packed tree mask has no CPU stand-in"
        )
    batch, nodes = len(verified_seq_len), draft_token_num
    parent = _parents(parent_list, selected_index, topk)
    linked, above = parent >= 0, parent.clamp(min=0)
    rows = torch.arange(batch)
    retrive_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    for node in range(nodes - 1, 0, -1):  # backwards, so that the first child ends up in front
        row = rows[linked[:, node]]
        retrive_next_sibling[row, node] = retrive_next_token[row, parent[row, node]]
        retrive_next_token[row, parent[row, node]] = node

    sees = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    sees[:, :, 0] = True
    at, level = torch.arange(nodes).repeat(batch, 1), torch.zeros(batch, nodes, dtype=torch.long)
    for _ in range(depth):  # all nodes climb together; node 0 stays where it is
        sees.scatter_(2, at.unsqueeze(2), True)
        level += at > 0
        at = above.gather(1, at)
    positions.copy_((verified_seq_len.unsqueeze(1) + level).flatten())
    prefixes = verified_seq_len.tolist() if tree_mask_mode == FULL_MASK else [0] * batch
    sizes = [nodes * (prefix + nodes) for prefix in prefixes]
    for mask, prefix, seen in zip(tree_mask[: sum(sizes)].split(sizes), prefixes, sees):
        mask.view(nodes, prefix + nodes)[:, prefix:] = seen


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    """From node 0 down, step to the child that is the target's own next token, as long as there is
    one.

    candidates, target_predict and the tree (retrive_*): [B, N]. Written in place: predicts [B * N]
    int32, the target's token at each accepted node (the last is the bonus token); accept_index [B,
    steps + 1], batch numbers of the accepted nodes, node 0 first (padding is the caller's);
    accept_token_num [B], accepted drafts, the bonus not counted. Of two equal siblings the first is
    taken. Call site: spec_tree.py:510 sgl_verify_tree_greedy_cpu.
    """
    longest = accept_index.shape[1] - 1
    wanted = target_predict.flatten().tolist()
    trees = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
    )
    for request, (tokens, number, first_child, next_sibling) in enumerate(trees):
        path = [0]
        while len(path) <= longest:
            node = first_child[path[-1]]
            while node != -1 and tokens[node] != wanted[number[path[-1]]]:
                node = next_sibling[node]
            if node == -1:
                break
            path.append(node)
        accepted = torch.tensor([number[node] for node in path])
        accept_index[request, : len(path)] = accepted.to(accept_index.dtype)
        accept_token_num[request] = len(path) - 1
        predicts[accepted] = target_predict.flatten()[accepted].to(predicts.dtype)


def _parents(parent_list, selected_index, topk):
    """The parent node of each node, [B, N]: 0 for node 0 and its children, -1 where the parent was
    not selected.
    """
    root = selected_index.new_full((len(selected_index), 1), -1)  # a number that no candidate has
    kept = selected_index // topk
    # With one step parent_list is empty and every kept number is 0.
    drafted_from = (
        (parent_list if parent_list.shape[1] else root).gather(1, kept).masked_fill(kept == 0, -1)
    )
    same = torch.cat((root, drafted_from), 1).unsqueeze(2) == torch.cat(
        (root, selected_index), 1
    ).unsqueeze(1)
    return torch.where(same.any(2), same.int().argmax(2), -1)
