"""The sweeps' plans: what they search and compare, that the best is found and its gain not
flattered, and that an interruption changes nothing.
"""

import re
from collections import defaultdict

import pytest
from simulated_runs import profile
from simulated_sweeps import play, steps_of

from workbench.answers import collectives, steps
from workbench.experiment import communication, names, setting_sweep, sweeps
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.runlog import Block, Failure, Start
from workbench.judge import verdict
from workbench.judge.verdict_file import VerdictFile
from workbench.report import chart_parts, charts, sweep_charts, tables

PROMPTS = 200
PLAN = {"pairs": 8, "starts": 3, "blocks_per_start": 2}


def tiny(**sweep):
    return profile(plan=PLAN, sweep={"step_counts": (1, 2, 3, 4), "loads": (1, 4), **sweep})


def fastest(chosen, steps=2, own=0.05):
    """Speeds of a machine on which so many steps are best, own-1 gains a share, and drafting pays
    less the more requests there are.
    """

    def speed(task):
        if not steps_of(chosen, task):
            return 1.0
        gain = (
            1
            - 0.08 * max(0, steps - steps_of(chosen, task))
            - 0.05 * max(0, steps_of(chosen, task) - steps)
            + (own if task.planned.arm.startswith("own") else 0)
        )
        return gain * (1 if task.concurrency == 1 else 0.7)

    return speed


def blocks(records, experiment=None, role="measure"):
    return [
        r
        for r in records
        if isinstance(r, Block) and r.role == role and experiment in (None, r.experiment)
    ]


@pytest.fixture(scope="module")
def swept():
    chosen = tiny()
    return chosen, play(sweeps.steps(chosen, PROMPTS), fastest(chosen))


def test_the_profiles_own_setting_goes_by_its_bare_name():
    (field,) = sweeps.candidates(tiny())
    assert field.arms == {
        "shared": ("shared+steps=1", "shared+steps=2", "shared", "shared+steps=4"),
        "own-1": ("own-1+steps=1", "own-1+steps=2", "own-1", "own-1+steps=4"),
    }


def test_trees_have_a_server_of_their_own_and_only_those_that_their_steps_can_fill():
    trees, chains = sweeps.candidates(tiny(topks=(1, 2), tree_tokens=(4, 6)))
    assert (trees.topk, chains.topk) == (2, 1)
    assert (
        "shared+steps=1+topk=2+draft_tokens=4" not in trees.names
        and "shared+topk=2+draft_tokens=6" in trees.names
    )
    assert "shared+topk=2+draft_tokens=4" in trees.names


def test_the_search_halves_every_placement_and_takes_far_fewer_blocks_than_the_grid(swept):
    chosen, records = swept
    given = defaultdict(int)
    for block in blocks(records, "steps", "search"):
        given[block.arm] += 1
    assert sorted(given.values()) == [2, 2, 2, 2, 6, 6, 6, 6]
    assert {arm for arm, n in given.items() if n == 6} >= {"shared+steps=2", "own-1+steps=2"}


def test_the_best_of_each_placement_are_compared_at_every_load_by_fresh_prompts(swept):
    chosen, records = swept
    for load in (1, 4):
        assert {b.arm for b in blocks(records, names.at_load(load))} == {
            "none",
            "shared",
            "shared#2",
            "shared+steps=2",
            "own-1+steps=2",
        }
        assert {b.concurrency for b in blocks(records, names.at_load(load))} == {load}
    searched = {r.prompt for b in blocks(records, "steps", "search") for r in b.requests}
    compared = {r.prompt for b in blocks(records, names.at_load(1)) for r in b.requests}
    assert searched and compared and not searched & compared


def test_no_prompt_that_warmed_a_server_is_measured_on_it(swept):
    warm = {(b.start, r.prompt) for b in blocks(swept[1], role="warmup") for r in b.requests}
    assert warm and not [
        b
        for b in blocks(swept[1]) + blocks(swept[1], "steps", "search")
        for r in b.requests
        if (b.start, r.prompt) in warm
    ]


