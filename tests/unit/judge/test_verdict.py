"""The verdict: planted truths are found, planted defects are refused by name, and unknown stays
unknown.
"""

import json
import math

import numpy as np
import pytest
import simulated_runs as simulated
from simulated_runs import (
    DEFECTS,
    FIXTURES,
    change,
    is_block,
    play,
    profile,
    requests_changed,
    sound,
)

from workbench.experiment import runlog, schedule
from workbench.experiment.runlog import Failure, Finding
from workbench.judge import refusals
from workbench.judge.comparisons import against_references
from workbench.judge.looks import WATCHED
from workbench.judge.refusal import KINDS, Refusal
from workbench.judge.told import CPU_CAVEAT, exit_status, sentence
from workbench.judge.verdict import judge


def comparison(verdict, a, b, metric="tokens_per_s"):
    return next(c for c in verdict.comparisons if (c.a, c.b, c.metric) == (a, b, metric))


def keys(verdict):
    return {r.key for r in verdict.reasons}


# Refusals


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_gives_exactly_its_refusal(name):
    verdict = judge(profile(), runlog.read(FIXTURES / f"{name}.jsonl"))
    assert keys(verdict) == {name} and not verdict.valid and exit_status(verdict) == 3
    assert all(r.sentence.endswith(".") and len(r.sentence.split()) > 6 for r in verdict.reasons)
    told = verdict.to_json()
    assert {r["key"] for r in told["reasons"]} == {name} and told["valid"] is False
    assert verdict.reasons[0].sentence.rstrip(".") in told["sentence"]


@pytest.mark.parametrize("name", sorted(set(DEFECTS) - {"too_few_starts", "nothing_compared"}))
def test_a_refused_comparison_has_no_figures(name):
    verdict = judge(profile(), runlog.read(FIXTURES / f"{name}.jsonl"))
    refused = next(
        c
        for c in verdict.to_json()["comparisons"]
        if (c["a"], c["b"], c["metric"]) == ("own-1", "shared", "tokens_per_s")
    )
    assert (
        not refused["valid"]
        and [r["key"] for r in refused["reasons"]].count(name) == len(refused["reasons"]) > 0
    )
    assert all(
        refused[figure] is None for figure in ("ratio", "low", "high", "resolution", "beside", "sd")
    )


@pytest.mark.parametrize("caught", [True, False])
def test_a_corrupted_rank_that_was_caught_is_noted_and_one_that_was_not_spoils_the_run(caught):
    told = {
        "detected": caught,
        "rank": 1,
        "within_s": 59.4,
        "sentence": (
            "own-1+agreement=check, rank 1 corrupted on purpose: it served 4 rounds of requests"
            " unnoticed."
        ),
    }
    planted = Finding(
        experiment=runlog.NEGATIVE,
        name="own-1+agreement=check",
        time="2026-01-01T00:00:00+00:00",
        value=told,
    )
    verdict = judge(profile(), [*runlog.read(FIXTURES / "sound.jsonl"), planted])
    assert verdict.valid is caught and keys(verdict) == (set() if caught else {"negative_control"})
    noted = (
        "Negative control: own-1+agreement=check with the draft of rank 1 corrupted on purpose was"
        " caught 59 s after its start began."
    )
    assert (noted in verdict.notes) is caught


def test_every_kind_of_refusal_has_a_fixture_and_no_other_is_made():
    assert {path.stem for path in FIXTURES.glob("*.jsonl")} - {"sound"} == set(KINDS)
    assert set(refusals.CHECKS) <= set(KINDS)
    with pytest.raises(ValueError, match="no kind of refusal"):
        Refusal("blue_moon", "It was blue.", "draft_tp")


def test_the_fixtures_are_what_the_script_makes_and_say_so():
    for name, plant in {"sound": list, **DEFECTS}.items():
        text = (FIXTURES / f"{name}.jsonl").read_text()
        assert text == simulated.lines(plant(sound())), (
            f"run tests/unit/simulated_runs.py to make {name}.jsonl anew"
        )
        assert "not a measurement" in text.splitlines()[0]


