"""What a model folder says, without torch: config.json, headers, and which weights a configuration
implies.
"""

import json
import subprocess
import sys

import numpy
import pytest
from tiny_models import (
    DEEPSEEK,
    DRAFT,
    TARGET,
    draft_sizes,
    target_sizes,
    token_maps,
    write,
    write_pair,
)

from workbench.experiment.errors import BadInput
from workbench.predict import sharding
from workbench.predict.model_shape import read


def test_a_folder_is_read_without_torch(tmp_path):
    write_pair(tmp_path)
    code = (
        "import sys; from workbench.predict.model_shape import read; shape ="
        f" read({str(tmp_path / 'draft')!r}, 'pair.draft'); print(shape.architecture,"
        " len(shape.tensors), 'torch' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert told == ["LlamaForCausalLMEagle3", "15", "False"]


def test_config_and_header_give_the_shape(tmp_path):
    write_pair(tmp_path)
    shape = read(tmp_path / "draft", "pair.draft")
    assert (
        shape.hidden_size,
        shape.layers,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.vocab_size,
    ) == (32, 1, 4, 2, 8, 128)
    assert (
        shape.eagle.draft_vocab_size == 64
        and shape.eagle.aux_layers == (1, 3, 5)
        and shape.mla is None
        and not shape.tied
    )
    assert shape.stored["layers.0.self_attn.q_proj.weight"].shape == (32, 64)
    assert (shape.values("d2t") + numpy.arange(64)).tolist() == list(range(0, 128, 2))


def test_keys_that_are_left_out_take_sglang_s_defaults(tmp_path):
    config = {
        k: v
        for k, v in TARGET.items()
        if k not in ("num_key_value_heads", "head_dim", "tie_word_embeddings", "torch_dtype")
    }
    write(tmp_path, config, {})
    shape = read(tmp_path, "pair.target")
    assert (shape.kv_heads, shape.head_dim, shape.tied, shape.dtype) == (4, 8, False, "F32")


def test_a_wrapped_language_model_is_found_under_text_config(tmp_path):
    inner = {k: v for k, v in DEEPSEEK.items() if k != "architectures"}
    write(
        tmp_path,
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "dtype": "bfloat16",
            "text_config": inner | {"torch_dtype": None},
        },
        {},
    )
    shape = read(tmp_path, "pair.target")
    assert (
        shape.architecture == "KimiK25ForConditionalGeneration"
        and shape.dtype == "BF16"
        and shape.rope == "yarn"
    )
    assert (
        shape.mla.kv_lora_rank,
        shape.mla.qk_rope_head_dim,
        shape.experts.count,
        shape.experts.first_layer,
    ) == (16, 4, 8, 1)


@pytest.mark.parametrize(
    "rope, context",
    [
        (None, 256),
        ({"type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "llama3", "factor": 8.0}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_the_context_is_stretched_as_sglang_does(tmp_path, rope, context):
    write(tmp_path, TARGET | {"rope_scaling": rope}, {})
    assert read(tmp_path, "pair.target").context == context


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda d: (d / "config.json").unlink(), "no readable config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json holds no fields"),
        (
            lambda d: (d / "config.json").write_text(
                json.dumps({k: v for k, v in TARGET.items() if k != "hidden_size"})
            ),
            "no hidden_size",
        ),
        (
            lambda d: (d / "config.json").write_text(json.dumps(TARGET | {"architectures": []})),
            "no architectures",
        ),
        (
            lambda d: (d / "config.json").write_text(json.dumps(TARGET | {"hidden_size": "wide"})),
            "value that cannot be used",
        ),
        (
            lambda d: (d / "model.safetensors").write_bytes(
                (d / "model.safetensors").read_bytes()[:-9]
            ),
            "model.safetensors is damaged",
        ),
        (
            lambda d: (d / "model.safetensors").write_text(
                "version https://git-lfs.github.com/spec/v1\n"
            ),
            "model.safetensors is damaged",
        ),
        (
            lambda d: (d / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model-00002.safetensors"}})
            ),
            "model-00002.safetensors is missing",
        ),
    ],
    ids=[
        "no_config",
        "broken_json",
        "a_list",
        "no_hidden_size",
        "no_architectures",
        "words_for_numbers",
        "cut_weights",
        "lfs_pointer",
        "missing_shard",
    ],
)
def test_a_folder_that_is_not_whole_is_refused_by_name(tmp_path, spoil, words):
    write_pair(tmp_path)
    spoil(tmp_path / "target")
    with pytest.raises(BadInput, match=words) as caught:
        read(tmp_path / "target", "pair.target")
    assert caught.value.field == "pair.target"


def test_the_weights_that_a_configuration_implies_are_the_ones_written_by_hand(tmp_path):
    wide = DRAFT | {"target_hidden_size": 48, "num_hidden_layers": 1}
    for config, sizes in (
        (TARGET, target_sizes(TARGET)),
        (DRAFT, draft_sizes(DRAFT)),
        (wide, draft_sizes(wide) | {"embed_tokens.weight": (128, 32)}),
    ):
        shape = read(write(tmp_path / str(len(sizes)), config, sizes), "pair.target")
        assert {t.name: t.shape for t in sharding.implied(shape)} == {
            name: t.shape for name, t in shape.stored.items()
        }


@pytest.mark.parametrize(
    "config",
    [TARGET, TARGET | {"tie_word_embeddings": True}, DEEPSEEK, DEEPSEEK | {"q_lora_rank": None}],
    ids=["llama", "llama_tied", "deepseek", "deepseek_without_q_lora"],
)
def test_the_weights_that_a_configuration_implies_are_those_of_transformers(tmp_path, config):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = read(write(tmp_path, config, {}), "pair.target")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    theirs = {name.removeprefix("model."): tuple(p.shape) for name, p in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        theirs.pop("lm_head.weight", None)
    ours = {t.name: t.shape for t in sharding.implied(shape)}
    # transformers holds all experts of a layer in two tensors, gate and up joined; checkpoints hold
    # them one by one.
    single = {name: size for name, size in ours.items() if ".experts." not in name}
    assert single == {name: size for name, size in theirs.items() if ".experts." not in name}
    count = lambda sizes: sum(
        int(numpy.prod(size)) for name, size in sizes.items() if ".experts." in name
    )
    assert count(ours) == count(theirs)


def test_values_of_a_weight_that_is_not_there(tmp_path):
    write(tmp_path, DRAFT, draft_sizes(DRAFT), token_maps())
    with pytest.raises(KeyError, match="t3d"):
        read(tmp_path, "pair.draft").values("t3d")
