"""Bad input stops before a server is started, in one sentence that names the field and the mend,
with exit status 2.
"""

import json
import re
import socket

import numpy
import pytest
import yaml
from tiny_models import (
    DRAFT,
    KEEP,
    TARGET,
    draft_sizes,
    profile,
    settings,
    target_sizes,
    token_maps,
    write,
    write_pair,
)

from workbench.experiment import profile as profiles
from workbench.experiment.errors import BadInput
from workbench.predict import preflight


def one_sentence(error: BadInput, field: str, words: str) -> None:
    text = str(error)
    assert error.status == 2 and error.field == field
    assert (
        text.startswith(f"{field}: ")
        and text.endswith(".")
        and error.mend
        and text.endswith(f"; {error.mend}.")
    )
    assert "\n" not in text and len(re.findall(r"[.!?](\s|$)", text)) == 1, text
    assert words in text


def refused(root, field: str, words: str, **changes) -> BadInput:
    with pytest.raises(BadInput) as caught:
        preflight.refuse(preflight.check(profile(root, **changes), free_bytes=8 << 30))
    one_sentence(caught.value, field, words)
    return caught.value


def test_a_sound_profile_is_not_refused(tmp_path):
    write_pair(tmp_path)
    preflight.refuse(preflight.check(profile(tmp_path), free_bytes=8 << 30))


# ------------------------------------------------------------------ profiles, arms and parameters


def load(root, text: str | None = None, changes=None, **fields):
    path = root / "mine.yaml"
    path.write_text(text if text is not None else yaml.safe_dump(settings(root, **fields)))
    return profiles.load(path, changes)


@pytest.mark.parametrize(
    "make, field, words",
    [
        (lambda root: profiles.load("no-such"), "profile", "'no-such' is unknown"),
        (lambda root: profiles.load(root / "gone.yaml"), "profile", "is unknown"),
        (
            lambda root: load(root, "tp: [1\nengine: cpu"),
            "profile",
            "mine.yaml is not valid YAML in line 2",
        ),
        (lambda root: load(root, "- 1"), "profile", "holds no fields"),
        (lambda root: load(root, colour="red"), "colour", "no such field"),
        (
            lambda root: load(root, workload={"request_per_block": 3}),
            "workload.request_per_block",
            "no such field",
        ),
        (lambda root: load(root, tp="two"), "tp", "valid integer"),
        (lambda root: load(root, engine="tpu"), "engine", "'cpu' or 'cuda'"),
        (lambda root: load(root, changes={"draf_tp": 1}), "parameter", "'draf_tp' is unknown"),
        (lambda root: load(root, changes={"pairs": "many"}), "plan.pairs", "valid integer"),
        (
            lambda root: load(root, speculation={"steps": 3, "draft_tokens": 9}),
            "speculation",
            "a chain of 3 steps verifies 4",
        ),
        (lambda root: load(root, plan={"arms": ["none", "alone"]}), "arm", "'alone' is unknown"),
        (
            lambda root: load(root, plan={"arms": ["own-1+colour=red"]}),
            "arm",
            "unknown setting 'colour=red'",
        ),
        (
            lambda root: load(root, plan={"arms": ["none+steps=2"]}),
            "arm",
            "settings of a draft to an arm without one",
        ),
    ],
    ids=[
        "unknown_profile",
        "missing_file",
        "broken_yaml",
        "a_list",
        "unknown_field",
        "misspelt_field",
        "not_a_number",
        "unknown_engine",
        "unknown_parameter",
        "parameter_not_a_number",
        "chain_of_another_length",
        "unknown_arm",
        "unknown_setting",
        "settings_of_none",
    ],
)
def test_a_profile_that_cannot_be_read(tmp_path, make, field, words):
    with pytest.raises(BadInput) as caught:
        make(tmp_path)
    one_sentence(caught.value, field, words)


# ------------------------------------------------------------------ model folders


def test_missing_model_folder(tmp_path):
    write_pair(tmp_path)
    refused(tmp_path, "pair.draft", "is no folder", pair={"draft": str(tmp_path / "gone")})


def test_folder_without_config(tmp_path):
    write_pair(tmp_path)
    (tmp_path / "target" / "config.json").unlink()
    refused(tmp_path, "pair.target", "no readable config.json")


def test_folder_without_weights(tmp_path):
    write_pair(tmp_path)
    (tmp_path / "target" / "model.safetensors").unlink()
    refused(tmp_path, "pair.target", "has no *.safetensors")


