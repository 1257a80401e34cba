"""The target and its draft in plain torch, without SGLang; a round decoded and counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as progress

from workbench.answers.reference_draft import Draft
from workbench.experiment.errors import BadInput
from workbench.predict import model_shape

TARGETS = ("LlamaForCausalLM", "DeepseekV3ForCausalLM")


@dataclass(frozen=True)
class Decoded:
    """One prompt's greedy continuation and how EAGLE-3 got there.

    output_ids: max_new_tokens token ids.
    histogram: rounds by number of correct drafts, steps + 1 entries (SGLang's
        spec_correct_drafts_histogram leaves trailing zeros out).
    target_gap, draft_gap: the smallest difference between the two largest logits at any choice of
        the target, and of the draft from any position and at any step; where one is tiny, another
        order of summation (tensor parallelism, another kernel) may choose otherwise.
    """

    output_ids: tuple[int, ...]
    histogram: tuple[int, ...]
    target_gap: float
    draft_gap: float


def hidden_state_indices(architecture: str, layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Where SGLang's captured layers lie in transformers' hidden_states (0 is the embedding, i the
    residual stream after layer i - 1).

    SGLang captures the input of layer n. Llama: n = id + 1 (models/llama.py:941 layers_to_capture).
    DeepSeek: n = id, unless the first id is 1, then n = id + 1 (models/deepseek_v2.py:3470
    layer_ids). They come in the layers' order, whatever the order of the ids.
    """
    shift = 1 if architecture == "LlamaForCausalLM" or layer_ids[0] == 1 else 0
    return tuple(sorted(i + shift for i in layer_ids))


