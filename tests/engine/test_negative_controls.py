"""What must fail does fail, loudly and within its deadline: each place left out, a corrupted rank, unsupported flags, another SGLang."""
import subprocess
import sys
import time

import pytest
from serving import ask, serving

from workbench import keeper, server
from workbench.arms import Arm
from workbench.errors import ServerFailed

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("place", ["embedding", "kv_pool"])
def test_without_a_place_of_the_patch_the_server_refuses_itself(place, tiny, logfolder):
    words = {"embedding": "embedding place of the patch is not in force", "kv_pool": "KV pool place of the patch is not in force"}
    with pytest.raises(ServerFailed, match=words[place]):
        with serving(tiny, "own-1", logfolder / place, omit=(place,)):
            pass


def test_a_corrupted_rank_without_agreement_is_detected_within_the_deadline(tiny, heldout, logfolder):
    quick = tiny.model_copy(update={"server": tiny.server.model_copy(update={"token_within_s": 15, "ready_within_s": 120})})
    begun = time.monotonic()
    with pytest.raises(ServerFailed, match="hung|no completion|died") as failure:
        with serving(quick, "own-1+agreement=off", logfolder / "off", corrupt_rank=1) as up:
            assert any("planted fault" in reason for reason in up.unattested)
            from workbench import client
            for _ in range(4):
                answers = client.send(up.url, heldout[:4], concurrency=2, max_new_tokens=64, deadline_s=15)
                if any(a.error for a in answers):
                    raise ServerFailed(f"died: {answers[0].error}")
            # Different trees in step by chance: then the tokens themselves must give it away.
            raise AssertionError("a corrupted rank served four rounds of requests unnoticed")
    assert time.monotonic() - begun < 240, failure


def test_a_corrupted_rank_is_named_by_check(tiny, heldout, logfolder):
    with pytest.raises(ServerFailed, match="drafted another tree|ranks \\[1\\]"):
        with serving(tiny, "own-1+agreement=check", logfolder / "check", corrupt_rank=1):
            pass


def test_a_corrupted_rank_is_overruled_by_broadcast_but_never_attested(tiny, heldout, decoded, logfolder):
    with serving(tiny, "own-1", logfolder / "broadcast", corrupt_rank=1) as up:
        assert any("planted fault" in reason for reason in up.unattested)
        answers = ask(up, heldout[:4])
    assert [a.output_ids for a in answers] == [d.output_ids for d in decoded[:4]]
    assert keeper.processes(up.launch.server) == []


@pytest.mark.parametrize(("flags", "words"), [
    (["--pp-size", "2"], "pipeline parallelism"),
    (["--speculative-adaptive"], "--speculative-adaptive"),
    (["--disaggregation-mode", "prefill"], "PD disaggregation"),
])
def test_unsupported_flags_stop_the_server_in_one_sentence(flags, words, tiny):
    launch = server.plan(tiny, Arm.parse("own-1"), port=server.free_port(), server="flags")
    import os
    done = subprocess.run([*launch.command, *flags], env={**os.environ, **launch.environment}, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if line.startswith("draft-tp: ")]
    assert done.returncode == 1 and len(said) == 1 and words in said[0], done.stderr[-2000:]


@pytest.mark.parametrize(("fault", "words"), [
    ("import importlib.metadata as m; real = m.version; m.version = lambda name: '0.5.24' if name == 'sglang' else real(name)",
     "patches SGLang 0.5.23 and found 0.5.24"),
    ("from sglang.srt.speculative import draft_parallel as d; del d.resolve_draft_parallel_layout", "resolve_draft_parallel_layout is missing"),
    ("from sglang.srt.speculative import draft_parallel as d; d.resolve_draft_parallel_layout = lambda spec: None",
     "takes spec where model_spec, collapse_cp was expected"),
    ("from sglang.srt.plugins.hook_registry import HookRegistry as H; H.apply_hooks = classmethod(lambda cls: None)", "was not applied"),
])
def test_another_sglang_stops_the_process_in_one_sentence(fault, words, tiny):
    import os
    launch = server.plan(tiny, Arm.parse("own-1"), port=1, server="fault")
    code = f"{fault}\nfrom workbench.engine.plugin import register\nregister('scheduler')"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **launch.environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "draft-tp: " in done.stderr and words in done.stderr.splitlines()[-1], done.stderr[-2000:]