def test_the_sound_run_is_valid_and_finds_what_was_planted():
    verdict = judge(profile(), runlog.read(FIXTURES / "sound.jsonl"))
    assert verdict.valid and exit_status(verdict) == 0
    assert [note.partition(" (")[0] for note in verdict.notes] == [
        "draft_tp: the first block after a switch is not seen to differ from later ones "
        "in its cycle",
        "draft_tp: with 4 server starts an interval is wide",
    ]
    own, cycle = (
        comparison(verdict, "own-1", "shared"),
        comparison(verdict, "own-1", "shared", "cycle_ms"),
    )
    assert own.method == "paired" and own.units == (4,) and own.pairs == 8
    assert 1.03 < own.interval.low < own.interval.high < 1.09 and own.interval.n == 4
    assert cycle.interval.low < 0.94 < cycle.interval.high
    assert own.beside.method == "t over pairs" and own.beside.n == 8
    across = comparison(verdict, "own-1", "none")
    assert (
        across.method == "starts"
        and across.units == (4, 4)
        and across.level == pytest.approx(0.975)
    )  # two arms against none
    assert own.level == pytest.approx(0.95)


@pytest.mark.parametrize(
    "defect, key",
    [
        (lambda rs: [r for r in rs if r.kind != "start"], "not_attested"),
        (
            lambda rs: change(
                rs, lambda r: r.kind == "start", lambda s: {"attestation": s.attestation[:1]}, 1
            ),
            "not_attested",
        ),
        (
            lambda rs: change(
                rs, lambda r: is_block(r, "none", "measure"), lambda _: {"attested": False}, 1
            ),
            "not_attested",
        ),
        (
            lambda rs: change(
                rs,
                lambda r: r.kind == "start" and "own-1" in r.arms,
                lambda _: {"arms": ("shared", "shared#2")},
                1,
            ),
            "wrong_arm",
        ),
        (
            lambda rs: requests_changed(rs, "own-1", "measure", lambda _: {"cached_tokens": None}),
            "cached_tokens",
        ),
        (
            lambda rs: requests_changed(rs, "own-1", "measure", lambda _: {"finish": None}),
            "truncated_answers",
        ),
        (
            lambda rs: requests_changed(
                rs, "own-1", "parity", lambda r: {"verify_ct": r.verify_ct + 1}
            ),
            "accept_moved",
        ),
    ],
)
def test_other_forms_of_a_defect_are_refused_too(defect, key):
    assert keys(judge(profile(), defect(sound()))) == {key}


def test_an_arm_that_is_not_attested_has_no_numbers_and_the_others_keep_theirs():
    told = judge(profile(), runlog.read(FIXTURES / "not_attested.jsonl")).to_json()
    arm = told["arms"]["own-1"]
    assert (
        arm["attested"] is False
        and arm["tokens_per_s"] is arm["cycle_ms"] is arm["accept_length"] is None
    )
    assert arm["collectives_per_round"] == {}
    assert told["arms"]["shared"]["attested"] is True and told["arms"]["shared"]["tokens_per_s"] > 0
    assert next(c for c in told["comparisons"] if (c["a"], c["b"]) == ("shared", "none"))["valid"]


def test_an_arm_that_failed_is_named_and_a_retried_one_is_a_note():
    told = judge(profile(), runlog.read(FIXTURES / "failed.jsonl")).to_json()
    assert (
        told["arms"]["own-1"]["attested"] is False and told["arms"]["own-1"]["tokens_per_s"] is None
    )
    retried = judge(
        profile(),
        [
            *sound(),
            Failure(
                experiment="draft_tp",
                arm="own-1",
                time="t",
                what="hung",
                reason="no token for 60 s",
            ),
        ],
    )
    assert retried.valid and "no token for 60 s" in retried.notes[0]


def test_random_prompts_refuse_tokens_per_s_and_accept_rates_but_not_the_cycle():
    verdict = judge(profile(), runlog.read(FIXTURES / "random_prompts.jsonl"))
    assert comparison(verdict, "own-1", "shared", "cycle_ms").valid
    arm = verdict.to_json()["arms"]["own-1"]
    assert (
        arm["accept_length"] is arm["accept_rate"] is arm["accept"] is None and arm["cycle_ms"] > 0
    )


