"""Several drafts in one server: each arm does what it does in a server of its own, and a switch is
of all ranks or of none.

The traps are those that a server of several arms can fall into; each has a test or, where it would
show on no token, a planted fault.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import TOKENS, ask, histogram, per_round, serving

from workbench.answers import offline_decoder, torch_trace, trace_parts
from workbench.experiment.arms import Arm
from workbench.experiment.errors import ServerFailed
from workbench.serving import attestation, client, supervisor

pytestmark = pytest.mark.engine
# Collectives of draft and draft-extend, a round (tests/engine/test_four_ranks.py says what they are
# made of).
ARMS = {
    "shared": (8, 4),
    "own-1": (1, 0),
    "shared#2": (8, 4),
    "own-1+steps=2": (1, 0),
    "shared+steps=2": (4, 4),
    "own-1+steps=0": (0, 0),
    "own-1+agreement=off": (0, 0),
}


@pytest.fixture(scope="module")
def hot(tiny, logfolder):
    with serving(tiny, ARMS, logfolder) as up:
        yield up


@pytest.fixture(scope="session")
def references(tiny, heldout, decoded):
    """The offline reference by step count."""
    shallow = offline_decoder.decode(
        tiny.pair.target, tiny.pair.draft, [p["input_ids"] for p in heldout[:3]], TOKENS, 2
    )
    return {3: decoded[:3], 2: shallow}


def asked(profile, name: str):
    return profile.speculation.of(Arm.parse(name))


def check(
    up, name: str, tiny, heldout, references, collectives: tuple[int, int], single: int = 3
) -> list:
    """Switch to an arm and hold everything about it against the offline reference and a server of
    its own; returns the answers. single: how many of three prompts are asked one by one, all three
    being asked together too.
    """
    speculation = asked(tiny, name)
    before = client.switch(up.url, name, 30)
    assert attestation.inactive_on(Arm.parse(name), before["active"], tiny.tp, speculation) == []
    alone, together = ask(up, heldout[:single]), ask(up, heldout[:3], concurrency=4)
    rounds, said = per_round(up, before["counts"]), client.server_info(up.url)["draft_tp"]
    expected = references[3]
    assert [a.output_ids for a in alone] == [d.output_ids for d in expected[:single]]
    assert [a.output_ids for a in together] == [d.output_ids for d in expected]
    if speculation.steps:
        drafted = references[speculation.steps][:single]
        assert [a.verify_ct for a in alone] == [sum(d.histogram) for d in drafted]
        assert histogram(alone, speculation.steps) == offline_decoder.total_histogram(drafted)
    assert (rounds.get("draft", 0), rounds["draft_extend"]) == collectives
    assert (
        rounds["verify"] == 14
    )  # 6 layers of the target, embedding and logits: of the target's own group in every arm
    counted = {
        stage: n - before["counts"]["rounds"].get(stage, 0)
        for stage, n in said["counts"]["rounds"].items()
    }
    verified = {
        w: n - before["counts"]["verified"].get(w, 0) for w, n in said["counts"]["verified"].items()
    }
    assert (
        attestation.miscounted(
            Arm.parse(name),
            speculation,
            alone + together,
            counted,
            {w: n for w, n in verified.items() if n},
        )
        == []
    )
    return alone


def test_all_of_them_pass_the_placement_check(hot):
    assert hot.unattested == () and len(hot.attestation) == 2
    held = {p["arm"]: p for p in hot.attestation[1]["placements"]}
    assert list(held) == list(ARMS)
    assert [
        held[arm]["group_ranks"] for arm in ("shared", "shared#2", "own-1", "own-1+steps=2")
    ] == [[0, 1], [0, 1], [1], [1]]
    assert (
        held["shared"]["weights"] == held["shared#2"]["weights"]
        and held["own-1"]["kv_heads"] == 2 * held["shared"]["kv_heads"]
    )


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_is_as_in_a_server_of_its_own(arm, hot, tiny, heldout, references):
    check(hot, arm, tiny, heldout, references, ARMS[arm])


def test_an_arm_whose_step_count_was_just_active_elsewhere_gets_its_own_back(
    hot, tiny, heldout, references
):
    # own-1 leaves 3 steps with the worker, so that the switch to shared, which last ran 2, looks
    # like none (eagle_worker_v2.py:1863).
    for arm in ("shared", "shared+steps=2", "own-1"):
        client.switch(hot.url, arm, 30)
    check(hot, "shared", tiny, heldout, references, ARMS["shared"])


def test_every_draft_pool_is_in_the_kv_budget_at_its_own_head_count(hot, tiny):
    priced, real = map(
        int,
        re.search(
            r"KV budget: (\d+) bytes a token by SGLang, (\d+) with", hot.log.read_text()
        ).groups(),
    )
    layers = json.loads((tiny.pair.target / "config.json").read_text())["num_hidden_layers"]
    target = (
        priced * layers // (layers + 1)
    )  # SGLang prices the draft's one layer like one of the target's
    held = {(tuple(p["group_ranks"]), p["number"]): p for p in hot.attestation[0]["placements"]}
    assert (
        len(held) == 3
    )  # shared, shared#2 and own-1: arms of other steps share their draft's pool
    assert real == target + sum(p["memory"]["kv"] // p["memory"]["rows"] for p in held.values())


def test_two_hundred_switches_leave_memory_flat(hot, heldout, decoded):
    def resident() -> list[int]:
        return [
            p.memory_info().rss
            for p in supervisor.processes(hot.launch.server)
            if p.name().startswith("sglang::schedul")
        ]

    names, before, early = list(ARMS), client.server_info(hot.url)["draft_tp"]["switches"], []
    for number in range(200):
        said = client.switch(hot.url, names[number % len(names)], 30)
        if number % 16 == 0:  # which comes to every arm
            assert ask(hot, heldout[:1], tokens=8)[0].output_ids == decoded[0].output_ids[:8]
        if number == 40:
            early = resident()
    late = resident()
    assert said["switches"] - before == 200 and len(early) == len(late) == 2
    assert all(b - a < 4 << 20 for a, b in zip(sorted(early), sorted(late))), (early, late)


def in_work(up, prompt: dict, tokens: int, pool: ThreadPoolExecutor):
    """A request of so many tokens, once the server has begun to verify for it."""
    before = client.server_info(up.url)["draft_tp"]["counts"]["rounds"]["verify"]
    sent = pool.submit(
        client.send, up.url, [prompt], concurrency=1, max_new_tokens=tokens, deadline_s=120
    )
    while client.server_info(up.url)["draft_tp"]["counts"]["rounds"]["verify"] == before:
        time.sleep(0.01)
    return sent


def test_a_busy_server_refuses_at_once_or_waits_and_the_request_is_not_harmed(hot, tiny, heldout):
    client.switch(hot.url, "shared", 30)
    undisturbed = ask(hot, heldout[1:2], tokens=128)[0]
    refused = hot.log.read_text().count("TP0] draft-tp: the arm was not switched")
    with ThreadPoolExecutor(1) as pool:
        sent = in_work(hot, heldout[1], 128, pool)
        with pytest.raises(ServerFailed, match="requests are in work"):
            client.switch(hot.url, "own-1", 0)
        assert (
            attestation.inactive_on(
                Arm.parse("shared"),
                client.server_info(hot.url)["draft_tp"]["active"],
                2,
                asked(tiny, "shared"),
            )
            == []
        )
        said = client.switch(hot.url, "own-1", 120)
        answer = sent.result()[0]
    assert (answer.output_ids, answer.histogram) == (undisturbed.output_ids, undisturbed.histogram)
    assert (
        attestation.inactive_on(Arm.parse("own-1"), said["active"], 2, asked(tiny, "own-1")) == []
    )
    # One attempt a call, and then one deferred flush to wait with: asking again and again would
    # hold the request up.
    assert hot.log.read_text().count("TP0] draft-tp: the arm was not switched") - refused == 2


def test_waiting_has_a_deadline(hot, heldout):
    client.switch(hot.url, "shared", 30)
    with ThreadPoolExecutor(1) as pool:
        sent = in_work(hot, heldout[2], 160, pool)
        with pytest.raises(ServerFailed, match="requests are in work"):
            client.switch(hot.url, "own-1", 0.05)
        assert sent.result()[0].error is None
    assert client.server_info(hot.url)["draft_tp"]["arm"] == "shared"


def test_a_switch_fired_together_with_requests_never_corrupts_one(hot, tiny, heldout, decoded):
    arms = ("own-1", "shared", "own-1+steps=2")
    with ThreadPoolExecutor(4) as pool:
        for number in range(12):  # each arm in each place among the requests

            def switch():
                try:
                    return client.switch(hot.url, arms[number % 3], 0)["arm"]
                except ServerFailed as refused:
                    return str(refused)

            work = [
                lambda i=i: client.send(
                    hot.url, heldout[i : i + 1], concurrency=1, max_new_tokens=12, deadline_s=60
                )[0]
                for i in range(3)
            ]
            work.insert(number % 4, switch)
            done = [future.result() for future in [pool.submit(one) for one in work]]
            outcome, answers = done.pop(number % 4), done
            assert [a.output_ids for a in answers] == [d.output_ids[:12] for d in decoded[:3]], (
                number,
                outcome,
            )
            assert outcome == arms[number % 3] or "requests are in work" in outcome
            said = client.server_info(hot.url)["draft_tp"]
            assert (
                attestation.inactive_on(
                    Arm.parse(said["arm"]), said["active"], 2, asked(tiny, said["arm"])
                )
                == []
            )


def test_what_cannot_be_switched_to_is_refused_with_the_reason_and_the_server_lives(
    hot, heldout, decoded
):
    client.switch(hot.url, "shared", 30)
    with pytest.raises(ServerFailed, match="holds shared, own-1, .*, not none"):
        client.switch(hot.url, "none", 5)
    status, _ = client._run(client._post(hot.url, "/draft_tp/arm", {"name": "own-1"}, 30))
    assert status == 400
    status, said = client._run(
        client._post(hot.url, "/set_internal_state", {"server_args": {"draft_tp_arm": 99}}, 30)
    )
    assert (status, said) == (200, [False])
    account = client.server_info(hot.url)["draft_tp"]
    assert "no arm number 99" in account["refusal"] and account["arm"] == "shared"
    assert ask(hot, heldout[:1])[0].output_ids == decoded[0].output_ids


def test_profiled_cycles_are_those_of_the_arm_in_force(hot, heldout, tmp_path):
    """A real trace of SGLang's profiler, one file a rank: as many rounds as the server counted, and
    the draft's collectives where it has any.
    """
    seconds = {}
    for name in ("shared", "own-1"):
        before = client.switch(hot.url, name, 30)["counts"]["rounds"]
        assert client.start_profile(hot.url, tmp_path / name, "cpu") == ""
        ask(hot, heldout[:1], tokens=24)
        assert client.stop_profile(hot.url) == ""
        counted = client.server_info(hot.url)["draft_tp"]["counts"]["rounds"]
        first, *others = [torch_trace.read(path) for path in sorted((tmp_path / name).iterdir())]
        assert len(others) == 1
        parts = trace_parts.decompose(first, others)
        for stage in ("draft", "verify", "draft_extend", "prefill", "draft_prefill"):
            assert parts[stage].rounds == counted[stage] - before.get(stage, 0) > 0
        assert parts["verify"].seconds["matrix"] > 0 and "between stages" in parts
        seconds[name] = {
            stage: parts[stage].collectives_s for stage in ("draft", "draft_extend", "verify")
        }
    assert (
        all(seconds["shared"].values())
        and seconds["own-1"]["draft_extend"] == 0 < seconds["own-1"]["verify"]
    )
    assert client.stop_profile(hot.url).startswith("/stop_profile was refused with HTTP 500")


def test_a_refusal_of_one_rank_and_a_stale_state_are_seen(
    tiny, heldout, decoded, references, logfolder
):
    arms = ("shared", "own-1", "shared+steps=2", "own-1+steps=2")
    with serving(tiny, arms, logfolder / "faults", refusing_rank=1, omit=("forced_state",)) as up:
        assert any("planted fault" in reason for reason in up.unattested)
        client.switch(up.url, "own-1", 30)
        with pytest.raises(ServerFailed, match="rank 1 refuses the last arm"):
            client.switch(up.url, "own-1+steps=2", 30)
        said = client.server_info(up.url)["draft_tp"]
        assert (
            attestation.inactive_on(Arm.parse("own-1"), said["active"], 2, asked(tiny, "own-1"))
            == []
        )
        answers = ask(up, heldout[:3])
        assert [(a.output_ids, sum(a.histogram)) for a in answers] == [
            (d.output_ids, sum(d.histogram)) for d in decoded[:3]
        ]
        # Without the forced state shared keeps the 2 steps it last ran: its tokens are right, what
        # it verifies is not.
        for arm in ("shared+steps=2", "own-1"):
            client.switch(up.url, arm, 30)
        before = client.switch(up.url, "shared", 30)
        found = attestation.inactive_on(
            Arm.parse("shared"), before["active"], 2, asked(tiny, "shared")
        )
        assert "rank 0 runs with steps 2 where 3 was ordered" in found


def test_the_targets_state_is_not_built_on_the_drafts_group(tiny, logfolder):
    with pytest.raises(
        ServerFailed,
        match="the target's back end for 2 steps was to be built on the draft's own group",
    ):
        with serving(tiny, ("own-1", "own-1+steps=2"), logfolder / "scope", omit=("target_scope",)):
            pass


def test_the_overlapping_loop_and_the_prefix_cache(tiny, heldout, references, logfolder):
    cached = tiny.model_copy(
        update={
            "server": tiny.server.model_copy(
                update={
                    "flags": {
                        k: v for k, v in tiny.server.flags.items() if k != "disable-radix-cache"
                    }
                }
            )
        }
    )
    arms = ("shared", "own-1", "own-1+steps=2")
    with serving(cached, arms, logfolder / "overlap", overlap=True) as up:
        assert (
            up.unattested == () and "Overlap schedule is not implemented" not in up.log.read_text()
        )
        for arm in (*arms, "shared"):
            # A prefix kept from another arm's time has no KV in this one's pool; the first prompt
            # was the last arm's too.
            answers = check(up, arm, tiny, heldout, references, ARMS[arm], single=1)
            assert answers[0].cached_tokens == 0
            assert ask(up, heldout[:1])[0].cached_tokens > 0


def test_four_ranks(tiny, heldout, references, logfolder):
    four = tiny.model_copy(update={"tp": 4})
    with serving(four, ("own-2", "shared", "own-1"), logfolder / "four") as up:
        assert up.unattested == ()
        assert [[p["group_ranks"] for p in entry["placements"]] for entry in up.attestation] == [
            [[r // 2 * 2, r // 2 * 2 + 1], [0, 1, 2, 3], [r]] for r in range(4)
        ]
        for arm, collectives in {"shared": (8, 4), "own-1": (1, 0), "own-2": (9, 4)}.items():
            check(up, arm, four, heldout, references, collectives, single=1)


def test_trees_share_a_server(tiny, heldout, references, logfolder):
    wide = (
        "shared+topk=2+draft_tokens=6",
        "own-1+topk=2+draft_tokens=6",
        "own-1+steps=2+topk=2+draft_tokens=4",
    )
    seen = {}
    with serving(tiny, wide, logfolder / "tree") as up:
        assert up.unattested == ()
        for arm in wide:
            before = client.switch(up.url, arm, 30)
            assert (
                attestation.inactive_on(Arm.parse(arm), before["active"], 2, asked(tiny, arm)) == []
            )
            answers = ask(up, heldout[:3])
            assert [a.output_ids for a in answers] == [d.output_ids for d in references[3]]
            seen[arm] = [a.histogram for a in answers], per_round(up, before["counts"])["draft"]
    assert seen[wide[0]][0] == seen[wide[1]][0] != seen[wide[2]][0]
    assert [seen[arm][1] for arm in wide] == [8, 1, 1]
