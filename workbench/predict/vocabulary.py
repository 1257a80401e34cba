"""Whether the tokens that a draft proposes are the target's."""

from __future__ import annotations

import numpy

from workbench.experiment.checks import Check, passed, refused
from workbench.experiment.profile import Profile
from workbench.predict.model_shape import ModelShape, canonical
from workbench.predict.sharding import (
    LLAMA_DRAFT,
    head_rows,
    takes_head,
)


def vocabulary(profile: Profile, target: ModelShape, draft: ModelShape) -> Check:
    """The draft embeds the target's tokens and proposes from at most as many
    (models/llama_eagle3.py:306 draft_vocab_size).
    """
    if draft.vocab_size != target.vocab_size:
        return refused(
            "pair.draft.vocab_size",
            f"is {draft.vocab_size} where the target has {target.vocab_size} tokens",
            "take a draft trained for this target",
        )
    if draft.eagle.draft_vocab_size is None and draft.architecture == LLAMA_DRAFT:
        return refused(
            "pair.draft.draft_vocab_size",
            "is not in config.json, and SGLang reads it without a default",
            "write the rows of the draft's head there, or null to use the target's head",
        )
    if head_rows(draft) > target.vocab_size:
        return refused(
            "pair.draft.draft_vocab_size",
            f"is {head_rows(draft)}, more than the target's {target.vocab_size} tokens",
            "take a draft trained for this target",
        )
    if draft.tied and head_rows(draft) != draft.vocab_size:
        return refused(
            "pair.draft.tie_word_embeddings",
            f"ties a head of {head_rows(draft)} rows to {draft.vocab_size} embeddings",
            "untie it, or drop draft_vocab_size",
        )
    return passed(
        "pair.draft.draft_vocab_size",
        f"{head_rows(draft)} of the target's {target.vocab_size} tokens"
        + (
            ", by the target's head"
            if takes_head(draft)
            else ", by its embedding"
            if draft.tied
            else ""
        ),
    )


def token_map(profile: Profile, target: ModelShape, draft: ModelShape) -> Check:
    """d2t holds offsets: draft token i is the target's i + d2t[i] (models/llama_eagle3.py:352
    hot_token_id); t2d marks the same tokens. A wrong map leaves training accuracy high and accept
    lengths low.
    """
    field, rows = "pair.draft.d2t", head_rows(draft)
    names = {canonical(t.name): t.name for t in draft.tensors}
    again = "convert the draft again from its training checkpoint"
    if "d2t" not in names:
        if rows < target.vocab_size and draft.tensors:
            return refused(
                field,
                f"is missing, so {rows} draft tokens would be taken for the target's first {rows}",
                again,
            )
        return passed(
            field,
            (
                "none needed: the draft proposes the target's own tokens"
                if rows == target.vocab_size
                else "no weights: draft tokens stand for the target's first ones"
            ),
        )
    offsets = draft.values(names["d2t"])
    if offsets.shape != (rows,) or not numpy.issubdtype(offsets.dtype, numpy.integer):
        return refused(
            field,
            f"holds {offsets.dtype} of shape {list(offsets.shape)} where {rows} integers are due",
            again,
        )
    tokens = offsets.astype(numpy.int64) + numpy.arange(rows)
    wrong = numpy.flatnonzero((tokens < 0) | (tokens >= target.vocab_size))
    if wrong.size:
        return refused(
            field,
            f"maps draft token {wrong[0]} to {tokens[wrong[0]]}, outside the target's"
            f" {target.vocab_size} tokens",
            "store offsets, not token ids, or take the draft of this target",
        )
    if len(numpy.unique(tokens)) != rows:
        return refused(
            field, f"maps {rows} draft tokens to {len(numpy.unique(tokens))} of the target", again
        )
    if "t2d" in names:
        marks = draft.values(names["t2d"]).astype(bool)
        if marks.shape != (target.vocab_size,) or marks.sum() != rows:
            return refused(
                "pair.draft.t2d",
                f"marks {marks.sum()} of {marks.size} tokens where d2t names {rows} of"
                f" {target.vocab_size}",
                again,
            )
        if not marks[tokens].all():
            return refused(
                "pair.draft.t2d",
                f"does not mark token {tokens[~marks[tokens]][0]}, which d2t names",
                again,
            )
    return passed(
        field,
        f"{rows} offsets into the target's {target.vocab_size} tokens"
        + (", as t2d marks them" if "t2d" in names else ""),
    )
