"""What preflight lets pass, what it warns of, and how much memory it predicts: figures worked out
by hand.
"""

import fake_gpus
import pytest
from tiny_models import (
    DEEPSEEK,
    DRAFT,
    MLA_DRAFT,
    TARGET,
    draft_sizes,
    profile,
    token_maps,
    write,
    write_pair,
)

from workbench.experiment import profile as profiles
from workbench.experiment.arms import Arm
from workbench.experiment.schedule import with_control
from workbench.predict import (
    aux_layers,
    memory,
    memory_fit,
    preflight,
    server_flags,
    sharding,
)
from workbench.predict.model_shape import read

FREE = 8 << 30


def found(
    root, name: str, status: str | None = None, free=FREE, arms=None, **changes
) -> preflight.Check:
    checks = preflight.check(profile(root, **changes), arms, free)
    matching = [c for c in checks if c.name == name and status in (None, c.status)]
    assert matching, [(c.name, c.status, c.detail) for c in checks]
    return matching[0]


def statuses(root, **changes) -> set[str]:
    return {c.status for c in preflight.check(profile(root, **changes), free_bytes=FREE)}


def test_a_sound_profile_passes_every_check(tmp_path):
    write_pair(tmp_path)
    assert statuses(tmp_path) == {"passed"}
    names = {c.name for c in preflight.check(profile(tmp_path), free_bytes=FREE)}
    assert {
        "versions",
        "server.flags",
        "plan.arms own-1",
        "tp",
        "pair.target",
        "pair.draft",
        "pair.draft.d2t",
        "workload.prompts",
        "engine",
        "memory none",
        "memory shared",
        "memory own-1",
        "pair.draft.eagle_aux_hidden_state_layer_ids",
    } <= names


def test_the_shipped_profile_is_read_and_owns_none_of_the_workbench_s_flags():
    assert {c.status for c in server_flags.check(profiles.load("cpu-tiny"))} == {"passed"}


def test_without_a_speculating_arm_no_draft_is_asked_for(tmp_path):
    write_pair(tmp_path)
    gone = {"draft": str(tmp_path / "gone")}
    assert statuses(tmp_path, pair=gone, plan={"arms": ["none"]}) == {"passed"}
    assert found(tmp_path, "pair.draft", pair=gone).status == "refused"
    assert all(
        c.name != "pair.draft"
        for c in preflight.check(profile(tmp_path, pair=gone), (Arm.parse("none"),), FREE)
    )


def test_every_fault_is_in_the_table_and_memory_is_left_out_of_it(tmp_path):
    write_pair(tmp_path, draft={"vocab_size": 256, "max_position_embeddings": 8})
    checks = preflight.check(profile(tmp_path, server={"flags": {"pp-size": 2}}), free_bytes=FREE)
    assert {
        "server.flags.pp-size",
        "pair.draft.vocab_size",
        "pair.draft.max_position_embeddings",
    } <= {c.name for c in checks if c.status == "refused"}
    assert not any(c.name.startswith("memory") for c in checks)


def test_dummy_weights_need_no_files(tmp_path):
    write_pair(tmp_path)
    for which in ("target", "draft"):
        (tmp_path / which / "model.safetensors").unlink()
    dummy = {
        "flags": {"load-format": "dummy", "disable-radix-cache": True, "max-total-tokens": 1024},
        "environment": {"SGLANG_SIMULATE_ACC_LEN": "2.1"},
    }
    checks = preflight.check(profile(tmp_path, server=dummy), free_bytes=FREE)
    assert [c.name for c in checks if c.status != "passed"] == [
        "server.environment.SGLANG_SIMULATE_ACC_LEN"
    ]
    assert (
        found(tmp_path, "server.flags.load-format", server={"flags": dummy["flags"]}).status
        == "warned"
    )
    assert (
        found(
            tmp_path,
            "pair.target",
            "refused",
            server={"flags": {"speculative-draft-load-format": "dummy"}},
        ).status
        == "refused"
    )