@pytest.mark.parametrize("name", ["random_prompts", "pair_broken"])
def test_a_simulated_accept_length_makes_no_claim_about_the_pair(name):
    held = profile(server={"environment": {"SGLANG_SIMULATE_ACC_LEN": "2.1"}})
    verdict = judge(held, runlog.read(FIXTURES / f"{name}.jsonl"))
    assert verdict.valid and "simulation" in verdict.notes[0]
    off = profile(server={"environment": {"SGLANG_SIMULATE_ACC_LEN": "-1"}})
    assert not judge(off, runlog.read(FIXTURES / f"{name}.jsonl")).valid


def moved(share):
    """On a GPU: own-1 loses a share of its correct drafts, whatever the prompt, and needs more
    rounds for it.
    """

    def less(b):
        return {
            "requests": tuple(
                r.model_copy(update={"correct": round(r.correct * (1 - share)), "histogram": None})
                for r in b.requests
            )
        }

    return change(sound(), lambda r: is_block(r, "own-1"), less)


def test_on_a_gpu_the_accept_length_may_move_within_its_interval_only():
    assert keys(judge(profile("cuda"), moved(0.3))) == {"accept_moved"}
    assert judge(
        profile("cuda"), runlog.read(FIXTURES / "accept_moved.jsonl")
    ).valid  # one draft fewer in one request
    assert keys(judge(profile("cpu"), moved(0.3))) == {"accept_moved"}


def test_on_a_gpu_a_shift_that_is_sure_but_small_is_rounding():
    def many(factor):
        return lambda b: {
            "requests": tuple(
                r.model_copy(
                    update={
                        "correct": round(1000 * r.correct * factor),
                        "verify_ct": 1000 * r.verify_ct,
                        "histogram": None,
                    }
                )
                for r in b.requests
            )
        }

    long = change(sound(), lambda r: is_block(r) and r.arm.startswith("shared"), many(1))
    assert (
        keys(judge(profile("cuda"), change(long, lambda r: is_block(r, "own-1"), many(0.99))))
        == set()
    )
    assert keys(
        judge(profile("cuda"), change(long, lambda r: is_block(r, "own-1"), many(0.95)))
    ) == {"accept_moved"}


def batched(records):
    return change(records, is_block, lambda _: {"concurrency": 4})


def test_in_a_batch_the_counts_may_differ_a_little_even_on_the_cpu_engine():
    assert judge(profile(), batched(runlog.read(FIXTURES / "accept_moved.jsonl"))).valid
    assert keys(judge(profile(), batched(moved(0.3)))) == {"accept_moved"}


def test_shorter_answers_that_are_only_compared_are_neither_cut_nor_moved():
    """The parity blocks ask the measured prompts for fewer tokens."""
    prompts = sorted(
        {r.prompt for b in sound() if is_block(b, "shared", "measure") for r in b.requests}
    )[:2]

    def shorter(b):
        return {
            "requests": tuple(
                r.model_copy(
                    update={
                        "prompt": prompt,
                        "completion_tokens": 8,
                        "verify_ct": r.verify_ct and 3,
                        "correct": r.verify_ct and 5,
                        "histogram": None,
                    }
                )
                for r, prompt in zip(b.requests, prompts)
            )
        }

    shorter_parity = change(sound(), lambda r: is_block(r, role="parity"), shorter)
    assert judge(profile(), shorter_parity).valid and judge(profile("cuda"), shorter_parity).valid
    alone = [
        r for r in shorter_parity if not is_block(r, "own-1", "parity")
    ]  # shared was compared and own-1 was not
    assert judge(profile("cuda"), alone).valid


