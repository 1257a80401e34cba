"""What several arms in one server are not shown to work with stops the launcher in one sentence; a
flush keeps the allocator's memory.
"""

from types import SimpleNamespace

import pytest

from workbench.engine import arm_route, arm_switch, unsupported
from workbench.engine.orders import Orders, Placement
from workbench.experiment import profile
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.serving import launch_command

HOT = Orders(arms=(Placement("shared"), Placement("shared#2", number=2)))
FIELDS = dict.fromkeys(entry.field for entry in unsupported.UNSUPPORTED)


def check(orders: Orders, **arguments) -> None:
    (hook,) = unsupported.argument_hooks(orders)
    hook.function(SimpleNamespace(**{**FIELDS, **arguments}), [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"enable_hierarchical_cache": True}, "hierarchical cache"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"disaggregation_mode": "decode"}, "PD disaggregation"),
        ({"tokenizer_worker_num": 2}, "tokenizer workers"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"enable_dp_attention": True}, "DP attention"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_each_is_refused_in_one_sentence(arguments, words):
    with pytest.raises(SystemExit) as refused:
        check(HOT, **arguments)
    said = str(refused.value)
    assert (
        said.startswith("draft-tp: several arms in one server are not to be combined with ")
        and words in said
    )
    assert said.count(". ") == 0 and said.endswith(".")


def test_kv_sizing_after_capture_is_refused(monkeypatch):
    check(HOT)
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    with pytest.raises(
        SystemExit, match="several arms in one server .* SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
    ):
        check(HOT)
    check(Orders(arms=(Placement("own-1", 1),)))  # of one draft, SGLang resizes the right pool


def test_a_single_shared_arm_and_the_arm_none_are_left_to_sglang():
    assert (
        unsupported.argument_hooks(Orders(arms=(Placement("shared"),)))
        == unsupported.argument_hooks(Orders())
        == []
    )
    assert (
        arm_switch.hooks(Orders(arms=(Placement("own-1", 1),)), None)
        == arm_route.hooks(Orders())
        == []
    )


def test_a_flush_keeps_the_allocators_memory():
    seen = []
    assert (
        arm_switch.keep_allocator(
            lambda scheduler, empty_cache: seen.append(empty_cache) or True, "scheduler"
        )
        is True
    )
    arm_switch.keep_allocator(
        lambda scheduler, empty_cache: seen.append(empty_cache), "scheduler", True
    )
    assert seen == [False, False]


def plan(*names: str) -> launch_command.Launch:
    return launch_command.plan(
        profile.load("cpu-tiny"), [Arm.parse(name) for name in names], port=1, server="x"
    )


def test_the_largest_step_count_is_the_servers_own():
    launch = plan("own-1+steps=2", "shared+steps=5", "shared+steps=0")
    flags = dict(zip(launch.command, launch.command[1:]))
    assert (
        flags["--speculative-num-steps"],
        flags["--speculative-num-draft-tokens"],
        flags["--speculative-eagle-topk"],
    ) == ("5", "6", "1")
    assert [(p.arm, p.group, p.number, p.steps, p.draft_tokens) for p in launch.orders.arms] == [
        ("own-1+steps=2", 1, 1, 2, 3),
        ("shared+steps=5", None, 1, 5, 6),
        ("shared+steps=0", None, 1, 0, 1),
    ]


def test_a_replica_is_a_draft_of_its_own_and_other_settings_are_not():
    assert [p.draft.number for p in plan("shared", "shared#2", "shared+steps=2").orders.arms] == [
        1,
        2,
        1,
    ]
    assert len(plan("own-1", "own-1+agreement=off", "own-1+steps=2").orders.drafts) == 1
    assert [p.agreement for p in plan("own-1", "own-1+agreement=off").orders.arms] == [
        "broadcast",
        "off",
    ]


@pytest.mark.parametrize(
    "names", [("none", "shared"), ("shared", "none"), ("shared", "own-1+topk=2+draft_tokens=6")]
)
def test_arms_that_one_server_cannot_hold_are_refused_before_it_starts(names):
    with pytest.raises(BadInput, match="cannot be held by one server, .*serve them one by one"):
        plan(*names)
    assert plan("none", "none#2").orders.arms == ()