def test_prefill_graphs_in_a_group_of_the_drafts_own_are_warned_of(tmp_path):
    """SGLang captures them on GPUs unless told otherwise; there they were not seen yet."""
    write_pair(tmp_path)
    name = "server.flags.cuda-graph-backend-prefill"

    def warned(engine: str, arms: list[str], **flags) -> bool:
        made = profile(
            tmp_path,
            engine=engine,
            plan={"arms": arms},
            server={"flags": {"disable-radix-cache": True, **flags}},
        )
        return any(
            c.name == name and c.status == "warned" for c in preflight.check(made, free_bytes=FREE)
        )

    assert warned("cuda", ["shared", "own-1"]) and warned(
        "cuda", ["own-1"], **{"cuda-graph-backend-prefill": "full"}
    )
    assert not warned("cuda", ["none", "shared"]) and not warned("cpu", ["shared", "own-1"])
    assert not warned(
        "cuda", ["own-1"], **{"cuda-graph-backend-prefill": "disabled"}
    ) and not warned("cuda", ["own-1"], **{"disable-cuda-graph": True})


@pytest.mark.parametrize(
    "name, changes",
    [
        ("plan.arms own-2", {"plan": {"arms": ["shared", "own-2"]}}),
        ("workload.prompts", {"workload": {"prompts": "random"}}),
        ("server.flags.disable-radix-cache", {"server": {"flags": {}}}),
        (
            "server.flags.max-running-requests",
            {"server": {"flags": {"max-running-requests": 1}}, "workload": {"concurrency": 4}},
        ),
        (
            "server.flags.speculative-token-map",
            {"server": {"flags": {"speculative-token-map": "a.pt"}}},
        ),
    ],
)
def test_what_can_be_run_but_means_less_is_warned_of(tmp_path, name, changes):
    write_pair(tmp_path)
    check = found(tmp_path, name, **changes)
    assert check.status == "warned" and check.mend
    preflight.refuse(preflight.check(profile(tmp_path, **changes), free_bytes=FREE))


def test_flags_are_known_however_they_are_spelt(tmp_path):
    write_pair(tmp_path)
    spelt = profile(tmp_path, server={"flags": {"--max_total_tokens": 77}})
    assert spelt.flag("max-total-tokens") == 77
    assert {
        "max-total-tokens",
        "disable-cuda-graph",
        "tensor-parallel-size",
        "fp8-gemm-backend",
        "config",
    } <= server_flags.known()
    assert not {"colour", "max-tokens-total"} & server_flags.known()


# ------------------------------------------------------------------ rules that depend on the
# architecture


@pytest.mark.parametrize(
    "architecture, ids, captured",
    [
        ("llama", (0, 3, 6), [1, 4, 7]),
        ("llama", None, [2, 4, 5]),
        ("deepseek", (2, 4, 7), [2, 4, 7]),
        ("deepseek", (1, 3, 5), [2, 4, 6]),
        ("deepseek", None, [2, 4, 5]),
    ],
)
def test_layers_are_captured_as_each_target_counts_them(tmp_path, architecture, ids, captured):
    target = read(
        write(tmp_path, TARGET if architecture == "llama" else DEEPSEEK, {}), "pair.target"
    )
    assert aux_layers.captured_layers(target, ids) == captured


def test_the_last_layer_of_a_deepseek_target_is_captured_and_that_of_a_llama_is_not(tmp_path):
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}}
    write_pair(tmp_path, draft=ids)
    draft = read(tmp_path / "draft", "pair.draft")
    for config, status in ((TARGET, "refused"), (DEEPSEEK, "passed")):
        target = read(write(tmp_path / config["model_type"], config, {}), "pair.target")
        assert aux_layers.aux_layers(profile(tmp_path), target, draft).status == status


def test_aux_layers_out_of_order_are_joined_in_another(tmp_path):
    write_pair(tmp_path, draft={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 3, 1]}})
    assert found(tmp_path, "pair.draft.eagle_aux_hidden_state_layer_ids").status == "warned"


