"""What a model folder says of itself: config.json and the headers of its safetensors files, without
loading weights or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
from safetensors import safe_open

from workbench.experiment.errors import BadInput
from workbench.predict.model_files import Tensor, header, read_json, weight_files

# Where SGLang looks for the language model of a wrapped configuration
# (utils/hf_transformers/common.py:566 llm_config).
_TEXT_CONFIGS = ("thinker_config", "llm_config", "language_config", "text_config")
# The first of these that a configuration has is its context length
# (utils/hf_transformers/common.py:668 CONTEXT_LENGTH_KEYS).
_CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: one latent of kv_lora_rank + qk_rope_head_dim values a token and
    layer is cached, by every rank.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts as DeepSeek lays it out: layers from ``first_layer`` on, every
    ``every``-th, are sparse.
    """

    count: int
    intermediate_size: int
    shared: int
    first_layer: int
    every: int


@dataclass(frozen=True)
class Eagle:
    """What only an EAGLE-3 draft's config.json says; None means that the key is absent.

    aux_layers: eagle_config.eagle_aux_hidden_state_layer_ids.
    stray_aux_layers: the same key outside eagle_config.
    draft_vocab_size is 0 where the key is there and null: the draft then takes the target's head
    (models/llama_eagle3.py:306 draft_vocab_size).
    """

    draft_vocab_size: int | None
    target_hidden_size: int | None
    aux_layers: tuple[int, ...] | None
    stray_aux_layers: tuple[int, ...] | None
    num_aux_hidden_states: int | None
    use_aux_hidden_state: bool


@dataclass(frozen=True)
class ModelShape:
    """The facts of one model that decide whether it can be served, and beside what.

    field: the profile's field that named the folder.
    dtype: safetensors' name of config.json's dtype (``F32`` where absent).
    context: tokens, as SGLang derives it (utils/hf_transformers/common.py:677 get_context_length).
    rope: type of the rotary scaling, ``default`` for none.
    config: the language model's part of config.json.
    vision: that of its tower, empty where it has none.
    tensors: what the safetensors files hold, empty where there are none.
    """

    field: str
    folder: Path
    architecture: str
    config: dict[str, Any]
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context: int
    rope: str
    tied: bool
    dtype: str
    mla: Mla | None
    experts: Experts | None
    eagle: Eagle
    quantization: dict[str, Any] | None
    tensors: tuple[Tensor, ...]
    vision: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        """By little, since a model may have 200,000 tensors; equal ones are told by all of it."""
        return hash((self.folder, self.architecture, self.layers, len(self.tensors)))

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """Tensors by the name that SGLang gives them: no ``model.`` in front, ``midlayer`` is
        ``layers.0``.
        """
        return {canonical(t.name): t for t in self.tensors}

    def values(self, name: str) -> numpy.ndarray:
        """The contents of one stored tensor.

        Raises: KeyError when no file holds it.
        """
        for path in weight_files(self.folder, self.field):
            with safe_open(path, framework="numpy") as file:
                if name in file.keys():
                    return file.get_tensor(name)
        raise KeyError(name)


def canonical(name: str) -> str:
    """The name of a weight without wrappers; EAGLE-3 drafts call their first layer ``midlayer``
    (models/llama_eagle3.py:339 midlayer).
    """
    return (
        name.removeprefix("language_model.")
        .removeprefix("model.")
        .replace("midlayer.", "layers.0.")
    )