def test_arms_of_other_steps_need_not_share_their_accept_length():
    renamed = [
        (
            r.model_copy(update={"arm": "own-1+steps=2", "arm_in_force": "own-1+steps=2"})
            if is_block(r, "own-1")
            else (
                r.model_copy(
                    update={"arms": tuple(a.replace("own-1", "own-1+steps=2") for a in r.arms)}
                )
                if r.kind == "start"
                else r
            )
        )
        for r in moved(0.3)
    ]
    assert keys(judge(profile(), renamed)) == set()


def test_a_control_that_is_refused_leaves_nothing_to_hold_a_difference_against():
    unattested = change(
        sound(), lambda r: is_block(r, "shared#2", "measure"), lambda _: {"attested": False}, 1
    )
    verdict = judge(profile(), unattested)
    assert keys(verdict) == {"not_attested"} and not any(c.valid for c in verdict.comparisons)


def test_a_control_keeps_its_figures_as_evidence():
    told = judge(profile(), runlog.read(FIXTURES / "control.jsonl")).to_json()
    control = told["control"]
    assert control["arm"] == "shared" and control["metric"] == "cycle_ms"
    assert control["ratio"] == pytest.approx(1.08, rel=0.02) and control["low"] > 1


# Output of verdict.json


def test_the_json_has_the_promised_schema_and_is_plain():
    told = judge(profile(), sound(), source="recorded", wished=0.002).to_json()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert (told["schema"], told["profile"], told["source"], told["engine"], told["valid"]) == (
        1,
        "simulated",
        "recorded",
        "cpu",
        True,
    )
    assert list(told["arms"]) == ["none", "shared", "own-1", "shared#2"]
    arm = told["arms"]["shared"]
    assert {
        "tokens_per_s",
        "cycle_ms",
        "accept_length",
        "accept_rate",
        "collectives_per_round",
        "stage_ms",
        "attested",
    } <= set(arm)
    assert {
        "a",
        "b",
        "metric",
        "ratio",
        "low",
        "high",
        "level",
        "pairs",
        "valid",
        "reasons",
    } <= set(told["comparisons"][0])
    assert arm["collectives_per_round"] == {"draft": 8, "verify": 10}
    assert arm["collectives_by_kind"]["draft"] == {"all_reduce": 6, "all_gather": 2}
    assert told["arms"]["own-1"]["collectives_per_round"]["draft"] == 1
    assert arm["stage_ms"]["verify"] == pytest.approx(0.7 * arm["cycle_ms"], rel=0.02)
    assert (
        told["arms"]["none"]["accept_length"] is None
        and told["arms"]["none"]["collectives_per_round"] == {}
    )
    assert told["parity"] == {
        "none": "identical",
        "shared": "identical",
        "own-1": "identical",
        "shared#2": "not checked",
    }
    own = next(
        c
        for c in told["comparisons"]
        if (c["a"], c["b"], c["metric"]) == ("own-1", "shared", "tokens_per_s")
    )
    assert own["control"]["a"] == "shared#2" and own["control"]["low"] < 1 < own["control"]["high"]
    assert all(c["control"]["a"] == "shared#2" for c in told["comparisons"])  # in every row
    assert (own["starts"], own["pairs"], own["claims"]) == (4, 8, False)
    assert own["wanted"] > 6 and own["wanted_seconds"] > 0 and own["resolution"] > 0.002


def test_speeds_are_sums_divided_once():
    records = sound()
    verdict = judge(profile(), records).to_json()["arms"]["none"]
    blocks = [r for r in records if is_block(r, "none", "measure")]
    assert verdict["tokens_per_s"] == pytest.approx(
        len(blocks) * simulated.TOKENS / sum(b.seconds for b in blocks)
    )
    decoding = sum(r.end - r.first for b in blocks for r in b.requests)
    assert verdict["cycle_ms"] == pytest.approx(
        1000 * decoding / (len(blocks) * (simulated.TOKENS - 1))
    )


def test_unknown_first_tokens_leave_the_cycle_unknown_and_the_rest_valid():
    blind = change(
        sound(),
        is_block,
        lambda b: {"requests": tuple(r.model_copy(update={"first": None}) for r in b.requests)},
    )
    told = judge(profile(), blind).to_json()
    assert (
        told["valid"]
        and told["arms"]["shared"]["cycle_ms"] is None
        and {c["metric"] for c in told["comparisons"]} == {"tokens_per_s"}
    )