def test_weights_only_as_pickles(tmp_path):
    write_pair(tmp_path)
    (tmp_path / "draft" / "model.safetensors").rename(tmp_path / "draft" / "pytorch_model.bin")
    refused(tmp_path, "pair.draft", "pytorch_model.bin")


def test_weights_of_another_config(tmp_path):
    write_pair(tmp_path)
    write(tmp_path / "target", TARGET, target_sizes(TARGET | {"intermediate_size": 32}))
    refused(
        tmp_path,
        "pair.target.layers.0.mlp.gate_proj.weight",
        "is [32, 32] where config.json implies [64, 32]",
    )


def test_a_weight_is_missing(tmp_path):
    write_pair(tmp_path)
    write(
        tmp_path / "draft",
        DRAFT,
        draft_sizes(DRAFT) | {"midlayer.self_attn.o_proj.weight": None},
        token_maps(),
    )
    refused(tmp_path, "pair.draft", "its weights lack layers.0.self_attn.o_proj.weight")


def test_code_of_the_folder_is_needed_but_not_trusted(tmp_path):
    write_pair(
        tmp_path,
        target={"model_type": "nobody-knows-it", "auto_map": {"AutoConfig": "configuration.Mine"}},
    )
    refused(tmp_path, "server.trust_remote_code", "its configuration class")
    trusted = profile(tmp_path, server={"trust_remote_code": True})
    assert "server.trust_remote_code" not in [
        c.name for c in preflight.check(trusted, free_bytes=8 << 30)
    ]


def test_a_tokenizer_in_code_is_needed_but_not_trusted(tmp_path):
    write_pair(tmp_path)
    (tmp_path / "target" / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["t.Mine", None]}})
    )
    refused(tmp_path, "server.trust_remote_code", "its tokenizer")


# ------------------------------------------------------------------ draft against target


@pytest.mark.parametrize(
    "draft, field, words",
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "pair.draft",
            "LlamaForCausalLM is no EAGLE-3 draft",
        ),
        (
            {"hidden_size": 64, "head_dim": 16},
            "pair.draft.hidden_size",
            "64 where the target's hidden states have 32",
        ),
        (
            {"target_hidden_size": 64},
            "pair.draft.target_hidden_size",
            "64 where the target's hidden states have 32",
        ),
        ({"vocab_size": 256}, "pair.draft.vocab_size", "256 where the target has 128"),
        ({"draft_vocab_size": None}, "pair.draft.draft_vocab_size", "not in config.json"),
        (
            {"draft_vocab_size": 192},
            "pair.draft.draft_vocab_size",
            "192, more than the target's 128",
        ),
        (
            {"tie_word_embeddings": True},
            "pair.draft.tie_word_embeddings",
            "ties a head of 64 rows to 128 embeddings",
        ),
        (
            {"max_position_embeddings": 128},
            "pair.draft.max_position_embeddings",
            "128 positions where the target is served with 256",
        ),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "tp",
            "2 does not divide the draft's 3 attention heads",
        ),
        (
            {"num_key_value_heads": 1},
            "tp",
            "2 does not divide the draft's 1 KV heads, which the CPU engine cannot replicate",
        ),
    ],
    ids=[
        "another_architecture",
        "another_hidden_size",
        "another_target_hidden_size",
        "another_vocabulary",
        "no_draft_vocabulary",
        "draft_vocabulary_too_large",
        "tied_to_more_rows",
        "short_context",
        "odd_draft_heads",
        "one_kv_head_on_the_cpu",
    ],
)
def test_a_draft_that_does_not_fit(tmp_path, draft, field, words):
    write_pair(tmp_path, draft=draft)
    refused(tmp_path, field, words)


def test_an_eagle3_draft_under_another_algorithm(tmp_path):
    write_pair(tmp_path)
    refused(
        tmp_path,
        "speculation.algorithm",
        "EAGLE would take an EAGLE-3 draft and accept nothing",
        speculation={"algorithm": "EAGLE"},
    )


