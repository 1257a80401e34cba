"""How quantized model folders store a weight: in which pieces, of which shapes, and of which
weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from workbench.experiment.checks import Check, passed, refused, warned
from workbench.experiment.profile import Profile
from workbench.predict.model_files import Tensor
from workbench.predict.model_shape import ModelShape, canonical
from workbench.predict.sharding import FLOATS, implied

# Beside a weight's values: they scale them, and are read with them by the same product.
SCALES = (
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
    "scales",
    "qzeros",
    "g_idx",
)
_LINEAR = ("_proj", "kv_a_proj_with_mqa")
_PACKED = ("weight_packed", "qweight")  # several values in a word of 32 bits
_WORD = 32


@lru_cache(16)
def weights(shape: ModelShape) -> tuple[Tensor, ...]:
    """The tensors of a model: those of its files, else those that its configuration implies, in the
    pieces that its quantization stores.
    """
    return shape.tensors or tuple(
        piece for tensor in implied(shape) for piece in _stored_as(shape, tensor)
    )


def _stored_as(shape: ModelShape, tensor: Tensor) -> tuple[Tensor, ...]:
    return is_quantized(shape, tensor) and pieces(shape, tensor) or (tensor,)


def is_quantized(shape: ModelShape, tensor: Tensor) -> bool:
    """Whether the configuration quantizes a weight. Linear layers are, but for those it names as
    exceptions; norms, tables and routers are not.
    """
    module = tensor.name.removesuffix(".weight")
    if not shape.quantization or not module.endswith(_LINEAR):
        return False
    return not any(_names(rule, module) for rule in _exceptions(shape.quantization))


def pieces(shape: ModelShape, tensor: Tensor) -> tuple[Tensor, ...] | None:
    """What a folder holds for one quantized weight of [rows, columns]; None for a format that is
    not known here.

    Sources: layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py:191
    weight_packed; layers/quantization/fp8.py:689 weight_scale_inv;
    layers/quantization/awq/schemes/awq_linear.py:91 qweight;
    layers/quantization/gptq/schemes/gptq_linear.py:139 qweight.
    """
    quantization = shape.quantization or {}
    rows, columns = tensor.shape
    base, method = tensor.name.removesuffix("weight"), quantization.get("quant_method")

    def piece(leaf: str, size: tuple[int, ...], dtype: str) -> Tensor:
        return Tensor(base + leaf, size, dtype)

    if method == "compressed-tensors" and quantization.get("format") == "pack-quantized":
        values = _grouped(quantization)
        if values is None:
            return None
        bits, group = values
        return (
            piece("weight_packed", (rows, columns * bits // _WORD), "I32"),
            piece("weight_scale", (rows, columns // (group or columns)), shape.dtype),
            piece("weight_shape", (2,), "I32"),
        )
    if method == "fp8" and (block := quantization.get("weight_block_size")):
        scales = (-(-rows // block[0]), -(-columns // block[1]))
        return (
            piece("weight", (rows, columns), "F8_E4M3"),
            piece("weight_scale_inv", scales, "F32"),
        )
    bits, group = quantization.get("bits"), quantization.get("group_size")
    if method in ("awq", "gptq") and bits and group and group > 0:
        lanes = _WORD // bits
        wide = (columns, rows // lanes) if method == "awq" else (columns // lanes, rows)
        return (
            piece("qweight", wide, "I32"),
            piece("qzeros", (columns // group, rows // lanes), "I32"),
            piece("scales", (columns // group, rows), "F16"),
        )
    return None


def values(shape: ModelShape, tensor: Tensor) -> float:
    """How many weights a stored value stands for: none for a scale, several for a packed word."""
    leaf = tensor.name.rsplit(".", 1)[-1]
    if leaf in SCALES:
        return 0.0
    if leaf not in _PACKED:
        return 1.0
    quantization = shape.quantization or {}
    bits = quantization.get("bits") or (_grouped(quantization) or (4, None))[0]
    return _WORD / bits


def incomplete(shape: ModelShape) -> Iterator[tuple[str, str, str]]:
    """Field, problem and mend of each weight that config.json implies and the files do not hold, or
    hold in another shape.
    """
    for expected in implied(shape):
        for piece in _expected(shape, expected):
            held = shape.stored.get(piece.name)
            if held is None:
                yield shape.field, f"its weights lack {piece.name}", "take a complete model folder"
            elif held.shape != piece.shape:
                yield (
                    f"{shape.field}.{piece.name}",
                    f"is {list(held.shape)} where config.json implies {list(piece.shape)}",
                    "take weights and config.json of one model",
                )


def unknown(shape: ModelShape) -> str | None:
    """The name of a quantization whose files are not known here; None for any other model."""
    if not shape.quantization:
        return None
    probe = Tensor("probe_proj.weight", (1024, 1024), shape.dtype)
    return None if pieces(shape, probe) else str(shape.quantization.get("quant_method"))


def served(profile: Profile, shape: ModelShape) -> Iterator[Check]:
    """Whether the engine can serve the folder's quantization, and what a flag makes of it."""
    field = f"{shape.field}.quantization_config"
    flag = profile.flag("quantization")
    draft = shape.field == "pair.draft"
    own = profile.flag("speculative-draft-model-quantization") if draft else None
    asked = next((name for name in (own, flag) if name not in (None, "unquant")), None)
    if own == "unquant":
        asked = None
    method = str((shape.quantization or {}).get("quant_method") or asked)
    if profile.engine == "cpu" and (shape.quantization or asked):
        # Its kernels are plain torch in float32 (model_loader/loader.py:269 dtype).
        yield refused(
            field if shape.quantization else "server.flags.quantization",
            f"is {method}, and the CPU engine serves unquantized weights in float32 alone",
            "take the model unquantized, or a profile of GPUs",
        )
        return
    if not draft or shape.quantization or not asked or own:
        return
    # arg_groups/serving_hook.py:689 speculative_draft_model_quantization
    mend = "set server.flags.speculative-draft-model-quantization to unquant"
    if asked == "fp8":
        yield warned(
            "server.flags.quantization",
            "is fp8, which SGLang gives an unquantized draft too: it is quantized while it loads",
            f"{mend}, or leave quantization out where the target's config.json names its own",
        )
    else:
        yield refused(
            "server.flags.quantization",
            f"is {asked}, which SGLang gives the draft too, and that is unquantized",
            f"{mend}, or leave quantization out: SGLang reads it from the target's config.json",
        )