def test_an_arm_of_two_experiments_is_told_from_the_one_that_measured_it_most():
    more = [
        r.model_copy(update={"experiment": "steps", "start": r.start + 100})
        for r in sound()
        if r.kind in ("start", "block") and not (is_block(r, "own-1") and r.pair == 0)
    ]
    told = judge(profile(), [*sound(), *more]).to_json()
    assert (
        set(told["experiments"]) == {"draft_tp", "steps"}
        and told["arms"]["own-1"]["experiment"] == "draft_tp"
    )
    assert {c["experiment"] for c in told["comparisons"]} == {"draft_tp", "steps"} and len(
        told["controls"]
    ) == 4


@pytest.mark.parametrize(
    "arms, expected",
    [
        (
            ("none", "shared", "own-1", "shared#2"),
            [("shared", "none"), ("own-1", "none"), ("own-1", "shared")],
        ),
        (("shared", "own-1", "own-2"), [("own-1", "shared"), ("own-2", "shared")]),
        (("none", "own-1", "own-2"), [("own-1", "none"), ("own-2", "none"), ("own-2", "own-1")]),
        (
            ("shared", "own-1", "own-1+agreement=off"),
            [
                ("own-1", "shared"),
                ("own-1+agreement=off", "shared"),
                ("own-1", "own-1+agreement=off"),
            ],
        ),
        (("own-2", "own-1"), [("own-1", "own-2")]),
        (("none",), []),
        (("shared", "shared#2"), []),
    ],
)
def test_each_arm_is_compared_with_each_reference(arms, expected):
    assert sorted(against_references(arms)) == sorted(expected)


# The sentence


def test_the_sentence_says_how_much_how_sure_and_what_the_cpu_engine_cannot_tell():
    said = sentence(judge(profile(), sound()))
    assert said.startswith("own-1 is faster than shared: its cycle takes ")
    assert "95 % interval" in said and "4 server starts, 8 pairs of blocks" in said
    assert "the accept lengths are equal in every answer, and tokens/s follow (ratio 1.0" in said
    assert "would have been seen" in said and said.endswith(CPU_CAVEAT)
    assert CPU_CAVEAT not in sentence(judge(profile("cuda"), sound()))
    assert "slower than shared" in sentence(judge(profile(), sound(speedup=-0.06)))
    assert sentence(judge(profile(), sound(speedup=0.0, noise=0.03))).startswith(
        "No difference between own-1 and shared could be resolved"
    )


def test_of_several_own_groups_the_fastest_is_told():
    arms = ("shared", "own-1", "own-2", "shared#2")
    plan = schedule.by_starts("draft_tp", [arms], 4, 2, 64, 2, 1, seed=1)
    records = play(plan, speedup=0.05)
    verdict = judge(
        profile(),
        change(
            records, lambda r: is_block(r, "own-2", "measure"), lambda b: simulated.slowed(b, 0.9)
        ),
    )
    assert sentence(verdict).startswith("own-2 is ") and comparison(
        verdict, "own-2", "shared"
    ).level == pytest.approx(0.975)


# Parity


def answers(arm, concurrency=1, runs=2, wrong=0, prompts=24):
    """Parity blocks of an arm in which so many answers of its second run are another text."""
    plan = schedule.parity("draft_tp", (arm,), range(prompts), seed=0, repeats=runs)
    first, *others = [r for r in play(plan, first_start=50) if is_block(r)]
    others = [
        b.model_copy(
            update={
                "requests": tuple(
                    r.model_copy(update={"output_ids": (7, 7)}) if i < wrong else r
                    for i, r in enumerate(b.requests)
                )
            }
        )
        for b in others
    ]
    return [b.model_copy(update={"concurrency": concurrency}) for b in (first, *others)]


def swapped(blocks):
    """The same runs in the other order, so that the wrong answers are in the one that is compared
    with none.
    """
    return blocks[::-1]