def test_ids_outside_eagle_config_that_say_what_the_default_says(tmp_path):
    write_pair(
        tmp_path, draft={"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    )
    assert found(tmp_path, "pair.draft.eagle_aux_hidden_state_layer_ids").status == "passed"


def test_kv_heads_are_replicated_where_there_are_fewer_than_ranks(tmp_path):
    write_pair(tmp_path, target={"num_key_value_heads": 1}, draft={"num_key_value_heads": 1})
    eager = {
        "flags": {
            "max-total-tokens": 1024,
            "disable-radix-cache": True,
            "cuda-graph-backend-prefill": "disabled",
        }
    }
    assert statuses(tmp_path, tp=4, engine="cuda", server=eager) == {"passed"}
    assert "1 of 1 KV heads each" in found(tmp_path, "tp", tp=4, engine="cuda").detail


def test_a_llama_draft_beside_an_mla_target_needs_a_back_end_of_its_own(tmp_path):
    write_pair(tmp_path)
    write(tmp_path / "target", DEEPSEEK, {})
    name = "server.flags.speculative-draft-attention-backend"
    on = lambda engine, **flags: (
        found(tmp_path, name, engine=engine, server={"flags": flags}).status
    )
    assert on("cuda") == "warned" and on("cuda", **{"attention-backend": "trtllm_mla"}) == "refused"
    assert on("cuda", **{"attention-backend": "triton"}) == on("cpu") == "passed"
    assert (
        on(
            "cuda",
            **{"attention-backend": "trtllm_mla", "speculative-draft-attention-backend": "triton"},
        )
        == "passed"
    )


def test_an_mla_target_on_the_cpu_engine_needs_yarn(tmp_path):
    write_pair(tmp_path)
    write(tmp_path / "target", DEEPSEEK | {"rope_scaling": None}, {})
    assert found(tmp_path, "pair.target.rope_scaling").status == "refused"
    assert found(tmp_path, "pair.target.rope_scaling", engine="cuda").status == "passed"


def test_a_short_draft_context_is_allowed_by_name(tmp_path):
    write_pair(tmp_path, draft={"max_position_embeddings": 128})
    name = "pair.draft.max_position_embeddings"
    assert found(tmp_path, name).status == "refused"
    assert (
        found(
            tmp_path,
            name,
            server={"environment": {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}},
        ).status
        == "passed"
    )
    assert found(tmp_path, name, server={"flags": {"context-length": 128}}).status == "passed"


def test_a_port_that_is_free(tmp_path):
    import socket

    write_pair(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert found(tmp_path, "server.flags.port", server={"flags": {"port": port}}).status == "passed"


def test_free_memory_is_that_of_the_gpus_that_the_ranks_take(tmp_path, monkeypatch):
    fake_gpus.install(monkeypatch, ["GPU-a", "GPU-b", "GPU-c"], [100 << 20, 300 << 20, 200 << 20])
    cuda = profiles.load("cpu-tiny").model_copy(update={"engine": "cuda"})
    apart = cuda.model_copy(
        update={"server": cuda.server.model_copy(update={"flags": {"base-gpu-id": 1}})}
    )
    for given, expected in ((cuda, [100, 300]), (apart, [300, 200])):
        found = memory_fit.devices(given, None)[0]
        assert [device.free >> 20 for device in found] == expected
        assert {device.total >> 20 for device in found} == {143771}
    fake_gpus.install(monkeypatch, [])
    assert [(c.status, c.name) for c in memory_fit.devices(cuda, None)[1]] == [("refused", "tp")]


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    "vocabulary, ranks, rows",
    [
        (128, 2, 64),
        (100, 1, 128),
        (100, 2, 64),
        (100, 3, 64),
        (200, 8, 32),
        (163840, 8, 20480),
        (32000, 8, 4000),
        (151936, 3, 50688),
    ],
)
def test_vocabularies_are_padded_to_64_and_to_64_times_ranks_where_that_does_not_divide(
    vocabulary, ranks, rows
):
    assert sharding.padded_rows(vocabulary, ranks) == rows


def layer_bytes(config: dict, ranks: int, wide: int = 1, norms: int = 2) -> int:
    """Float32 bytes of one LLaMA layer on a rank."""
    hidden, size, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = (
        config["num_attention_heads"] // ranks,
        max(1, config["num_key_value_heads"] // ranks),
    )
    return 4 * (
        wide * hidden * width * (heads + 2 * kv)
        + heads * width * hidden
        + 3 * hidden * size // ranks
        + norms * hidden
    )


def predicted(root, arm: str, **changes) -> memory.ArmMemory:
    chosen = profile(root, **changes)
    return memory.predict(
        chosen,
        read(chosen.pair.target, "pair.target"),
        read(chosen.pair.draft, "pair.draft"),
        Arm.parse(arm),
    )


def test_weights_pools_and_copied_embedding_of_every_arm(tmp_path):
    write_pair(tmp_path)
    target = 2 * 64 * 32 * 4 + 8 * layer_bytes(TARGET, 2) + 32 * 4

    def draft(
        ranks: int,
        # the head's rows, fc whole, the layer with its norms and hidden_norm, the last norm, d2t
    ) -> int:
        return (
            64 // ranks * 32 * 4 + 32 * 96 * 4 + layer_bytes(DRAFT, ranks, 2, 3) + 32 * 4 + 64 * 8
        )

    kv = 2 * 1 * 8 * 4  # K and V of one head of 8 values on each of two ranks
    assert predicted(tmp_path, "none") == memory.ArmMemory(
        "none", target, 0, 0, 8 * kv, 0, 8 * kv, True
    )
    assert predicted(tmp_path, "shared") == memory.ArmMemory(
        "shared", target, draft(2), 0, 8 * kv, kv, 9 * kv, True
    )
    # own-1 keeps both KV heads, the whole head and all 128 rows of the target's embedding.
    assert predicted(tmp_path, "own-1") == memory.ArmMemory(
        "own-1", target, draft(1), 128 * 32 * 4, 8 * kv, 2 * kv, 10 * kv, True
    )


def test_a_server_of_several_arms_holds_each_draft_once_at_its_own_price(tmp_path):
    write_pair(tmp_path)
    alone = {
        Arm.parse(name): predicted(tmp_path, name)
        for name in ("shared", "own-1", "shared#2", "own-1+steps=2")
    }
    shared, own = (alone[Arm.parse(name)] for name in ("shared", "own-1"))
    held = memory.together(alone)
    assert (held.target, held.draft, held.embedding) == (
        own.target,
        2 * shared.draft + own.draft,
        own.embedding,
    )
    assert (
        held.draft_kv == 2 * shared.draft_kv + own.draft_kv
        and held.priced == held.kv + held.draft_kv
    )
    assert (
        memory.together({arm: alone[arm] for arm in map(Arm.parse, ("own-1", "own-1+steps=2"))})
        == own
    )
    assert held.tokens(FREE) < min(need.tokens(FREE) for need in alone.values())


@pytest.mark.parametrize("restart", [False, True])
def test_a_server_that_is_to_hold_several_arms_is_given_room_for_all(restart, tmp_path):
    write_pair(tmp_path)
    plan = {"arms": ["none", "shared", "own-1"], "restart": restart}
    names = [c.name for c in preflight.check(profile(tmp_path, plan=plan), free_bytes=FREE)]
    assert ("memory shared and own-1" in names) == (not restart) and "memory own-1" in names
    own = predicted(tmp_path, "own-1")
    one = {
        "flags": {
            "mem-fraction-static": (own.weights + 1025 * own.priced) / FREE,
            "max-total-tokens": 1024,
        }
    }  # room for one draft
    checks = {
        c.name: c
        for c in preflight.check(profile(tmp_path, plan=plan, server=one), free_bytes=FREE)
    }
    assert checks["memory own-1"].status == "passed"
    if not restart:
        assert (
            checks["memory shared and own-1"].status != "passed"
            and "1024 is cut to" in checks["memory shared and own-1"].detail
        )


def test_a_borrowed_head_is_copied_with_the_embedding(tmp_path):
    write_pair(tmp_path, maps={})
    config = DRAFT | {"draft_vocab_size": None}
    write(tmp_path / "draft", config, draft_sizes(config) | {"lm_head.weight": None})
    own, shared = predicted(tmp_path, "own-1"), predicted(tmp_path, "shared")
    assert own.embedding == 2 * 128 * 32 * 4 and shared.embedding == 0
    assert shared.draft == 32 * 96 * 4 + layer_bytes(DRAFT, 2, 2, 3) + 32 * 4


def test_replicated_kv_heads_are_counted_on_every_rank(tmp_path):
    write_pair(tmp_path, target={"num_key_value_heads": 1}, draft={"num_key_value_heads": 1})
    needs = predicted(
        tmp_path, "shared", tp=4, engine="cuda", server={"flags": {"dtype": "float32"}}
    )
    assert (needs.kv, needs.draft_kv) == (8 * 2 * 8 * 4, 2 * 8 * 4)
    assert (
        needs.target
        == 2 * 32 * 32 * 4 + 8 * layer_bytes(TARGET | {"num_key_value_heads": 1}, 4) + 32 * 4
    )


def test_the_cpu_engine_pads_intermediate_sizes_to_32_a_rank(tmp_path):
    write_pair(tmp_path, target={"intermediate_size": 80})
    on = lambda engine: (
        predicted(tmp_path, "none", engine=engine, server={"flags": {"dtype": "float32"}}).target
    )
    assert on("cpu") - on("cuda") == 8 * 3 * 32 * (128 - 80) // 2 * 4


def test_the_latent_of_an_mla_target_is_whole_on_every_rank_and_prices_the_draft(tmp_path):
    write_pair(tmp_path)
    write(tmp_path / "target", DEEPSEEK, {})
    shared, own = predicted(tmp_path, "shared"), predicted(tmp_path, "own-1")
    assert shared.kv == own.kv == (16 + 4) * 8 * 4
    assert (
        shared.priced == shared.kv + 20 * 4 and shared.draft_kv == 2 * 8 * 4
    )  # SGLang prices the draft's layer like a latent
    assert own.priced == own.kv + own.draft_kv == own.kv + 2 * 2 * 8 * 4


def test_an_mla_draft_caches_one_latent_on_every_rank_and_splits_fc_by_rows(tmp_path):
    write_pair(tmp_path)
    write(tmp_path / "target", DEEPSEEK, {})
    write(tmp_path / "draft", MLA_DRAFT, {})
    split = (
        128 * 32 + 3 * 32 * 32 + 4 * 12 * 16 + 2 * 4 * 16 * 16 + 32 * 32 + 3 * 32 * 64
    )  # head, fc, Q, KV twice, output, feed-forward
    needs = {
        arm: predicted(tmp_path, arm, engine="cuda", server={"flags": {"dtype": "float32"}})
        for arm in ("shared", "own-1")
    }
    whole = 64 * (16 + 20) + 2 * 16 + 4 * 32  # latent projections, which read 2 x 32, and six norms
    assert needs["shared"].draft == 4 * (whole + split // 2) and needs["own-1"].draft == 4 * (
        whole + split
    )
    for need in needs.values():
        assert (
            need.exact
            and need.draft_kv == (16 + 4) * 4
            and need.priced == need.kv + need.draft_kv == 9 * 20 * 4
        )
    assert needs["own-1"].embedding == 128 * 32 * 4 and needs["shared"].embedding == 0


def test_the_norms_before_an_mla_draft_s_fc_are_whole(tmp_path):
    draft = read(write(tmp_path, MLA_DRAFT | {"fc_norm": True}, {}), "pair.draft")
    norms = [t for t in sharding.implied(draft) if t.name.startswith("fc_norm.")]
    assert [t.name for t in norms] == [f"fc_norm.{i}.weight" for i in range(3)]
    assert {sharding.rank_elements(draft, t, 2) for t in norms} == {32}


@pytest.mark.parametrize(
    "change, name, words",
    [
        ({"num_hidden_layers": 2}, "pair.draft.num_hidden_layers", "is 2, and"),
        ({"q_lora_rank": None}, "pair.draft.q_lora_rank", "is missing"),
        ({"kv_lora_rank": None}, "pair.draft.kv_lora_rank", "is missing"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "pair.draft.quantization_config",
            "quantises kv_b_proj",
        ),
    ],
)
def test_an_mla_draft_that_sglang_cannot_build_is_refused(tmp_path, change, name, words):
    write_pair(tmp_path)
    write(tmp_path / "target", DEEPSEEK, {})
    write(tmp_path / "draft", MLA_DRAFT | change, {})
    refusal = found(tmp_path, name, engine="cuda")
    assert refusal.status == "refused" and words in refusal.detail


def test_an_mla_draft_on_the_cpu_engine_needs_yarn(tmp_path):
    write_pair(tmp_path)
    write(tmp_path / "target", DEEPSEEK, {})
    write(tmp_path / "draft", MLA_DRAFT, {})
    assert (
        found(tmp_path, "pair.draft.rope_scaling").status
        == found(tmp_path, "speculation.algorithm").status
        == "passed"
    )
    write(tmp_path / "draft", MLA_DRAFT | {"rope_scaling": None}, {})
    assert found(tmp_path, "pair.draft.rope_scaling").status == "refused"
    assert found(tmp_path, "pair.draft.rope_scaling", engine="cuda").status == "passed"


def test_experts_are_split_and_latent_projections_are_not(tmp_path):
    target = read(write(tmp_path, DEEPSEEK, {}), "pair.target")
    values = lambda name, shape: sharding.rank_elements(
        target, sharding.Tensor(f"model.layers.1.{name}", shape, "F32"), 2
    )
    assert (
        values("mlp.experts.3.down_proj.weight", (32, 32))
        == values("self_attn.q_b_proj.weight", (32, 32))
        == 512
    )
    assert (
        values("mlp.gate.weight", (8, 32)) == 256
        and values("self_attn.kv_a_proj_with_mqa.weight", (20, 32)) == 640
    )
    assert (
        values("self_attn.kv_b_proj.weight", (64, 16)) == 1024
    )  # half of it, twice: split into K and V parts beside the weight


def test_quantised_weights_keep_their_stored_size(tmp_path):
    target = read(write(tmp_path, TARGET, {}), "pair.target")
    size = lambda name, dtype: sharding.rank_bytes(
        target, sharding.Tensor(f"layers.0.mlp.{name}", (64, 32), dtype), 2, "BF16"
    )
    assert (
        size("up_proj.weight", "F32"),
        size("up_proj.weight", "F8_E4M3"),
        size("up_proj.weight_packed", "I32"),
    ) == (2048, 1024, 4096)
    assert size("up_proj.weight_scale_inv", "F32") == 4096


def test_a_full_head_of_the_origin_s_size_is_2_35_gb_on_one_gpu_and_an_eighth_on_eight(tmp_path):
    config = DRAFT | dict(
        hidden_size=7168,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=112,
        intermediate_size=18432,
        vocab_size=163840,
        draft_vocab_size=163840,
        torch_dtype="bfloat16",
    )
    draft = read(write(tmp_path, config, {}), "pair.draft")
    served = profile(tmp_path, engine="cuda", tp=8)
    target = read(
        write(
            tmp_path / "t",
            TARGET | {"vocab_size": 163840, "hidden_size": 7168, "torch_dtype": "bfloat16"},
            {},
        ),
        "pair.target",
    )
    own = memory.predict(served, target, draft, Arm.parse("own-1"))
    assert round(own.embedding / 1e9, 2) == 2.35
    headless = read(write(tmp_path / "h", config | {"draft_vocab_size": 64}, {}), "pair.draft")
    for arm, head in (("own-1", 2.348e9), ("shared", 2.348e9 / 8)):
        whole, without = (
            memory.predict(served, target, d, Arm.parse(arm)).draft for d in (draft, headless)
        )
        assert whole - without == pytest.approx(head, rel=0.001)


def test_room_counts_tokens_as_sglang_does(tmp_path):
    write_pair(tmp_path)
    half = {"flags": {"mem-fraction-static": 0.5, "disable-radix-cache": True}}
    needs = predicted(tmp_path, "own-1", server=half)
    free = 2 * (needs.weights + 1000 * needs.priced + needs.priced // 2)
    assert "1000 tokens" in found(tmp_path, "memory own-1", free=free, server=half).detail
    capped = {"flags": half["flags"] | {"max-total-tokens": 2000}}
    assert found(tmp_path, "memory own-1", free=free, server=capped).status == "warned"
    assert (
        found(tmp_path, "memory own-1", free=[free, 2 * needs.weights], server=half).status
        == "refused"
    )  # the fullest GPU decides


def test_arms_with_pools_of_different_sizes_are_warned_of(tmp_path):
    write_pair(tmp_path)
    check = found(
        tmp_path,
        "server.flags.max-total-tokens",
        server={"flags": {"mem-fraction-static": 0.5, "disable-radix-cache": True}},
    )
    needs = memory.together(
        {Arm.parse(arm): predicted(tmp_path, arm) for arm in ("shared", "own-1")}
    )
    assert check.status == "warned" and check.mend.startswith(
        f"set it to {((4 << 30) - needs.weights) // needs.priced} or less"
    )
    alone = {
        "plan": {"arms": ["none"]},
        "server": {"flags": {"mem-fraction-static": 0.5, "disable-radix-cache": True}},
    }
    assert statuses(tmp_path, **alone) == {"passed"}


def test_a_draft_that_costs_more_than_it_is_priced_is_found_out(tmp_path):
    """Beside an MLA target SGLang sets aside a latent for the draft's layer; a LLaMA-like draft
    with wide heads takes many times that.
    """
    wide = {"num_key_value_heads": 4, "head_dim": 1024}
    write_pair(tmp_path, draft=wide)
    write(tmp_path / "target", DEEPSEEK, {})
    flags = {"mem-fraction-static": 0.9, "disable-radix-cache": True, "load-format": "dummy"}
    check = found(tmp_path, "memory shared", free=20_000_000, server={"flags": flags})
    assert (
        check.status == "refused"
        and "prices 720 bytes a token where 17024 are taken" in check.detail
    )
    most = int(check.mend.split()[-3])
    mended = found(
        tmp_path,
        "memory shared",
        free=20_000_000,
        server={"flags": flags | {"max-total-tokens": most}},
    )
    assert mended.status == "passed"


def test_a_layout_that_is_not_known_is_never_refused_for_memory(tmp_path):
    write_pair(tmp_path, target={"architectures": ["SomethingElseForCausalLM"]})
    assert found(tmp_path, "memory none", free=100_000).status == "warned"
    assert "a guide only" in found(tmp_path, "memory none").detail


@pytest.mark.parametrize(
    "free, flags, engine, kept",
    [  # on GPUs: tests/engine/test_memory_of_sglang.py
        (8 << 30, {}, "cpu", (512 + 3072 + 256) / 2),
        (8 << 30, {"chunked-prefill-size": 4096}, "cpu", (512 + 6144 + 256) / 2),
        (80 << 30, {}, "cpu", 10 * 1024 / 2),
    ],
)
def test_what_sglang_keeps_back_without_a_fraction(tmp_path, free, flags, engine, kept):
    assert memory.static_bytes(
        profile(tmp_path, engine=engine, server={"flags": flags}), free
    ) == free - kept * (1 << 20)


def test_sizes_in_words():
    assert [memory.gib(n) for n in (12, 2048, 3 << 20, 5 << 29)] == [
        "12 bytes",
        "2.00 KiB",
        "3.00 MiB",
        "2.50 GiB",
    ]


def test_maps_are_read_from_whichever_file_holds_them(tmp_path):
    write_pair(tmp_path)
    (tmp_path / "draft" / "model.safetensors").unlink()
    config = (tmp_path / "draft" / "config.json").read_text()
    for name, sizes, values in (("a", draft_sizes(DRAFT), {}), ("b", {}, token_maps())):
        write(tmp_path / name, DRAFT, sizes, values)
        (tmp_path / name / "model.safetensors").rename(
            tmp_path / "draft" / f"model-{name}.safetensors"
        )
    assert (tmp_path / "draft" / "config.json").read_text() == config and statuses(tmp_path) == {
        "passed"
    }


def test_float32_is_for_the_cpu_engine(tmp_path):
    write_pair(tmp_path)
    half, full = (
        {"flags": {"dtype": dtype, "max-total-tokens": 1024}} for dtype in ("bfloat16", "float32")
    )
    assert found(tmp_path, "server.flags.dtype", engine="cuda", server=half).status == "passed"
    refusal = found(tmp_path, "server.flags.dtype", engine="cuda", server=full)
    assert refusal.status == "refused" and "no RMSNorm on GPUs" in refusal.detail
    assert (
        found(tmp_path, "server.flags.dtype", server={"flags": {"max-total-tokens": 1024}}).status
        == "passed"
    )


@pytest.mark.parametrize(("count", "status"), [(2, "passed"), (3, "refused")])
def test_servers_that_load_together_leave_each_other_the_share_that_sglang_keeps_free(
    count, status
):
    # With the control 3 x 43.6 GiB, less than the 139.8 free and more than 0.9 of them, which is
    # where a third server died on two H200.
    chosen = profiles.load("h200-x2-kimi-mini-mla", {"at_once": count})
    arms = [Arm.parse(name) for name in with_control(chosen.plan.arms)]
    [check] = [
        c
        for c in preflight.check(chosen, arms, free_bytes=150109945856)
        if c.name == "server.at_once"
    ]
    assert check.status == status and f"{count} servers take up to" in check.detail