def read(folder: Path, field: str) -> ModelShape:
    """What the model in ``folder`` is; ``field`` is the profile's field that names it.

    Raises: BadInput for a missing folder or config.json, a config without what every transformer
        has, or damaged weights.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(
            field,
            f"{folder} is no folder",
            "give the folder of a model, with config.json and *.safetensors",
        )
    whole = read_json(folder / "config.json", field)
    config = _language(whole)
    get = lambda key, default=None: config.get(key, whole.get(key, default))
    missing = [
        k
        for k in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "intermediate_size",
        )
        if not get(k)
    ]
    architectures = whole.get("architectures") or config.get("architectures") or []
    if missing or not architectures:
        raise BadInput(
            field,
            f"config.json has no {(missing or ['architectures'])[0]}",
            "give the folder of a transformer language model",
        )
    try:
        tensors = tuple(t for path in weight_files(folder, field) for t in header(path, field))
        return _shape(folder, field, str(architectures[0]), config, get, tensors)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise BadInput(
            field, f"config.json holds a value that cannot be used ({error})", "mend config.json"
        ) from None


def vocabulary(folder: Path, field: str) -> int:
    """Tokens that the model in ``folder`` knows, by its config.json alone.

    Raises: BadInput where it does not say.
    """
    whole = read_json(Path(folder) / "config.json", field)
    if not (size := _language(whole).get("vocab_size", whole.get("vocab_size"))):
        raise BadInput(field, "config.json has no vocab_size", "give the folder of a model")
    return int(size)


def _language(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration that wraps one."""
    inner = (config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), dict))
    return next(inner, config)


def _shape(
    folder: Path, field: str, architecture: str, config: dict, get, tensors: tuple[Tensor, ...]
) -> ModelShape:
    hidden, heads = int(get("hidden_size")), int(get("num_attention_heads"))
    rope = get("rope_parameters") or get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default")) or "default"
    # A stretched context counts only where the factor is not already in max_position_embeddings.
    stretch = (
        1
        if "original_max_position_embeddings" in rope or rope_type == "llama3"
        else rope.get("factor", 1)
    )
    context = next((int(stretch * config[k]) for k in _CONTEXT_KEYS if config.get(k)), 2048)
    return ModelShape(
        field=field,
        folder=folder,
        architecture=architecture,
        config=config,
        hidden_size=hidden,
        layers=int(get("num_hidden_layers")),
        heads=heads,
        kv_heads=int(get("num_key_value_heads") or heads),
        head_dim=int(get("head_dim") or hidden // heads),
        intermediate_size=int(get("intermediate_size")),
        vocab_size=int(get("vocab_size")),
        context=context,
        rope=str(rope_type),
        tied=bool(get("tie_word_embeddings", False)),
        dtype=_DTYPES.get(str(get("dtype") or get("torch_dtype")).removeprefix("torch."), "F32"),
        mla=_mla(get),
        experts=_experts(get),
        eagle=_eagle(get),
        quantization=get("quantization_config"),
        tensors=tensors,
        vision=get("vision_config") or {},
    )


_DTYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}


def _mla(get) -> Mla | None:
    if not get("kv_lora_rank"):
        return None
    return Mla(
        int(get("kv_lora_rank")),
        int(get("qk_rope_head_dim")),
        int(get("qk_nope_head_dim")),
        int(get("v_head_dim")),
        int(get("q_lora_rank")) if get("q_lora_rank") else None,
    )


def _experts(get) -> Experts | None:
    count = get("n_routed_experts") or get("num_experts") or get("num_local_experts")
    if not count:
        return None
    return Experts(
        int(count),
        int(get("moe_intermediate_size") or get("intermediate_size")),
        int(get("n_shared_experts") or 0),
        int(get("first_k_dense_replace") or 0),
        int(get("moe_layer_freq") or 1),
    )


def _eagle(get) -> Eagle:
    inner = get("eagle_config") or {}
    ids, stray = (
        inner.get("eagle_aux_hidden_state_layer_ids"),
        get("eagle_aux_hidden_state_layer_ids"),
    )
    none = object()
    vocabulary = get("draft_vocab_size", none)
    target_hidden, count = get("target_hidden_size"), get("num_aux_hidden_states")
    return Eagle(
        None if vocabulary is none else int(vocabulary or 0),
        int(target_hidden) if target_hidden else None,
        tuple(map(int, ids)) if ids is not None else None,
        tuple(map(int, stray)) if stray is not None else None,
        int(count) if count else None,
        bool(inner.get("use_aux_hidden_state", True)),
    )