def parity_of(engine, *blocks):
    return judge(profile(engine), [b for some in blocks for b in some]).parity["draft_tp"]


def test_only_the_excess_over_an_arms_own_mismatch_counts_where_identity_is_not_owed():
    noisy, wrong = answers("none", 4, wrong=8), swapped(answers("own-1", 4, wrong=8))
    assert (
        parity_of("cuda", noisy, wrong)["own-1"].result == "identical"
    )  # 8 of 24, and 16 of 48 against themselves
    found = parity_of(
        "cuda",
        answers("none", 4),
        [swapped(answers("own-1", 4, wrong=12))[0], *answers("own-1", 4)[:1]],
    )["own-1"]
    assert (found.mismatched, found.compared, found.own_mismatched, found.own_compared) == (
        12,
        24,
        12,
        48,
    )
    same_wrong = [swapped(answers("own-1", 4, wrong=12))[0]] * 2
    assert parity_of("cuda", answers("none", 4), same_wrong)["own-1"].result == "differs"


def test_mismatches_without_a_control_are_not_judged():
    once = swapped(answers("own-1", 4, wrong=12))[:1]
    assert parity_of("cuda", answers("none", 4, runs=1), once)["own-1"].result == "not checked"
    assert (
        parity_of("cuda", answers("none", 4, runs=1), answers("own-1", 4, runs=1))["own-1"].result
        == "identical"
    )
    assert parity_of("cuda", answers("own-1"))["own-1"].result == "not checked"


@pytest.mark.parametrize(
    "engine, flags, owed",
    [("cpu", {}, 1), ("cuda", {}, 0), ("cuda", {"enable-deterministic-inference": True}, 1)],
)
def test_identity_is_owed_one_at_a_time_on_the_cpu_engine_or_in_deterministic_mode(
    engine, flags, owed
):
    records = [*answers("none"), *answers("own-1", wrong=1)]
    found = judge(profile(engine, server={"flags": flags}), records)
    assert found.parity["draft_tp"]["own-1"].violations == owed and (
        "parity" in keys(found)
    ) == bool(owed)
    batched = judge(profile("cpu"), [*answers("none", 4), *answers("own-1", 4, wrong=1)])
    assert batched.parity["draft_tp"]["own-1"].violations == 0 and "parity" not in keys(batched)


# What the design can find


def planted(plan, **how):
    return play(plan, noise=0.05, drift=0.10, speedup=0.035, **how)


def test_a_speed_up_of_3_percent_is_found_by_starts_and_missed_by_one_block_an_arm():
    """5 % of block noise, starts 3 % apart, and a machine that gets 10 % slower meanwhile; the same
    requests on each arm.
    """
    arms = ("shared", "own-1", "shared#2")
    truth, found, wrong_way = 1 - 0.035, 0, 0
    for seed in range(8):
        plan = schedule.by_starts("draft_tp", [arms], 11, 6, 70, 1, 1, seed)
        own = comparison(
            judge(profile(), planted(plan, spread=0.03, seed=seed)), "own-1", "shared", "cycle_ms"
        )
        found += own.valid and own.interval.high < 1 and own.interval.low < truth + 0.02
        one_each = planted(
            schedule.paired("draft_tp", ("shared", "own-1"), 1, 70, 66, 1, seed), seed=seed
        )
        verdict = judge(profile(), one_each)
        assert (
            "too_few_starts" in keys(verdict)
            and comparison(verdict, "own-1", "shared").interval is None
        )
        first, second = [b.requests[-1].end for b in one_each if is_block(b, role="measure")]
        wrong_way += math.log(first / second) * (1 if one_each[-1].arm == "own-1" else -1) < 0
    assert (
        found >= 6 and wrong_way >= 2
    )  # the direct ratio of two blocks points the wrong way about one time in three


def starts_of(arms, starts=6, each=2, **how):
    return play(schedule.by_starts("draft_tp", [arms], starts, each, 30, 1, 1, seed=0), **how)


