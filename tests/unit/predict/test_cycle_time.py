"""The cost model against figures worked out by hand, simulation for experts, and its limits."""

import json
import random

import pytest
from tiny_models import DEEPSEEK, DRAFT, TARGET, write_pair
from tiny_models import profile as tiny_profile

from workbench.experiment import profile
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.profile import Profile
from workbench.predict import cycle_time, model_shape
from workbench.predict.cycle_time import (
    Prediction,
    best,
    by_placement,
    placements,
    predict,
    verify_s,
)
from workbench.predict.machine import Latency, Machine
from workbench.predict.stage_work import Collective, Work, distinct_experts, forward, stages

GB, US = 1e9, 1e-6


def machine(ranks: int = 8, latency: float = 10 * US, **changes) -> Machine:
    """4 TB/s, 700 TFLOP/s; any collective of any size takes ``latency``."""
    groups = [n for n in range(2, ranks + 1) if ranks % n == 0]
    latencies = tuple(
        Latency(kind, "nccl", n, graph, ((1, latency),))
        for kind in ("all_reduce", "all_gather", "broadcast")
        for n in groups
        for graph in (False, True)
    )
    return Machine(
        **{
            "name": "m",
            "engine": "cuda",
            "ranks": ranks,
            "copy_bytes_per_s": 4e12,
            "thin_bytes_per_s": 4e12,
            "matrix_ops_per_s": 7e14,
            "launch_s": 3 * US,
            "graph_launch_s": 0.0,
            "graph_replay_s": 0.0,
            "latencies": latencies,
            **changes,
        }
    )