def test_the_searchs_server_goes_on_as_the_first_of_the_comparison(swept):
    starts = [r for r in swept[1] if isinstance(r, Start)]
    assert len(starts) == 6 and set(starts[0].arms) == {
        *sweeps.candidates(swept[0])[0].names,
        "shared#2",
    }
    assert {b.start for b in blocks(swept[1], "steps", "search")} == {0} and 0 in {
        b.start for b in blocks(swept[1], names.at_load(1))
    }


def test_the_verdict_is_valid_and_its_intervals_hold_the_truth(swept):
    chosen, records = swept
    judged = verdict.judge(chosen, records)
    assert judged.valid, judged.reasons
    found = {
        (c.a, c.b): c.interval
        for c in judged.comparisons
        if c.experiment == names.at_load(1) and c.metric == "cycle_ms"
    }
    assert (
        found["own-1+steps=2", "shared"].low
        < 0.95 / (1 + 0.05)
        < found["own-1+steps=2", "shared"].high
    )
    assert found["shared+steps=2", "shared"].low < 0.95 < found["shared+steps=2", "shared"].high


def test_the_search_is_no_comparison(swept):
    chosen, records = swept
    assert not [c for c in verdict.judge(chosen, records).comparisons if c.experiment == "steps"]


@pytest.mark.parametrize("after", [0, 1, 10, 20, 30, 45, 61])
def test_an_interruption_changes_neither_the_plan_nor_what_is_left(after):
    chosen = tiny()
    plan, speed = sweeps.steps(chosen, PROMPTS), fastest(chosen)
    whole = play(plan, speed, noise=1e-3)
    resumed = play(plan, speed, noise=1e-3, records=play(plan, speed, noise=1e-3, most=after))

    def key(records):
        return [
            (b.experiment, b.block, b.arm, tuple(r.prompt for r in b.requests))
            for b in records
            if isinstance(b, Block)
        ]

    assert key(resumed) == key(whole) and verdict.judge(chosen, resumed).valid


def test_without_none_every_start_holds_all_that_is_compared():
    chosen = tiny(against_none=False)
    records = play(sweeps.steps(chosen, PROMPTS), fastest(chosen))
    assert (
        len([r for r in records if isinstance(r, Start)]) == chosen.plan.starts
        and verdict.judge(chosen, records).valid
    )
    assert len({b.pair for b in blocks(records, names.at_load(1))}) >= 8


@pytest.mark.parametrize("after", [61, 65, 70, 71, 72, 80, 88])
def test_a_start_that_an_interruption_tore_apart_still_gives_a_result(after):
    chosen = profile(
        plan={**PLAN, "pairs": 4},
        sweep={"step_counts": (1, 2, 3, 4), "loads": (1, 4), "against_none": False},
    )
    plan, speed = sweeps.steps(chosen, PROMPTS), fastest(chosen)
    records = play(plan, speed, records=play(plan, speed, most=after))
    judged = verdict.judge(chosen, records)
    assert judged.valid, judged.reasons
    assert all(c.units[0] >= 3 for c in judged.comparisons)
    assert [r for r in play(plan, speed, records=records)] == records  # and nothing is left then


def test_loads_beyond_what_the_server_takes_are_skipped_with_the_reason():
    chosen = profile(server={"flags": {"max-running-requests": 4}}, sweep={"loads": (1, 4, 8)})
    assert sweeps.loads(chosen) == (
        (1, 4),
        {8: "the server takes 4 requests at once (max-running-requests)"},
    )


def test_a_load_whose_tokens_the_server_cannot_keep_is_skipped_with_the_reason():
    chosen = profile(
        server={"flags": {"max-total-tokens": 400}}, sweep={"loads": (1, 4, 8), "step_counts": (3,)}
    )
    assert sweeps.loads(chosen, 40) == (
        (1, 4),
        {8: "its 544 tokens are more than the 400 that the server keeps (max-total-tokens)"},
    )
    assert "Not at 8: its 544 tokens" in steps.loads_sentence(
        chosen, 40
    ) and "at 1, 4 requests" in steps.loads_sentence(chosen, 40)


def test_a_plan_without_a_draft_is_bad_input():
    with pytest.raises(BadInput, match="plan.arms"):
        sweeps.candidates(profile(plan={"arms": ("none",)}))


# ------------------------------------------------------------------ 05: what it says


