"""Which of the target's layers the draft is handed, and whether it was built for them."""

from __future__ import annotations

from workbench.experiment.checks import Check, passed, refused, warned
from workbench.experiment.profile import Profile
from workbench.predict.model_shape import ModelShape
from workbench.predict.sharding import (
    aux_count,
)

# MLA targets that count their layers as LLaMA does (models/longcat_flash.py:1119 layers_to_capture,
# models/glm5_next.py:1543 layers_to_capture).
_MLA_BUT_ONE_BASED = ("LongcatFlashForCausalLM", "Glm5NextForConditionalGeneration")


def captured_layers(target: ModelShape, ids: tuple[int, ...] | None) -> list[int]:
    """The target's layers whose input SGLang hands to the draft, in the order of the ids.

    An id names a layer's output, so its successor's input is taken (models/llama.py:941
    layers_to_capture); DeepSeek-like targets take ids as they are unless the first is 1
    (models/deepseek_v2.py:3470 layer_ids). Without ids: 2, the middle, the third last
    (models/llama.py:936 layers_to_capture).
    """
    if ids is None:
        return [2, target.layers // 2, target.layers - 3]
    verbatim = (
        target.mla is not None and target.architecture not in _MLA_BUT_ONE_BASED and ids[:1] != (1,)
    )
    return [i if verbatim else i + 1 for i in ids]


def aux_layers(profile: Profile, target: ModelShape, draft: ModelShape) -> Check:
    """As many distinct layers are captured as the draft's fc joins, each one that the target has.
    Other ids crash the server, or give an accept length near 1.
    """
    field, eagle = "pair.draft.eagle_aux_hidden_state_layer_ids", draft.eagle
    ids, captured = eagle.aux_layers, captured_layers(target, eagle.aux_layers)
    said = f"{list(ids)}" if ids is not None else f"the default {captured} (no ids given)"
    own = (
        "give ids in eagle_config that fit this target's layers, as the draft was trained with them"
    )
    outside = [i for i, layer in zip(ids or captured, captured) if not 0 <= layer < target.layers]
    if outside:
        last = target.layers - 1 - (captured[0] - ids[0] if ids else 0)
        return refused(
            field,
            f"layer {outside[0]} of {said} is never captured from a target of {target.layers}"
            f" layers (the last is {last})",
            own,
        )
    if len(set(captured)) != len(captured):
        return refused(
            field,
            f"{said} names one of the target's {target.layers} layers twice, which is captured"
            " once",
            own,
        )
    if len(captured) != aux_count(draft):
        return refused(
            field,
            f"{said} are {len(captured)} layers where the draft joins {aux_count(draft)}",
            own,
        )
    fc = draft.stored.get("fc.weight")
    if fc and fc.shape[-1] != len(captured) * target.hidden_size:
        return refused(
            field,
            f"{said} give {len(captured) * target.hidden_size} values where the draft's fc takes"
            f" {fc.shape[-1]}",
            own,
        )
    # SGLang reads eagle_config alone (spec_aux_hidden_state.py:192 eagle_config).
    if (
        ids is None
        and eagle.stray_aux_layers is not None
        and captured_layers(target, eagle.stray_aux_layers) != captured
    ):
        return refused(
            field,
            f"{list(eagle.stray_aux_layers)} stands outside eagle_config, where SGLang does not"
            " look",
            "move it there",
        )
    if not eagle.use_aux_hidden_state:
        return warned(
            "pair.draft.use_aux_hidden_state",
            "is false, so the draft reads the last hidden state alone",
            "make sure that it was trained so",
        )
    if captured != sorted(captured):
        return warned(
            field,
            f"{said} do not ascend, but SGLang joins them in the order of the layers",
            "make sure that fc was trained on that order",
        )
    return passed(
        field,
        f"{said}: inputs of layers {captured} of {target.layers}, fc of {len(captured)} x"
        f" {target.hidden_size}",
    )
