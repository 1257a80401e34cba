"""An MLA draft for the tiny pair of Kimi's class: the trained draft's fc, feed-forward and head
around a random latent attention. For tests.
"""

import json
from pathlib import Path

import numpy
from safetensors.numpy import save_file
from safetensors.torch import load_file

from workbench.experiment import profile
from workbench.predict import sharding
from workbench.predict.model_shape import canonical, read

# What the draft takes of the target's config.json: its attention.
_ATTENTION = (
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_parameters",  # or, as the published wrapper has them:
    "rope_scaling",
    "rope_theta",
)


def beside(kimi: profile.Profile, folder: Path) -> profile.Profile:
    """The profile with such a draft, written into ``folder`` by the names that published
    checkpoints have.
    """
    target, draft = (
        json.loads((side / "config.json").read_text())
        for side in (kimi.pair.target, kimi.pair.draft)
    )
    target = target.get("text_config", target)
    config = {key: value for key, value in draft.items() if key not in ("head_dim", "rope_theta")}
    config |= {key: target[key] for key in _ATTENTION if key in target} | {
        "architectures": [sharding.MLA_DRAFT],
        "model_type": "kimi_k2",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(folder, kimi.pair.draft), folder / "model.safetensors")
    return kimi.model_copy(update={"pair": kimi.pair.model_copy(update={"draft": folder})})


def _weights(folder: Path, trained: Path) -> dict[str, numpy.ndarray]:
    known = {
        canonical(name): value.float().numpy() if value.is_floating_point() else value.numpy()
        for name, value in load_file(trained / "model.safetensors").items()
    }
    random, weights = numpy.random.default_rng(0), {name: known[name] for name in ("d2t", "t2d")}
    for tensor in sharding.implied(read(folder, "pair.draft")):
        if "self_attn" in tensor.name:
            norm = len(tensor.shape) == 1
            weights[tensor.name] = (
                numpy.ones(tensor.shape)
                if norm
                else random.normal(0, tensor.shape[-1] ** -0.5, tensor.shape)
            )
        else:
            weights[tensor.name] = known[tensor.name]
    return {
        name: value.astype(numpy.float32) if value.dtype == numpy.float64 else value
        for name, value in weights.items()
    }