class Run:
    longest_prompt = 0

    def __init__(self, chosen, records):
        self.profile, self.records, self.verdict = chosen, records, verdict.judge(chosen, records)


def test_the_answer_names_the_best_its_interval_the_crossing_and_what_acceptance_implies(swept):
    said = steps.steps_answer(Run(*swept))
    assert re.match(
        r"The best at 1 at once is own-1\+steps=2 \(chain of 2 steps\), (8|9)(\.\d)? % faster than"
        r" the profile's own, shared \(ratio 1\.0[89]",
        said,
    )
    assert "own-1+steps=2 against none: faster at 1 request at once" in said
    assert (
        "The acceptance at each position and the measured cycles put the best chain at" in said
        and "nothing about GPUs" in said
    )


def test_where_nothing_differs_the_answer_says_so():
    chosen = tiny(against_none=False)
    said = steps.steps_answer(Run(chosen, play(sweeps.steps(chosen, PROMPTS), lambda _: 1.0)))
    assert (
        "could be told apart from the profile's own, shared" in said or "No setting beats" in said
    )


def test_the_sweep_map_has_every_candidate_and_the_best_is_100(swept):
    table = steps.sweep_map(*swept)
    assert len(table) == 8 and table[tables.SPEED].max() == 100
    assert table.loc[table[tables.SPEED].idxmax(), "arm"] == "own-1+steps=2"
    assert table.set_index("arm").loc["shared+steps=4", tables.SPEED] == pytest.approx(
        100 * 0.90 / 1.04, abs=2
    )


def test_acceptance_implies_the_accept_length_of_every_chain(swept):
    choices = steps.implied(*swept)
    assert [c.steps for c in choices] == [
        1,
        2,
        3,
    ]  # the simulated drafts never have a fourth one right
    # Simulated rounds have 0, 1, 2, 3 correct drafts as 1 : 2 : 3 : 4.
    assert [round(c.accept_length, 1) for c in choices] == pytest.approx([1.9, 2.6, 3.0], abs=0.15)


def test_charts_of_sweeps_are_drawn_and_of_nothing_say_why(swept):
    chosen, records = swept
    judged = verdict.judge(chosen, records).file
    drawn = chart_parts.svg(sweep_charts.sweep_map(steps.sweep_map(chosen, records)))
    assert drawn.count('aria-roledescription="rect mark"') == 8 and "100 (6)" in drawn
    loads = tables.load_table(judged)
    assert sorted(set(loads["requests at once"])) == [
        1,
        4,
    ] and "own-1+steps=2 ÷ none" in chart_parts.svg(sweep_charts.by_load(loads))
    assert "no search" in chart_parts.svg(sweep_charts.sweep_map(steps.sweep_map(chosen, [])))
    nothing = VerdictFile()
    assert "no comparison has a result" in chart_parts.svg(
        sweep_charts.by_load(tables.load_table(nothing))
    )
    assert "nothing was compared" in chart_parts.svg(charts.forest(tables.comparisons(nothing)))


def test_a_single_step_count_needs_no_search():
    chosen = tiny(step_counts=(3,), against_none=False)
    records = play(sweeps.steps(chosen, PROMPTS), fastest(chosen))
    assert not blocks(records, "steps", "search") and verdict.judge(chosen, records).valid
    assert {b.arm for b in blocks(records)} == {"shared", "own-1", "shared#2"}


def test_a_log_without_a_search_has_no_map_to_show_and_implies_nothing():
    assert (
        steps.sweep_map(tiny(), [])[tables.SPEED].isna().all() and steps.implied(tiny(), []) == ()
    )
    assert steps.steps_answer(Run(tiny(), [])).startswith("No answer: nothing was compared")


# ------------------------------------------------------------------ 06

GLOO = ("gloo-lo", "gloo-lo-x2")
FACTS = communication.Facts("cpu", 2, interfaces=("lo",))


def by_setting(**speeds):
    return lambda task: speeds.get(
        (Arm.parse(task.planned.arm).comm or "plain").replace("-", "_"), 1.0
    )