@dataclass(frozen=True)
class Reference:
    """A loaded pair; captured: indices of the aux layers in transformers' hidden_states."""

    target: PreTrainedModel
    draft: Draft
    captured: tuple[int, ...]

    @classmethod
    def load(
        cls,
        target_folder: Path | str,
        draft_folder: Path | str,
        aux_layers: Sequence[int] | None = None,
    ) -> Reference:
        """Reads both folders, weights as float32. aux_layers and errors as in ``decode``."""
        # Read by ourselves first: transformers would look for code in the folder of a class that it
        # does not know.
        architecture = model_shape.read(Path(target_folder), "pair.target").architecture
        if architecture not in TARGETS:
            raise BadInput(
                "pair.target",
                f"{architecture} has no offline reference",
                f"use one of {', '.join(TARGETS)}",
            )
        config = AutoConfig.from_pretrained(target_folder, trust_remote_code=False)
        layers = config.num_hidden_layers
        draft = Draft.load(draft_folder)
        if draft.config.hidden_size != config.hidden_size:
            raise BadInput(
                "pair.draft",
                f"its hidden size {draft.config.hidden_size} is not the target's"
                f" {config.hidden_size}",
                "use a draft of this target",
            )
        if not 0 <= draft.tokens.min() <= draft.tokens.max() < config.vocab_size:
            raise BadInput(
                "pair.draft",
                f"d2t points outside the target's vocabulary of {config.vocab_size}",
                "store offsets, not ids, in d2t",
            )
        ids = tuple(aux_layers if aux_layers is not None else draft.layer_ids)
        wanted = draft.weights["fc.weight"].shape[1] // config.hidden_size
        captured = hidden_state_indices(architecture, ids) if ids else ()
        if len(set(captured)) != wanted or not 0 <= captured[0] <= captured[-1] < layers:
            raise BadInput(
                "aux layers",
                f"{list(ids)} are not {wanted} layers that SGLang can capture in a target of"
                f" {layers}",
                "mend eagle_aux_hidden_state_layer_ids",
            )
        # a widget in a notebook, which a report read elsewhere cannot show
        progress.disable_progress_bar()
        target = AutoModelForCausalLM.from_pretrained(
            target_folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).eval()
        return cls(target, draft, captured)

    @torch.no_grad()
    def decode(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, steps: int
    ) -> list[Decoded]:
        """``decode`` of the module for a loaded pair; prompts of equal length run together."""
        if not all(prompts) or max_new_tokens < 1 or steps < 1:
            raise BadInput(
                "workload",
                "a prompt is empty, or fewer than one token or step is asked for",
                "ask for at least one of each",
            )
        lengths, decoded = defaultdict(list), {}
        for number, prompt in enumerate(prompts):
            lengths[len(prompt)].append(number)
        for numbers in lengths.values():
            together = self._decode(
                torch.tensor([list(prompts[n]) for n in numbers]), max_new_tokens, steps
            )
            decoded.update(zip(numbers, together))
        return [decoded[number] for number in range(len(prompts))]

    def _decode(self, prompts: torch.Tensor, max_new_tokens: int, steps: int) -> list[Decoded]:
        length = prompts.shape[1]
        # The last round may be right beyond max_new_tokens, and is counted in full: what the target
        # would say there is needed too.
        ids = self.target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max_new_tokens + steps - 1,
            do_sample=False,
            eos_token_id=None,
        )
        seen = self.target(input_ids=ids, output_hidden_states=True, use_cache=False)
        features = torch.cat([seen.hidden_states[i] for i in self.captured], -1)
        proposals, draft_gaps = self._chains(features, ids, steps)
        target_gaps = _gap(seen.logits[:, length - 1 : -1]).amin(-1)
        return [
            Decoded(
                tuple(row[length : length + max_new_tokens].tolist()),
                count_rounds(row.tolist(), length, max_new_tokens, chains.tolist()),
                target_gap.item(),
                gaps[length - 1 :].min().item(),
            )
            for row, chains, target_gap, gaps in zip(ids, proposals, target_gaps, draft_gaps)
        ]

    def _chains(
        self, features: torch.Tensor, ids: torch.Tensor, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The chain of every position: target ids int64 [batch, T, steps] and the gap of each
        choice, T = tokens - 1.

        The chain of position t reads the feature of t with the embedding of token t + 1, at rotary
        position t, and proposes the tokens from t + 2 on; step k sits at t + k. Its context holds
        the target's own features only: after verify SGLang writes the draft's KV anew from them
        (speculative/eagle_worker_v2.py:1110 _draft_extend_for_decode), so every round starts as if
        nothing had been drafted before.
        """
        embed = self.target.get_input_embeddings()
        hidden, tokens = self.draft.fuse(features[:, :-1]), ids[:, 1:]
        positions, cache, proposals, gaps = torch.arange(tokens.shape[1]), [], [], []
        for step in range(steps):
            hidden, logits = self.draft.forward(embed(tokens), hidden, positions + step, cache)
            tokens = self.draft.tokens[logits.argmax(-1)]
            proposals.append(tokens)
            gaps.append(_gap(logits))
        return torch.stack(proposals, -1), torch.stack(gaps, -1)


def count_rounds(
    ids: Sequence[int], prompt_tokens: int, max_new_tokens: int, chains: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Rounds by number of correct drafts, for a request of ``max_new_tokens``.

    ids: prompt and greedy continuation; chains[t]: the drafts proposed for t + 2, t + 3, ... The
        first token comes from the prefill; a round yields its correct drafts and the bonus token.
        The last round counts in full though its surplus tokens are cut
        (managers/scheduler_components/batch_result_processor.py:836
        update_spec_correct_drafts_histogram, before the finish check).
    """
    histogram, known, end = (
        [0] * (len(chains[0]) + 1),
        prompt_tokens + 1,
        prompt_tokens + max_new_tokens,
    )
    while known < end:
        correct = 0
        for proposed, right in zip(chains[known - 2], ids[known:]):
            if proposed != right:
                break
            correct += 1
        histogram[correct] += 1
        known += correct + 1
    return tuple(histogram)


def trimmed(histogram: Sequence[int]) -> tuple[int, ...]:
    """Without trailing zeros, which SGLang does not report."""
    counts = list(histogram)
    while counts and not counts[-1]:
        counts.pop()
    return tuple(counts)


def _gap(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit less the second, [...] of [..., vocabulary]."""
    first, second = logits.topk(2, -1).values.unbind(-1)
    return first - second