AUX = "pair.draft.eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "target, draft, words",
    [
        (
            {},
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}},
            "layer 7 of [1, 3, 7] is never captured from a target of 8 layers (the last is 6)",
        ),
        (
            {},
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 3]}},
            "names one of the target's 8 layers twice",
        ),
        (
            {"num_hidden_layers": 4},
            {"eagle_config": None},
            "the default [2, 2, 1] (no ids given) names one of the target's 4 layers twice",
        ),
        ({"num_hidden_layers": 2}, {"eagle_config": None}, "layer 2 of the default [2, 1, -1]"),
        ({}, {"num_aux_hidden_states": 2}, "are 3 layers where the draft joins 2"),
        (
            {},
            {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
            "stands outside eagle_config",
        ),
        (
            {},
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}},
            "are 0 layers where the draft joins 3",
        ),
    ],
    ids=[
        "beyond_the_last_layer",
        "one_twice",
        "default_collides_on_a_shallow_target",
        "default_before_the_first",
        "another_count",
        "outside_eagle_config",
        "none_at_all",
    ],
)
def test_aux_layers_that_cannot_be_captured(tmp_path, target, draft, words):
    write_pair(tmp_path, target=target, draft=draft)
    refused(tmp_path, AUX, words)


def test_aux_layers_against_the_width_of_fc(tmp_path):
    write_pair(tmp_path)
    write(tmp_path / "draft", DRAFT, draft_sizes(DRAFT) | {"fc.weight": (32, 64)}, token_maps())
    refused(tmp_path, AUX, "give 96 values where the draft's fc takes 64")


@pytest.mark.parametrize(
    "maps, field, words",
    [
        (
            token_maps(KEEP) | {"d2t": numpy.full(64, 100)},
            "pair.draft.d2t",
            "maps draft token 28 to 128, outside the target's 128 tokens",
        ),
        (token_maps(KEEP) | {"d2t": -KEEP - 1}, "pair.draft.d2t", "maps draft token 0 to -1"),
        (token_maps(KEEP) | {"d2t": KEEP}, "pair.draft.d2t", "maps draft token 43 to 129"),
        ({"t2d": token_maps()["t2d"]}, "pair.draft.d2t", "is missing, so 64 draft tokens"),
        (token_maps(KEEP[:32]), "pair.draft.d2t", "of shape [32] where 64 integers are due"),
        (
            token_maps(KEEP) | {"d2t": numpy.zeros(64, dtype=numpy.float32)},
            "pair.draft.d2t",
            "holds float32",
        ),
        (
            token_maps(KEEP) | {"d2t": -(numpy.arange(64) % 2)},
            "pair.draft.d2t",
            "maps 64 draft tokens to 32 of the target",
        ),
        (
            token_maps(KEEP) | {"t2d": numpy.ones(128, dtype=bool)},
            "pair.draft.t2d",
            "marks 128 of 128 tokens where d2t names 64",
        ),
        (
            token_maps(KEEP) | {"t2d": token_maps(KEEP + 1)["t2d"]},
            "pair.draft.t2d",
            "does not mark token 0, which d2t names",
        ),
        (
            token_maps(KEEP) | {"t2d": numpy.ones(64, dtype=bool)},
            "pair.draft.t2d",
            "marks 64 of 64 tokens where d2t names 64 of 128",
        ),
    ],
    ids=[
        "beyond_the_vocabulary",
        "below_zero",
        "ids_instead_of_offsets",
        "missing",
        "of_another_length",
        "not_integers",
        "two_to_one",
        "t2d_of_another_count",
        "t2d_of_other_tokens",
        "t2d_of_another_length",
    ],
)
def test_token_maps_that_do_not_fit(tmp_path, maps, field, words):
    write_pair(tmp_path, maps=maps)
    refused(tmp_path, field, words)


def test_a_narrow_draft_without_an_embedding_of_its_own(tmp_path):
    config = DRAFT | {"hidden_size": 16, "target_hidden_size": 32, "head_dim": 4}
    write_pair(tmp_path)
    write(tmp_path / "draft", config, draft_sizes(config), token_maps())
    refused(tmp_path, "pair.draft.embed_tokens", "not in the draft's weights")


def test_draft_and_target_in_two_dtypes(tmp_path):
    write_pair(tmp_path, draft={"torch_dtype": "bfloat16"})
    refused(tmp_path, "pair.draft.dtype", "served as BF16 where the target is F16", engine="cuda")


# ------------------------------------------------------------------ ranks, arms, flags, machine