def test_one_setting_is_compared_at_once():
    chosen = profile(plan=PLAN)
    records = play(
        setting_sweep.collectives(chosen, PROMPTS, ("gloo-lo",)),
        by_setting(gloo_lo=1.1),
        spread=0.01,
    )
    assert len([r for r in records if isinstance(r, Start)]) == 6 and not blocks(
        records, role="search"
    )
    judged = verdict.judge(chosen, records)
    found = {(c.a, c.b): c for c in judged.comparisons if c.metric == "tokens_per_s"}
    assert judged.valid and found["shared+comm=gloo-lo", "shared"].method == "starts"
    assert (
        found["own-1+comm=gloo-lo", "shared+comm=gloo-lo"].method == "paired"
    )  # does separating pay under that setting?
    said = collectives.collectives_answer(Run(chosen, records), FACTS)
    assert "is own-1+comm=gloo-lo" in said or "is shared+comm=gloo-lo" in said


def test_several_settings_are_searched_by_rounds_of_starts_and_the_best_is_compared():
    chosen = profile(plan=PLAN)
    records = play(
        setting_sweep.collectives(chosen, PROMPTS, GLOO), by_setting(gloo_lo_x2=1.15), spread=0.02
    )
    assert {Arm.parse(b.arm).comm for b in blocks(records)} == {None, "gloo-lo-x2"}
    table = collectives.settings_map(chosen, records, FACTS).set_index("setting")
    assert (
        table.loc["gloo-lo-x2", "state"] == "compared"
        and table.loc["gloo-lo", "state"] == "searched"
    )
    assert table.loc["gloo-lo", tables.SPEED] == pytest.approx(100 / 1.12, abs=6)


def test_a_setting_whose_server_does_not_start_is_left_out_and_said_to_be():
    chosen = profile(plan=PLAN)
    failing = ("shared+comm=gloo-lo-x2", "own-1+comm=gloo-lo-x2")
    records = play(setting_sweep.collectives(chosen, PROMPTS, GLOO), by_setting(), failing=failing)
    assert {Arm.parse(b.arm).comm for b in blocks(records)} == {None, "gloo-lo"}
    assert verdict.judge(chosen, records).valid
    table = collectives.settings_map(chosen, records, FACTS).set_index("setting")
    assert table.loc["gloo-lo-x2", "state"] == "failed: it hangs"


def test_where_every_setting_fails_nothing_is_compared():
    chosen = profile(plan=PLAN)
    failing = [f"{arm}+comm={name}" for arm in ("shared", "own-1") for name in GLOO]
    records = play(setting_sweep.collectives(chosen, PROMPTS, GLOO), by_setting(), failing=failing)
    assert not blocks(records) and [r.what for r in records if isinstance(r, Failure)] == [
        "setting"
    ] * len(failing)
    assert collectives.collectives_answer(Run(chosen, records), FACTS).startswith(
        "No answer: nothing was compared"
    )


def test_a_setting_that_fails_in_a_later_round_leaves_earlier_decisions_as_they_were():
    chosen = profile(plan=PLAN)
    names = ("gloo-lo", "gloo-lo-x2", "nccl-ring", "nccl-tree")
    plan, speed = (
        setting_sweep.collectives(chosen, PROMPTS, names),
        by_setting(gloo_lo=1.2, gloo_lo_x2=1.1),
    )
    first = play(plan, speed, most=24)  # one whole round of four settings
    assert {Arm.parse(t.planned.arm).comm for t in plan(first)[24:]} == {"gloo-lo", "gloo-lo-x2"}
    records = play(
        plan, speed, records=first, failing=[f"{arm}+comm=gloo-lo" for arm in ("shared", "own-1")]
    )
    assert {Arm.parse(b.arm).comm for b in blocks(records)} == {None, "gloo-lo-x2"}


@pytest.mark.parametrize("after", [1, 7, 13, 25, 40])
def test_an_interrupted_sweep_of_settings_goes_on_as_planned(after):
    chosen = profile(plan=PLAN)
    plan, speed = setting_sweep.collectives(chosen, PROMPTS, GLOO), by_setting(gloo_lo=1.1)

    def key(records):
        return [(b.block, b.arm) for b in records if isinstance(b, Block)]

    assert key(play(plan, speed, records=play(plan, speed, most=after))) == key(play(plan, speed))