def folder(path, config: dict):
    """A model folder with a config.json alone: its weights are those that the configuration
    implies.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


WIDE = dict(
    hidden_size=7168,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=112,
    intermediate_size=18432,
    vocab_size=163840,
    torch_dtype="bfloat16",
    max_position_embeddings=4096,
)
KIMI = DEEPSEEK | dict(
    hidden_size=7168,
    num_hidden_layers=4,
    num_attention_heads=64,
    num_key_value_heads=64,
    n_routed_experts=384,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    vocab_size=163840,
    torch_dtype="bfloat16",
)


@pytest.fixture()
def origin(tmp_path):
    """The shape of the field report on 8 GPUs: target of 16 layers, draft of one, hidden 7168,
    full-vocabulary head, 5 steps.
    """
    target, draft = (
        TARGET | WIDE | dict(num_hidden_layers=16),
        DRAFT | WIDE | dict(draft_vocab_size=163840),
    )
    profile = Profile(
        name="origin",
        engine="cuda",
        tp=8,
        workload={"prompts": "random"},
        speculation={"steps": 5, "draft_tokens": 6},
        pair={
            "target": folder(tmp_path / "target", target),
            "draft": folder(tmp_path / "draft", draft),
        },
    )
    return (
        profile,
        model_shape.read(tmp_path / "target", "pair.target"),
        model_shape.read(tmp_path / "draft", "pair.draft"),
    )


@pytest.fixture()
def tiny(tmp_path):
    write_pair(tmp_path)
    return (
        tiny_profile(tmp_path),
        model_shape.read(tmp_path / "target", "pair.target"),
        model_shape.read(tmp_path / "draft", "pair.draft"),
    )


def counted(work: Work) -> dict[str, int]:
    return {
        kind: sum(c.count for c in work.collectives if c.kind == kind)
        for kind in ("all_reduce", "all_gather", "broadcast")
    }


# ------------------------------------------------------------------ experts


def test_distinct_experts_of_one_token_and_of_many():
    assert distinct_experts(384, 8, 1) == pytest.approx(8)
    assert distinct_experts(384, 8, 0) == 0
    assert distinct_experts(384, 8, 6) == pytest.approx(384 * (1 - (376 / 384) ** 6))
    assert distinct_experts(8, 8, 3) == pytest.approx(8)
    assert distinct_experts(384, 8, 1e6) == pytest.approx(384)


def test_distinct_experts_agree_with_drawing_them():
    rng = random.Random(1)
    drawn = [
        len({expert for _ in range(6) for expert in rng.sample(range(64), 4)}) for _ in range(4000)
    ]
    assert distinct_experts(64, 4, 6) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)


@pytest.mark.parametrize("given", [(8, 0, 1), (8, 9, 1), (8, 2, -1)])
def test_what_is_no_routing_is_refused(given):
    with pytest.raises(BadInput):
        distinct_experts(*given)


# ------------------------------------------------------------------ collectives


def test_collectives_are_those_counted_in_sglang(origin):
    profile, target, draft = origin
    shared, own = (stages(profile, target, draft, Arm.parse(name)) for name in ("shared", "own-1"))
    assert counted(shared["draft"]) == {
        "all_reduce": 12,
        "all_gather": 4,
        "broadcast": 0,
    }  # 4 forwards
    assert counted(shared["draft_extend"]) == {"all_reduce": 3, "all_gather": 1, "broadcast": 0}
    assert (
        counted(shared["verify"])
        == counted(own["verify"])
        == {
            "all_reduce": 33,
            "all_gather": 1,
            "broadcast": 0,
        }
    )
    assert (
        counted(own["draft"]) == {"all_reduce": 0, "all_gather": 0, "broadcast": 1}
        and not own["draft_extend"].collectives
    )
    assert (
        counted(stages(profile, target, draft, Arm.parse("own-1+agreement=off"))["draft"])[
            "broadcast"
        ]
        == 0
    )
    # 5 steps: 15 all-reduces and 5 all-gathers a cycle.
    assert (
        counted(shared["draft"])["all_reduce"] + counted(shared["draft_extend"])["all_reduce"] == 15
    )


def test_messages_have_their_sizes(origin):
    profile, target, draft = origin
    shared = stages(profile, target, draft, Arm.parse("shared"))
    assert Collective("all_reduce", 7168 * 2, 8, 12) in shared["draft"].collectives
    assert Collective("all_gather", 163840 // 8 * 2, 8, 4) in shared["draft"].collectives
    assert Collective("all_reduce", 6 * 7168 * 2, 8, 33) in shared["verify"].collectives
    assert Collective("all_gather", 6 * 163840 // 8 * 2, 8, 1) in shared["verify"].collectives
    assert (
        Collective("all_gather", 163840 // 8 * 2, 8, 1) in shared["draft_extend"].collectives
    )  # one row, in a graph
    own = stages(profile, target, draft, Arm.parse("own-2"))
    assert Collective("all_reduce", 7168 * 2, 2, 12) in own["draft"].collectives
    assert Collective("broadcast", 8 * 5, 8, 1) in own["draft"].collectives
    tree = stages(profile, target, draft, Arm.parse("shared+topk=2+draft_tokens=8"))
    assert Collective("all_reduce", 2 * 7168 * 2, 8, 12) in tree["draft"].collectives


def test_the_tiny_pair_on_the_cpu_matches_what_was_counted_there(tiny):
    profile, target, draft = tiny
    shared = stages(profile, target, draft, Arm.parse("shared"))
    assert counted(shared["draft"]) == {"all_reduce": 6, "all_gather": 2, "broadcast": 0}
    assert counted(shared["draft_extend"]) == {"all_reduce": 3, "all_gather": 1, "broadcast": 0}
    assert counted(shared["verify"]) == {"all_reduce": 17, "all_gather": 1, "broadcast": 0}


# ------------------------------------------------------------------ bytes and operations


def test_a_draft_step_on_one_gpu_reads_all_of_its_weights(origin):
    profile, _, draft = origin
    head, hidden = 163840 * 7168, 7168
    # That report's figure: 2.35 GB a step for the head alone.
    assert 2 * head == pytest.approx(2.35e9, rel=0.002)
    attention = 2 * hidden * (64 + 2 * 8) * 112 + hidden * 64 * 112
    feed_forward, norms = 3 * hidden * 18432, 4 * hidden
    weights = head + attention + feed_forward + norms
    step = forward(profile, draft, 1, 1, rows=1)
    assert step.bytes == pytest.approx(2 * (weights + hidden))
    assert step.operations == pytest.approx(2 * weights)
    extend = forward(profile, draft, 1, 6, rows=1, fc=True)
    assert extend.bytes - step.bytes == pytest.approx(2 * (3 * hidden * hidden + 5 * hidden))
    assert extend.operations == pytest.approx(
        2 * (6 * (weights - head + 3 * hidden * hidden) + head)
    )


def test_an_mla_draft_gathers_its_fc_once_in_draft_extend_where_it_is_split():
    chosen = profile.load("h200-x2-kimi-mini-mla")
    target, draft = (
        model_shape.read(getattr(chosen.pair, side), f"pair.{side}") for side in ("target", "draft")
    )
    shared, own = (stages(chosen, target, draft, Arm.parse(arm)) for arm in ("shared", "own-1"))
    assert counted(shared["draft"]) == {"all_reduce": 12, "all_gather": 4, "broadcast": 0}
    assert counted(shared["draft_extend"]) == {"all_reduce": 3, "all_gather": 2, "broadcast": 0}
    assert Collective("all_gather", 6 * 7168 // 2 * 2, 2, 1) in shared["draft_extend"].collectives
    assert (
        counted(own["draft"]) == {"all_reduce": 0, "all_gather": 0, "broadcast": 1}
        and not own["draft_extend"].collectives
    )
    hidden, latent = 7168, 1536 + 512 + 64
    attention = (
        2 * hidden * latent + 64 * 192 * 1536 + 64 * 256 * 512 + hidden * 64 * 128 + 1536 + 512
    )
    weights = 163840 * hidden + attention + 3 * hidden * 18432 + 4 * hidden
    assert forward(chosen, draft, 1, 1, rows=1).bytes == pytest.approx(2 * (weights + hidden))


def test_a_group_shares_its_weights_and_not_its_norms(origin):
    profile, _, draft = origin
    one, eight = (forward(profile, draft, n, 1, rows=1).bytes for n in (1, 8))
    assert eight == pytest.approx(one / 8, rel=0.001) and eight > one / 8


def test_kv_is_read_for_every_request(tiny):
    profile, target, draft = tiny
    empty, full = (
        stages(profile, target, draft, Arm.parse("own-1"), context=context, concurrency=3)
        for context in (0, 100)
    )
    # fp32, 8 layers, 2 KV heads of 8 over 2 ranks; the draft's one layer has both heads.
    assert full["verify"].bytes - empty["verify"].bytes == pytest.approx(300 * 8 * 1 * 2 * 8 * 4)
    assert full["draft"].bytes - empty["draft"].bytes == pytest.approx(2 * 300 * 2 * 2 * 8 * 4)


def test_a_mixture_reads_the_union_of_its_tokens_experts(tmp_path):
    profile = Profile(
        name="k",
        engine="cuda",
        tp=8,
        workload={"prompts": "random"},
        pair={"target": "t", "draft": "d"},
    )
    shape = model_shape.read(folder(tmp_path / "kimi", KIMI), "pair.target")
    one, six = (forward(profile, shape, 8, width, rows=width) for width in (1, 6))
    expert, sparse = 3 * 7168 * 2048 / 8, 3
    assert six.bytes - one.bytes == pytest.approx(
        2 * (sparse * expert * (distinct_experts(384, 8, 6) - 8) + 5 * 7168)
    )
    # Of kv_b_proj a decode step reads one copy; latent projections and router are whole on every
    # rank.
    latent = (
        1536 * 7168
        + 576 * 7168
        + 64 * 192 * 1536 / 8
        + 64 * 256 * 512 / 8
        + 7168 * 64 * 128 / 8
        + 1536
        + 512
        + 2 * 7168
    )
    dense = 3 * 7168 * 18432 / 8 + sparse * (384 * 7168 + 3 * 7168 * 2048 / 8)
    always = 4 * latent + dense + 7168 + 163840 / 8 * 7168 + 7168
    assert one.bytes == pytest.approx(2 * (always + sparse * 8 * expert), rel=1e-5)
    assert one.operations == pytest.approx(2 * (always - 7168 + sparse * 8 * expert), rel=1e-4)


def test_weights_that_nobody_knows_are_not_guessed(tmp_path):
    profile = Profile(
        name="x",
        engine="cuda",
        tp=2,
        workload={"prompts": "random"},
        pair={"target": "t", "draft": "d"},
    )
    strange = model_shape.read(
        folder(tmp_path / "x", TARGET | {"architectures": ["StrangeForCausalLM"]}), "pair.target"
    )
    with pytest.raises(
        BadInput, match="pair.target: the weights of StrangeForCausalLM are not known"
    ):
        forward(profile, strange, 2, 1, rows=1)
    silent = model_shape.read(
        folder(tmp_path / "y", {k: v for k, v in DEEPSEEK.items() if k != "num_experts_per_tok"}),
        "pair.target",
    )
    with pytest.raises(BadInput, match="num_experts_per_tok"):
        forward(profile, silent, 2, 1, rows=1)


# ------------------------------------------------------------------ seconds


def test_a_stage_is_its_bytes_and_its_collectives(origin):
    profile, target, draft = origin
    found = predict(profile, target, draft, Arm.parse("own-1"), machine())
    step = forward(profile, draft, 1, 1, rows=1).bytes
    assert found.stages["draft"].total_s == pytest.approx(4 * step / 4e12 + 10 * US)
    assert found.stages["draft_extend"].collective_s == 0
    assert found.draft_s == pytest.approx(
        found.stages["draft"].total_s + found.stages["draft_extend"].total_s
    )
    assert found.cycle_s == pytest.approx(found.draft_s + found.stages["verify"].total_s)


def test_large_weights_are_read_as_fast_as_copies_and_each_product_takes_its_own_time(origin):
    """The measured product of 7168 x 7168 takes 30 us where a copy of its bytes would take 25.7:
    each product takes those 4.3 us more.
    """
    profile, target, draft = origin
    found = machine(thin_bytes_per_s=2 * 7168**2 / 30e-6)
    each = 30e-6 - 2 * 7168**2 / 4e12
    assert found.read_s(4e9, 10) == pytest.approx(1e-3 + 10 * each) and each == pytest.approx(
        4.3e-6, rel=0.01
    )
    assert found.read_s(2 * 7168**2, 1) == pytest.approx(30e-6)  # as measured
    # QKV, output, gate and up, down; the head; and fc where hidden states are joined.
    assert (
        forward(profile, draft, 1, 1, rows=1).products == 5
        and forward(profile, draft, 1, 1, rows=1, fc=True).products == 6
    )
    assert forward(profile, target, 2, 6, rows=6).products == 16 * 4 + 1
    step = forward(profile, draft, 1, 1, rows=1)
    assert cycle_time.cost(profile, step.times(4), found).bytes_s == pytest.approx(
        4 * (step.bytes / 4e12 + 5 * each)
    )
    assert machine(thin_bytes_per_s=5e12).read_s(5e9, 10) == pytest.approx(
        1e-3
    )  # a copy is slower: the product's rate
    assert machine(engine="cpu", thin_bytes_per_s=1e12).read_s(5e9, 10) == pytest.approx(5e-3)
    assert machine(copy_bytes_per_s=None).read_s(4e9, 10) == pytest.approx(1e-3)


def test_a_mixture_reads_its_experts_in_two_products_a_layer(tmp_path):
    (tmp_path / "t").mkdir()
    target = model_shape.read(
        folder(tmp_path / "t", KIMI | dict(first_k_dense_replace=1, n_shared_experts=1)),
        "pair.target",
    )
    write_pair(tmp_path)
    # Of each layer the first projections, q_b, kv_b and output; a dense one 2 more, a sparse one
    # router, shared and routed experts.
    assert (
        forward(tiny_profile(tmp_path), target, 2, 1, rows=1).products
        == 4 * 4 + 2 + 3 * (1 + 2 + 2) + 1
    )


def test_the_slower_of_device_and_host_sets_the_pace():
    parts = {"draft": cycle_time.Cost(1e-3, 0, 0, 0), "verify": cycle_time.Cost(2e-3, 0, 0, 0)}
    assert Prediction("shared", parts, host_s=5e-3).cycle_s == 5e-3 and Prediction(
        "shared", parts, host_s=1e-3
    ).cycle_s == pytest.approx(3e-3)
    assert Prediction("shared", parts, 5e-3).device_s == pytest.approx(3e-3)


def test_the_floor_of_a_draft_seen_on_two_h200(origin, tmp_path):
    """A trial there with own-1, hidden 7168 and a head of 32000 tokens: draft 1.9 to 2.6 ms for 5
    steps, 1.5 ms by its weights alone.
    """
    profile, target, _ = origin
    draft = model_shape.read(
        folder(tmp_path / "small", DRAFT | WIDE | dict(draft_vocab_size=32000)), "pair.draft"
    )
    two = profile.model_copy(update={"tp": 2})
    found = predict(two, target, draft, Arm.parse("own-1+agreement=off"), machine(2))
    assert (
        1.4e-3 < found.stages["draft"].total_s < 1.9e-3
        and 0.4e-3 < found.stages["draft_extend"].total_s < 0.62e-3
    )


def test_operations_bound_a_stage_where_they_take_longer(origin):
    profile, *_ = origin
    slow = cycle_time.cost(profile, Work(bytes=4e9, operations=7e12), machine())
    assert slow.work_s == slow.operations_s == pytest.approx(
        10e-3
    ) and slow.bytes_s == pytest.approx(1e-3)


def test_launches_cost_nothing_in_graphs_but_their_place(origin):
    profile, *_ = origin
    work, eager = (
        Work(bytes=4e6, kernels=100),
        profile.model_copy(
            update={
                "server": profile.server.model_copy(update={"flags": {"disable-cuda-graph": True}})
            }
        ),
    )
    assert cycle_time.cost(profile, work, machine()).launch_s == 0
    placed = machine(graph_launch_s=1 * US, graph_replay_s=8 * US)
    assert cycle_time.cost(profile, work, placed).launch_s == pytest.approx(108 * US)
    assert cycle_time.cost(profile, work, placed, kernels=50).launch_s == pytest.approx(58 * US)
    # Without graphs the GPU works while it is launched to: 300 us of launches hide 1 us of work,
    # and 400 us of work hide them.
    assert cycle_time.cost(eager, work, machine()).total_s == pytest.approx(300 * US)
    assert cycle_time.cost(eager, Work(bytes=1.6e9, kernels=100), machine()).launch_s == 0
    on_cpu = cycle_time.cost(profile.model_copy(update={"engine": "cpu"}), work, machine())
    assert on_cpu.total_s == pytest.approx(301 * US)


def test_custom_all_reduce_is_used_unless_it_is_switched_off(origin):
    profile, *_ = origin
    both = machine(
        latencies=(
            Latency("all_reduce", "nccl", 8, True, ((1, 20 * US),)),
            Latency("all_reduce", "custom", 8, True, ((65536, 5 * US),)),
        )
    )
    work = Work(collectives=(Collective("all_reduce", 14336, 8, 2),))
    off = profile.model_copy(
        update={
            "server": profile.server.model_copy(
                update={"flags": {"disable_custom_all_reduce": True}}
            )
        }
    )
    assert cycle_time.cost(profile, work, both).total_s == pytest.approx(10 * US)
    assert cycle_time.cost(off, work, both).total_s == pytest.approx(40 * US)


def test_without_speculation_there_is_a_decode_step(origin):
    profile, target, draft = origin
    found = predict(profile, target, draft, Arm.parse("none"), machine())
    assert list(found.stages) == ["decode"] and found.draft_s == 0
    assert found.cycle_s == pytest.approx(verify_s(profile, target, machine(), [1])[1])


def test_fewer_steps_draft_less(origin):
    profile, target, draft = origin
    one, none = (
        predict(profile, target, draft, Arm.parse(f"shared+steps={n}"), machine()) for n in (1, 0)
    )
    assert one.stages["draft"].total_s == 0 and none.stages["draft"].total_s == 0
    assert one.stages["verify"].total_s > none.stages["verify"].total_s


# ------------------------------------------------------------------ the best N


def test_every_divisor_is_a_placement(origin):
    profile, _, draft = origin
    assert [arm.name for arm in placements(profile, draft)] == [
        "shared",
        "own-1",
        "own-2",
        "own-4",
        "own-8",
    ]


def test_a_size_that_the_heads_do_not_take_is_none(tmp_path):
    write_pair(
        tmp_path,
        target={"num_attention_heads": 6, "num_key_value_heads": 6},
        draft={"num_attention_heads": 3, "num_key_value_heads": 3},
    )
    profile, draft = (
        tiny_profile(tmp_path, tp=6),
        model_shape.read(tmp_path / "draft", "pair.draft"),
    )
    assert [arm.name for arm in placements(profile, draft)] == ["shared", "own-1", "own-3"]


@pytest.mark.parametrize(
    "latency, winner",
    [(1 * US, "shared"), (40 * US, "own-4"), (60 * US, "own-4"), (5000 * US, "own-1")],
)
def test_the_best_size_trades_weights_against_collectives(origin, latency, winner):
    profile, target, draft = origin
    # Groups of 8 are twice as slow as groups of 4 and 2, as where they cross sockets.
    base = machine(latency=latency)
    slow8 = machine(
        latencies=tuple(
            Latency(
                t.kind, t.backend, t.ranks, t.graph, ((1, latency * (2 if t.ranks == 8 else 1)),)
            )
            for t in base.latencies
        )
    )
    assert best(by_placement(profile, target, draft, slow8)).arm == winner


def test_own_n_of_all_ranks_is_shared_and_the_agreement(origin):
    profile, target, draft = origin
    found = by_placement(profile, target, draft, machine())
    assert found["own-8"].draft_s == pytest.approx(found["shared"].draft_s + 10 * US)


def test_a_machine_that_was_not_measured_for_a_group_is_refused(origin):
    profile, target, draft = origin
    with pytest.raises(BadInput, match="groups of 8"):
        predict(profile, target, draft, Arm.parse("shared"), machine(ranks=4))


# ------------------------------------------------------------------ verify


def test_verify_of_a_mixture_grows_with_its_width_and_of_a_dense_target_hardly(origin, tmp_path):
    profile, target, _ = origin
    kimi = model_shape.read(folder(tmp_path / "kimi", KIMI), "pair.target")
    dense, sparse = (verify_s(profile, shape, machine(latency=0)) for shape in (target, kimi))
    assert list(dense) == list(range(1, 9)) and sorted(sparse.values()) == list(sparse.values())
    assert dense[8] / dense[1] < 1.01 and sparse[8] / sparse[1] > 2


def test_best_of_predictions_counts_drafting_only():
    slow_verify = Prediction(
        "a",
        {
            "draft": cycle_time.Cost(1, 0, 0, 0),
            "verify": cycle_time.Cost(9, 0, 0, 0),
            "draft_extend": cycle_time.Cost(1, 0, 0, 0),
        },
    )
    slow_draft = Prediction(
        "b",
        {
            "draft": cycle_time.Cost(3, 0, 0, 0),
            "verify": cycle_time.Cost(1, 0, 0, 0),
            "draft_extend": cycle_time.Cost(1, 0, 0, 0),
        },
    )
    assert best({"a": slow_verify, "b": slow_draft}).arm == "a"
