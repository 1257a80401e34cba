"""What can be known of Kimi-K2.5 as published, from headers over holes: no GPU, no 595 GB."""

from pathlib import Path

import kimi_folders
import pytest

from workbench import cli
from workbench.experiment import profile
from workbench.experiment.profile_sections import ROOT
from workbench.predict import memory, model_shape, preflight, stage_work

GIB = 1 << 30
# By hand from the published shapes: INT4 experts with their scales, everything else in BF16, on
# eight ranks; a draft of 2.6 billion parameters on each rank, and its copy of the embedding.
BY_HAND = {"none": 71.95, "own-2": 74.51, "own-1": 76.78}
ALL_ARMS = 81.35


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("kimi")
    kimi_folders.published(made / "target")
    kimi_folders.published_draft(made / "draft")
    kimi_folders.prompts(made / "prompts.json")
    return made


def changes(folder: Path, **more) -> dict:
    files = {"target": folder / "target", "draft": folder / "draft"}
    return {k: str(v) for k, v in files.items()} | {"prompts": str(folder / "prompts.json")} | more


def test_the_profile_of_the_origin_passes_and_its_weights_are_those_counted_by_hand(folder):
    chosen = profile.load("rtx6000-x8-kimi", changes(folder))
    checks = preflight.check(chosen, free_bytes=95 * GIB)
    assert {c.status for c in checks} == {"passed"}, [c for c in checks if c.status != "passed"]
    target, draft = (
        model_shape.read(getattr(chosen.pair, side), f"pair.{side}") for side in ("target", "draft")
    )
    needs = {arm: memory.predict(chosen, target, draft, arm) for arm in chosen.arms}
    found = {arm.name: need.weights / GIB for arm, need in needs.items()}
    assert {name: found[name] for name in BY_HAND} == pytest.approx(BY_HAND, rel=0.002)
    assert memory.together(needs).weights / GIB == pytest.approx(ALL_ARMS, rel=0.002)


def test_a_forward_reads_its_weights_by_as_many_products_as_counted_by_hand(folder):
    """A layer: Q's second projection, the first ones in one, kv_b, o; the router; gate_up and down
    of the experts and of the shared one. The first layer has one feed-forward; one is the head.
    """
    chosen = profile.load("rtx6000-x8-kimi", changes(folder))
    target = model_shape.read(chosen.pair.target, "pair.target")
    assert stage_work.forward(chosen, target, 8, 1, rows=1).products == 60 * 9 + 6 + 1


def test_sglangs_own_share_is_refused_with_the_flags_that_fit(folder, capsys):
    words = [word for k, v in changes(folder).items() for word in ("-p", f"{k}={v}")]
    words = ["check", "rtx6000-x8-kimi", "--gpus", "8x95GiB", *words]
    default = ["-p", "server.flags.mem-fraction-static=null"]
    default += ["-p", "server.flags.chunked-prefill-size=null"]
    assert cli.main(words + default) == 2
    said = capsys.readouterr().err
    mend = "set server.flags.mem-fraction-static to 0.90, chunked-prefill-size to 2048 and"
    assert "weights of 76.78 GiB leave no room in 74.05 GiB" in said and mend in said
    assert "max-total-tokens to 24576" in said  # the profile has these flags, and passes


@pytest.mark.parametrize("given", ["8", "8x", "x96GiB", "8x0GiB", "8 x 96GiB", "8x96"])
def test_gpus_that_cannot_be_reckoned_with_are_refused(given, capsys):
    assert cli.main(["check", "cpu-tiny", "--gpus", given]) == 2
    assert "--gpus" in capsys.readouterr().err


def test_too_few_gpus_are_named(capsys):
    assert cli.main(["check", "h200-x4", "--gpus", "2x140GiB"]) == 2
    assert "2 GPUs are visible" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "value", "expected"),
    [
        ("server.flags.context-length", 512, ("context-length", 512)),
        ("server.flags.max_total_tokens", 2048, ("max-total-tokens", 2048)),
        ("server.flags.max-total-tokens", None, ("max-total-tokens", None)),
    ],
)
def test_one_flag_is_changed_and_the_others_stay(change, value, expected):
    before, after = profile.load("cpu-tiny"), profile.load("cpu-tiny", {change: value})
    name, now = expected
    assert after.flag(name) == now
    others = {key: value for key, value in before.flags.items() if key != name}
    assert {key: value for key, value in after.flags.items() if key != name} == others


def test_one_variable_is_changed_by_its_own_name():
    changed = profile.load("cpu-tiny", {"server.environment.NCCL_DEBUG": "INFO"})
    assert changed.server.environment == {"NCCL_DEBUG": "INFO"}


def test_nothing_of_the_published_folders_is_left_in_the_repository():
    assert not list(ROOT.glob("fixtures/**/model-0*-of-0*.safetensors"))