@pytest.mark.parametrize(
    "target, tp, words",
    [
        ({}, 3, "3 does not divide the target's 4 attention heads"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 3},
            2,
            "2 neither divides the target's 3 KV heads nor is a multiple",
        ),
        ({"intermediate_size": 65}, 2, "2 does not divide the target's intermediate size 65"),
        (
            {"intermediate_size": 128, "quantization_config": {"weight_block_size": [128, 128]}},
            2,
            "split the target's quantised blocks of 128",
        ),
    ],
    ids=["heads", "kv_heads", "intermediate_size", "fp8_blocks"],
)
def test_tp_that_does_not_divide_the_target(tmp_path, target, tp, words):
    write_pair(tmp_path, target=target)
    refused(tmp_path, "tp", words, engine="cuda", tp=tp, plan={"arms": ["none"]})


def test_tp_that_does_not_divide_the_draft(tmp_path):
    write_pair(tmp_path, draft={"intermediate_size": 63})
    refused(tmp_path, "tp", "2 does not divide the draft's intermediate size 63", engine="cuda")


def test_own_3_at_tp_4(tmp_path):
    write_pair(tmp_path)
    refused(
        tmp_path,
        "plan.arms own-3",
        "3 does not divide TP 4; use own-1 or own-2",
        tp=4,
        plan={"arms": ["none", "own-3"]},
    )


def test_own_2_with_a_draft_of_odd_heads(tmp_path):
    write_pair(tmp_path, draft={"num_attention_heads": 1, "num_key_value_heads": 1})
    refused(
        tmp_path,
        "plan.arms own-2",
        "2 does not divide the draft's 1 attention heads",
        engine="cuda",
        tp=4,
        plan={"arms": ["own-1", "own-2"]},
    )


def test_a_tree_that_offers_too_few_candidates(tmp_path):
    write_pair(tmp_path)
    refused(
        tmp_path,
        "speculation.draft_tokens",
        "2 steps of topk 2 offer 6 beside the root; use at most 7",
        speculation={"steps": 2, "topk": 2, "draft_tokens": 8},
    )


def test_an_arm_that_breaks_its_chain(tmp_path):
    write_pair(tmp_path)
    refused(
        tmp_path,
        "arm",
        "'own-1+steps=2+draft_tokens=4' cannot be served",
        plan={"arms": ["own-1+steps=2+draft_tokens=4"]},
    )


