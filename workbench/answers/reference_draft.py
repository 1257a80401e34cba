"""The draft in plain torch: the EAGLE-3 layer as it was trained, without SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from workbench.experiment.errors import BadInput

DRAFT = "LlamaForCausalLMEagle3"


_VARIANTS = (
    "norm_before_fc",
    "fc_norm",
    "use_aux_norm",
    "norm_output",
    "bias",
    "attention_bias",
    "tie_word_embeddings",
    "target_hidden_size",
)


@dataclass(frozen=True)
class Draft:
    """An EAGLE-3 draft of one LLaMA-like layer. weights: float32, by the checkpoint's names with
    the layer as ``midlayer``;
    tokens: int64 [draft vocabulary], the target's id of each draft id."""

    config: LlamaConfig
    weights: Mapping[str, torch.Tensor]
    tokens: torch.Tensor
    rotary: LlamaRotaryEmbedding

    @classmethod
    def load(cls, folder: Path | str) -> Draft:
        """Raises: BadInput when the folder holds no draft of this kind, or one with options this
        reference does not have.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
            raise BadInput(
                "pair.draft",
                f"{folder} holds no config.json with model.safetensors",
                "give the folder of an EAGLE-3 draft",
            )
        raw = json.loads((folder / "config.json").read_text())
        if raw.get("architectures") != [DRAFT] or raw.get("num_hidden_layers") != 1:
            raise BadInput(
                "pair.draft",
                f"{raw.get('architectures')} of {raw.get('num_hidden_layers')} layers has no"
                " offline reference",
                f"use {DRAFT} of one layer",
            )
        options = [
            name for name in _VARIANTS if raw.get(name) or raw.get("eagle_config", {}).get(name)
        ]
        weights = {
            name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        offsets = weights.pop("d2t", None)
        if options or offsets is None or "lm_head.weight" not in weights:
            raise BadInput(
                "pair.draft",
                "no offline reference with"
                f" {', '.join(options) or 'a head shared with the target'}",
                "use a plain draft with its own head and d2t",
            )
        config = LlamaConfig(
            **{
                name: value
                for name, value in raw.items()
                if name not in ("architectures", "model_type")
            }
        )
        # d2t holds offsets, not ids (models/llama_eagle3.py:352 hot_token_id)
        return cls(
            config,
            {name: tensor.float() for name, tensor in weights.items() if name != "t2d"},
            offsets + torch.arange(len(offsets)),
            LlamaRotaryEmbedding(config),
        )

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self.config.eagle_config["eagle_aux_hidden_state_layer_ids"])

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[..., aux layers x hidden] of the target to the draft's [..., hidden]; only at a chain's
        first step.
        """
        return F.linear(features, self.weights["fc.weight"])

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the chains that start at every position at once (models/llama_eagle3.py:88
        forward).

        embeddings, hidden: [batch, T, hidden].
        positions: int64 [T].
        cache: keys and values [batch, heads, T, head size] of the steps before, grown by this one.
            The first entry is the context (the target's features, all positions up to one's own);
            of the later ones a chain sees its own. Returns the hidden state before the final norm,
            which is what the next step is fed, and logits over the draft vocabulary.
        """
        x = torch.cat(
            [self._norm("input_layernorm", embeddings), self._norm("hidden_norm", hidden)], -1
        )
        query, key, value = (
            self._linear(f"self_attn.{name}_proj", x)
            .unflatten(-1, (-1, self.config.head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(x, positions[None]))
        groups = query.shape[1] // key.shape[1]
        cache.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        (context_keys, context_values), *own = cache
        future = torch.ones(len(positions), len(positions), dtype=torch.bool).triu(1)
        scores = torch.cat(
            [(query @ context_keys.mT).masked_fill(future, float("-inf"))]
            + [(query * keys).sum(-1, keepdim=True) for keys, _ in own],
            -1,
        )
        weights = (scores * self.config.head_dim**-0.5).softmax(-1)
        mixed = weights[..., : len(positions)] @ context_values
        for n, (_, values) in enumerate(own):
            mixed = mixed + weights[..., len(positions) + n, None] * values
        hidden = hidden + self._linear("self_attn.o_proj", mixed.transpose(1, 2).flatten(2))
        x = self._norm("post_attention_layernorm", hidden)
        hidden = hidden + self._linear(
            "mlp.down_proj",
            F.silu(self._linear("mlp.gate_proj", x)) * self._linear("mlp.up_proj", x),
        )
        final = F.rms_norm(
            hidden, hidden.shape[-1:], self.weights["norm.weight"], self.config.rms_norm_eps
        )
        return hidden, F.linear(final, self.weights["lm_head.weight"])

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"midlayer.{name}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(
            x, x.shape[-1:], self.weights[f"midlayer.{name}.weight"], self.config.rms_norm_eps
        )