def complete(shape: ModelShape, layers: str) -> Check:
    """The files hold every weight that config.json implies, in its shape and its quantization;
    SGLang leaves a weight that is not there uninitialised.
    """
    kind = f"{shape.architecture}, {layers}"
    method = (shape.quantization or {}).get("quant_method")
    if not shape.tensors:
        return passed(shape.field, f"{kind}, no weights{f', {method}' if method else ''}")
    if fault := next(incomplete(shape), None):
        return refused(*fault)
    stored = f"{len(shape.tensors)} tensors"
    if name := unknown(shape):
        return warned(
            shape.field,
            f"{kind}, {stored}; how {name} stores its weights is not known here, so those are not"
            " checked",
            "watch the first start",
        )
    return passed(
        shape.field,
        f"{kind}, {stored} as config.json implies{f', quantized by {method}' if method else ''}",
    )


def _expected(shape: ModelShape, tensor: Tensor) -> tuple[Tensor, ...]:
    """What must be there of an implied weight: its plain form where that is there or the format
    leaves it alone, nothing where the format is not known.
    """
    found = shape.stored.get(tensor.name)
    if not is_quantized(shape, tensor) or found is not None and found.dtype in FLOATS:
        return (tensor,)
    return pieces(shape, tensor) or ()


def _grouped(quantization: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """Bits of a value and values of a group, of compressed-tensors' only group of layers."""
    groups = list((quantization.get("config_groups") or {}).values())
    kept = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
    return (int(kept["num_bits"]), kept.get("group_size")) if kept.get("num_bits") else None


def _exceptions(quantization: Mapping[str, Any]) -> list[str]:
    """The names under which the formats list what they leave alone."""
    listed = ("ignore", "ignored_layers", "modules_to_not_convert")
    return [str(name) for key in listed for name in quantization.get(key) or ()]


def _names(rule: str, module: str) -> bool:
    """Whether an exception means a module: ``re:`` begins an expression
    (layers/quantization/compressed_tensors/utils.py:79 check_equal_or_regex_match), another name
    is one part of the module's or more.
    """
    if rule.startswith("re:"):
        full = (module, f"model.{module}", f"language_model.model.{module}")
        return any(re.match(rule[3:], name) for name in full)
    return canonical(rule) in (module, *_parts(module)) or f".{canonical(rule)}." in f".{module}."


def _parts(module: str) -> list[str]:
    words = module.split(".")
    return [".".join(words[:end]) for end in range(1, len(words))]
