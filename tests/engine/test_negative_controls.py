"""What must fail does fail, loudly and within its deadline: each place left out, a corrupted rank,
unsupported flags, another SGLang.
"""

import time
from types import SimpleNamespace

import pytest
from serving import ask, serving

from workbench.answers import negative_control
from workbench.engine import unsupported
from workbench.engine.orders import Orders, Placement
from workbench.experiment.arms import Arm
from workbench.experiment.errors import ServerFailed
from workbench.run import lab
from workbench.serving import launch_command, supervisor

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("place", ["embedding", "kv_pool"])
def test_without_a_place_of_the_patch_the_server_refuses_itself(place, tiny, logfolder):
    words = {
        "embedding": "embedding place of the patch is not in force",
        "kv_pool": "KV pool place of the patch is not in force",
    }
    with pytest.raises(ServerFailed, match=words[place]):
        with serving(tiny, "own-1", logfolder / place, omit=(place,)):
            pass


def test_a_corrupted_rank_is_caught_by_check_and_without_agreement(tiny, tmp_path):
    run = lab.open_lab("cpu-tiny", tmp_path / "run", {"negative_control": True})
    begun = time.monotonic()
    said = dict(zip(("check", "off"), negative_control.corrupted_rank(run)))
    found = {r.name: r.value for r in run.records}
    assert (
        all(value["detected"] and value["within_s"] < 240 for value in found.values())
        and time.monotonic() - begun < 300
    )
    assert "drafted another tree than rank 0" in said["check"] and "ranks [1]" in said["check"]
    assert "rank 1 corrupted on purpose: caught within" in said["off"]
    assert found["own-1+agreement=off"]["attested"] is not True
    before = len(run.records)
    assert (
        negative_control.corrupted_rank(run) == list(said.values()) and len(run.records) == before
    )


def test_a_corrupted_rank_is_overruled_by_broadcast_but_never_passes_the_placement_check(
    tiny, heldout, decoded, logfolder
):
    with serving(tiny, "own-1", logfolder / "broadcast", corrupt_rank=1) as up:
        assert any("planted fault" in reason for reason in up.unattested)
        answers = ask(up, heldout[:4])
    assert [a.output_ids for a in answers] == [d.output_ids for d in decoded[:4]]
    assert supervisor.processes(up.launch.server) == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("pp_size", 2, "pipeline parallelism"),
        ("attn_cp_size", 2, "context parallelism"),
        ("enable_dp_attention", True, "DP attention"),
        ("speculative_adaptive", True, "--speculative-adaptive"),
        ("disaggregation_mode", "prefill", "PD disaggregation"),
        ("speculative_use_rejection_sampling", True, "rejection sampling"),
        ("enable_lora", True, "LoRA"),
        ("enable_hierarchical_cache", True, "hierarchical cache"),
    ],
)
def test_an_unsupported_argument_is_one_sentence(field, value, words):
    [hook] = unsupported.argument_hooks(Orders(arms=(Placement("own-1", 1),)))
    harmless = dict.fromkeys(entry.field for entry in unsupported.UNSUPPORTED)
    hook.function(SimpleNamespace(**harmless), [])
    with pytest.raises(SystemExit, match=words):
        hook.function(SimpleNamespace(**harmless | {field: value}), [])


def test_an_unsupported_flag_stops_the_server_before_a_model_is_loaded(tiny, logfolder):
    """By the launcher's own hooks, whose sentence a fork server does not lose."""
    flags = tiny.server.model_copy(update={"flags": tiny.server.flags | {"pp-size": 2}})
    with pytest.raises(ServerFailed, match="died while starting: [^\n]*pipeline parallelism"):
        with serving(tiny.model_copy(update={"server": flags}), "own-1", logfolder / "flags"):
            pass
    said = next((logfolder / "flags").glob("*.log")).read_text()
    assert (
        said.count("draft-tp: ") == 1
        and supervisor.account(said)["status"] == 1
        and "Load weight" not in said
    )


FAULTS = {
    "patches SGLang 0.5.23 and found 0.5.24": (
        "import workbench.engine.hooks as h; h.version = lambda name: '0.5.24'"
    ),
    "resolve_draft_parallel_layout is missing": (
        "from sglang.srt.speculative import draft_parallel as d; del"
        " d.resolve_draft_parallel_layout"
    ),
    "takes spec where model_spec, collapse_cp was expected": (
        "from sglang.srt.speculative import draft_parallel as d; d.resolve_draft_parallel_layout ="
        " lambda spec: None"
    ),
    "was not applied": (
        "from sglang.srt.plugins.hook_registry import HookRegistry as H; H.apply_hooks ="
        " classmethod(lambda cls: None)"
    ),
}


def test_another_sglang_stops_the_process_in_one_sentence(tiny, imported):
    """Each fault is planted in a fork of a process that has imported SGLang."""
    launch = launch_command.plan(tiny, Arm.parse("own-1"), port=1, server="fault")
    for words, fault in FAULTS.items():
        code = f"""
from workbench.engine.plugin import register
{fault}
register("scheduler")
"""
        ran = imported.run(code, launch.environment)
        said = [line for line in ran.err.splitlines() if line.startswith("draft-tp: ")]
        assert ran.status == 1 and len(said) == 1 and words in said[0], (words, ran.err[-2000:])