def test_an_arm_against_itself_is_called_different_in_at_most_5_of_100_runs():
    arms = ("shared", "own-1", "shared#2")
    verdicts = [judge(profile(), starts_of(arms, 4, noise=0.05, seed=n)) for n in range(120)]
    found = (comparison(v, "own-1", "shared", "cycle_ms") for v in verdicts)
    claims = [c.interval.decided for c in found if c.valid]
    assert len(claims) >= 112  # a sound control is refused once in a hundred runs
    assert (
        1 <= np.sum(claims) <= 0.05 * len(claims) + 5
    )  # 5 % and two standard deviations of this many runs


# The start is the unit


def test_replicas_are_pooled_so_that_no_claim_hangs_on_which_is_named():
    records = change(
        sound(noise=0.02), lambda r: is_block(r, "shared#2"), lambda b: simulated.slowed(b, 1.01)
    )
    swap = {"shared": "shared#2", "shared#2": "shared"}

    def renamed(r):
        arm = swap.get(r.arm, r.arm)
        return {"arm": arm, "arm_in_force": arm}

    other = change(records, lambda r: is_block(r, role="measure"), renamed)
    one, two = (
        comparison(judge(profile(), rs), "own-1", "shared", "cycle_ms") for rs in (records, other)
    )
    assert one.interval == two.interval and one.pairs == two.pairs == 8


def test_pairs_that_resemble_each_other_within_a_start_are_told_and_buy_nothing():
    arms = ("shared", "own-1", "shared#2")
    plan = schedule.by_starts("draft_tp", [arms], 6, 4, 64, 1, 1, seed=0)
    factors = dict(zip(range(6), (0.94, 1.05, 0.99, 1.08, 0.93, 1.02)))
    records = change(
        play(plan, noise=0.01),
        lambda r: is_block(r, "own-1", "measure"),
        lambda b: simulated.slowed(b, factors[b.start]),
    )
    verdict = judge(profile(), records)
    own = comparison(verdict, "own-1", "shared", "cycle_ms")
    assert own.alike.high and own.alike.icc > 0.8
    assert own.interval.high - own.interval.low > 2 * (own.beside.high - own.beside.low)
    (note,) = [n for n in verdict.notes if "resemble" in n]
    assert "intraclass correlation 0.9" in note and "its 6 starts count" in note
    assert not any("resemble" in n for n in judge(profile(), play(plan, noise=0.01)).notes)


def test_an_arm_that_changes_while_starts_go_on_is_told():
    arms = ("shared", "own-1", "shared#2")
    plan = schedule.by_starts("draft_tp", [arms], 4, 4, 64, 1, 1, seed=0)
    records = change(
        play(plan, noise=0.01),
        lambda r: is_block(r, "own-1", "measure"),
        lambda b: simulated.slowed(b, 1 + 0.03 * (b.pair % 4)),
    )
    assert any("moves while a start goes on" in note for note in judge(profile(), records).notes)


@pytest.mark.parametrize("starts, told", [(3, True), (5, True), (6, False), (10, False)])
def test_few_starts_are_told_with_what_they_cost(starts, told):
    records = starts_of(("shared", "own-1", "shared#2"), starts)
    notes = [n for n in judge(profile(), records).notes if "interval is wide" in n]
    assert bool(notes) is told
    if starts == 3:
        assert "with 3 server starts" in notes[0] and "4.3 standard errors" in notes[0]


def test_too_few_starts_leave_what_was_seen_of_these_servers():
    records = starts_of(("shared", "own-1", "shared#2"), 2, 4, speedup=0.1)
    own = comparison(judge(profile(), records), "own-1", "shared", "cycle_ms")
    assert not own.valid and own.interval is None and own.beside.high < 1
    assert {r.key for r in own.reasons} == {"too_few_starts"}