def test_port_in_use(tmp_path):
    write_pair(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(
            tmp_path, "server.flags.port", f"{port} is in use", server={"flags": {"port": port}}
        )


@pytest.mark.parametrize(
    "flags, field, words",
    [
        ({"model-path": "/models/a"}, "server.flags.model-path", "give it as pair.target"),
        ({"--tp_size": 2}, "server.flags.tp-size", "give it as tp"),
        (
            {"speculative-num-steps": 5},
            "server.flags.speculative-num-steps",
            "give it as speculation.steps",
        ),
        (
            {"attention-backend": "triton"},
            "server.flags.attention-backend",
            "set by the CPU engine",
        ),
        ({"pp-size": 2}, "server.flags.pp-size", "pipeline parallelism"),
        ({"enable-dp-attention": True}, "server.flags.enable-dp-attention", "DP attention"),
        ({"attn-cp-size": 2}, "server.flags.attn-cp-size", "context parallelism"),
        ({"speculative-adaptive": True}, "server.flags.speculative-adaptive", "adaptive steps"),
        ({"disaggregation-mode": "prefill"}, "server.flags.disaggregation-mode", "disaggregation"),
        ({"enable-lora": True}, "server.flags.enable-lora", "LoRA"),
        (
            {"enable-hierarchical-cache": True},
            "server.flags.enable-hierarchical-cache",
            "hierarchical cache",
        ),
        (
            {"max-totl-tokens": 9},
            "server.flags.max-totl-tokens",
            "no flag of SGLang's server; write max-total-tokens",
        ),
        (
            {"max-total-tokens": "many"},
            "server.flags.max-total-tokens",
            "'many'; give a plain number",
        ),
        ({"max-total-tokens": True}, "server.flags.max-total-tokens", "True; give a plain number"),
        ({"port": "nan"}, "server.flags.port", "'nan'; give a plain number"),
        ({"mem-fraction-static": 1.5}, "server.flags.mem-fraction-static", "between 0 and 1"),
        ({"max-total-tokens": 10}, "memory none", "room for 10 tokens where the workload needs 22"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_flags_that_are_not_the_profile_s_or_do_not_go_together(tmp_path, flags, field, words):
    write_pair(tmp_path)
    refused(tmp_path, field, words, server={"flags": {"disable-radix-cache": True} | flags})


def test_pages_under_a_tree_on_the_cpu_engine(tmp_path):
    write_pair(tmp_path)
    refused(
        tmp_path,
        "server.flags.page-size",
        "16 with a tree of topk 2",
        server={"flags": {"page-size": 16}},
        speculation={"topk": 2, "draft_tokens": 6},
    )


def test_orders_of_the_workbench_in_the_environment(tmp_path):
    write_pair(tmp_path)
    refused(
        tmp_path,
        "server.environment.SGLANG_SIMULATE_ACC_LEN",
        "'two'",
        server={"environment": {"SGLANG_SIMULATE_ACC_LEN": "two"}},
    )
    refused(
        tmp_path,
        "server.environment.SGLANG_PLUGINS",
        "the workbench's own",
        server={"environment": {"SGLANG_PLUGINS": "other"}},
    )


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "cannot be read"),
        ("{}", "is no list of"),
        ("[]", "is no list of"),
        ('[{"id": "a"}]', 'other.json: entry 1 is no {"id", "input_ids"}'),
        ("[", "other.json is no JSON"),
        ('[{"id": "a", "input_ids": []}]', "prompt 'a' has no tokens"),
        ('[{"id": "a", "input_ids": [128]}]', "'a' holds token 128 where the target has 128"),
        ('[{"id": "a", "input_ids": [-1]}]', "prompt 'a' holds token -1"),
        ('[{"id": "a", "input_ids": [true]}]', "holds True, which is no token id"),
        ('[{"id": "a", "input_ids": [1.5]}]', "holds 1.5, which is no token id"),
        ('[{"id": "a", "input_ids": [[1]]}]', "holds [1], which is no token id"),
        ('[{"id": "a", "input_ids": "text"}]', "prompt 'a' has no tokens in a list"),
        ('[{"id": ["a"], "input_ids": [1]}]', "id of entry 1 is neither text nor a number"),
        ('[{"id": "a", "input_ids": [1]}, {"id": "a", "input_ids": [2]}]', "is there 2 times"),
        ('[{"id": "a", "input_ids": [1]}, {"id": "b", "input_ids": [1]}]', "are the same"),
        ('[{"id": "a", "input_ids": [1]}, {"id": "b", "input_ids": [2]}]', "fewer than"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "workbench prompts SOURCE"),
    ],
    ids=[
        "missing",
        "no_list",
        "empty",
        "no_tokens",
        "broken_json",
        "empty_prompt",
        "of_another_vocabulary",
        "negative",
        "boolean",
        "half",
        "nested",
        "text",
        "id_a_list",
        "one_id_twice",
        "one_prompt_twice",
        "too_few",
        "a_chat",
    ],
)
def test_prompts_that_cannot_be_sent(tmp_path, text, words):
    write_pair(tmp_path)
    prompts = tmp_path / "other.json"
    if text is not None:
        prompts.write_text(text)
    refused(tmp_path, "workload.prompts", words, workload={"prompts": str(prompts)})


def test_answers_beyond_the_context(tmp_path):
    write_pair(tmp_path)
    refused(
        tmp_path,
        "workload.max_new_tokens",
        "make 305 tokens with the longest prompt, 'b' of prompts.json, where the target takes 256;"
        " lower it to 251",
        workload={"max_new_tokens": 300},
    )


def test_fewer_gpus_than_ranks(tmp_path):
    write_pair(tmp_path)
    with pytest.raises(BadInput) as caught:
        preflight.refuse(preflight.check(profile(tmp_path, engine="cuda"), free_bytes=[1 << 30]))
    one_sentence(caught.value, "tp", "is 2, but 1 GPU is visible")


def test_weights_beyond_the_memory(tmp_path):
    write_pair(tmp_path)
    with pytest.raises(BadInput) as caught:
        preflight.refuse(preflight.check(profile(tmp_path), free_bytes=100_000))
    one_sentence(caught.value, "memory none", "leave no room in")


@pytest.mark.parametrize(
    "versions, words",
    [({"sglang": "0.5.22"}, "is 0.5.22"), ({}, "is not installed")],
    ids=["another", "absent"],
)
def test_another_sglang(tmp_path, monkeypatch, versions, words):
    def installed(name):
        if name not in versions:
            raise preflight.PackageNotFoundError(name)
        return versions[name]

    write_pair(tmp_path)
    monkeypatch.setattr(preflight, "version", installed)
    refused(tmp_path, "sglang", words)