def test_the_cycle_carries_the_claim_where_accept_lengths_are_equal_and_tokens_where_not():
    held = profile(server={"environment": {"SGLANG_SIMULATE_ACC_LEN": "2.1"}})
    for engine, chosen, equal in (
        (sound(), profile(), "equal in every answer"),
        (sound(), held, "held by simulation"),
        (runlog.read(FIXTURES / "accept_moved.jsonl"), profile("cuda"), None),
    ):
        verdict = judge(chosen, engine)
        claims = {
            c.metric for c in verdict.comparisons if (c.a, c.b) == ("own-1", "shared") if c.claims
        }
        assert claims == {"cycle_ms" if equal else "tokens_per_s"}
        assert comparison(verdict, "own-1", "shared").equal == equal
        # What an arm without a draft is compared by needs the accept length.
        assert comparison(verdict, "own-1", "none").claims


def test_a_chain_of_other_length_is_not_held_at_the_same_accept_length():
    held = profile(server={"environment": {"SGLANG_SIMULATE_ACC_LEN": "2.1"}})
    renamed = change(
        sound(),
        lambda r: is_block(r, "own-1"),
        lambda b: {"arm": "own-1+steps=1", "arm_in_force": "own-1+steps=1"},
    )
    verdict = judge(held, renamed)
    assert comparison(verdict, "own-1+steps=1", "shared").equal is None


# Looks and shares


def found(name, **value):
    return Finding(experiment="draft_tp", name=name, time="t", value=value)


def test_looks_of_a_live_run_widen_its_interval():
    plain, looked, watched = (
        comparison(judge(profile(plan={"starts": 6}), records), "own-1", "shared", "cycle_ms")
        for records in (
            sound(),
            [found("checkpoints", looks=[3, 4, 5, 6]), *sound()],
            [found("watched", starts=3), *sound()],
        )
    )
    assert plain.level == pytest.approx(0.95)
    assert looked.level > 0.98  # four of six starts
    assert watched.level == pytest.approx(1 - WATCHED / 3)  # three early looks share a tenth
    for one in (looked, watched):
        assert one.interval.high - one.interval.low > plain.interval.high - plain.interval.low


def test_a_run_that_was_watched_to_its_end_pays_little_and_one_stopped_by_hand_much():
    at_end, stopped = (
        judge(profile(plan={"starts": starts}), [*records, *sound()])
        for starts, records in (
            (4, [found("watched", starts=3)]),
            (8, []),
        )
    )
    stop = Failure(experiment="draft_tp", arm="own-1", time="t", what="stopped", reason="stopped")
    by_hand = judge(profile(plan={"starts": 8}), [*sound(), stop])
    level = [comparison(v, "own-1", "shared", "cycle_ms").level for v in (at_end, stopped, by_hand)]
    assert level[0] == pytest.approx(1 - (0.05 - WATCHED))
    assert level[1] == pytest.approx(0.95) and level[2] == pytest.approx(1 - WATCHED / 5)
    assert any("was stopped by hand" in note and "99.9 %" in note for note in by_hand.notes)


def test_experiments_that_answer_one_question_share_its_alpha():
    def at(experiment, first):
        return [
            r.model_copy(update={"experiment": experiment, "start": r.start + first})
            for r in sound()
            if r.kind in ("start", "block")
        ]

    verdict = judge(profile(), [*sound(), *at("steps_at_1", 100), *at("steps_at_4", 200)])
    of = [c for c in verdict.comparisons if (c.a, c.b) == ("own-1", "shared")]
    assert len(of) == 6 and {round(c.level, 6) for c in of} == {round(1 - 0.05 / 3, 6)}
    # The settings of 06 are another question.
    apart = judge(profile(), [*sound(), *at("collectives", 100)])
    assert {round(c.level, 6) for c in apart.comparisons if (c.a, c.b) == ("own-1", "shared")} == {
        0.95
    }


def test_a_control_is_judged_by_the_cycle_as_well():
    """Tokens/s of replicas agree, and the cycle of one is longer: its prefill was shorter."""

    def shifted(b):
        return {
            "requests": tuple(r.model_copy(update={"first": r.first - 0.018}) for r in b.requests)
        }

    records = change(sound(), lambda r: is_block(r, "shared#2", "measure"), shifted)
    verdict = judge(profile(), records)
    assert keys(verdict) == {"control"} and "ratio of cycle time" in verdict.reasons[0].sentence
