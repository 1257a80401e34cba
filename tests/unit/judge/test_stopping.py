"""A run stops between rounds of starts, at checkpoints or when its budget is spent, and its log
says so.
"""

import pytest
from simulated_runs import EXPERIMENT, TIME, play, profile
from test_lab import Servers, run  # noqa: F401 (a fixture)

from workbench.experiment import plans
from workbench.experiment.runlog import Finding
from workbench.judge import levels, stopping
from workbench.judge.verdict import judge
from workbench.run import lab


def planned(**plan):
    chosen = profile(plan={"arms": ["none", "shared", "own-1"], "starts": 8, "pairs": 16, **plan})
    tasks = plans.draft_tp(chosen, 60)
    return chosen, tasks, stopping.rule(chosen, tasks)


def told(chosen, tasks, rule, **truth):
    """The simulated log up to where the rule ends the run, and why it did; the whole log and None
    where it did not.
    """
    measured = [t for t in tasks if t.planned.role != "parity"]
    looks = rule.checkpoints and Finding(
        experiment=EXPERIMENT,
        name=levels.CHECKPOINTS,
        time=TIME,
        value={"looks": list(rule.checkpoints.looks)},
    )
    log = [*filter(None, [looks]), *play([t.planned for t in measured], **truth)]
    for place, task in enumerate(measured):
        done = [r for r in log if r.kind != "block" or r.block < place]
        if why := rule.ends(done, task):
            starts = {r.start for r in done if r.kind == "block"}
            return [r for r in done if r.kind != "start" or r.start in starts], why
    return log, None


def test_without_being_asked_a_plan_is_run_to_its_end():
    assert planned()[2] is None
    assert planned(stop=True, arms=["none", "shared"])[2] is None  # nothing of the question


def test_looks_come_after_whole_rounds_that_can_be_compared():
    rule = planned(stop=True)[2]
    assert (rule.a, rule.b) == ("own-1", "shared") and [len(r) for r in rule.rounds] == [2] * 8
    assert rule.checkpoints.looks == (3, 4, 5, 6, 7, 8)
    assert planned(budget_s=1e6)[2].checkpoints is None  # a budget looks at no data


def test_a_clear_difference_ends_the_run_early_with_a_valid_verdict():
    chosen, tasks, rule = planned(stop=True)
    log, why = told(chosen, tasks, rule, speedup=0.2, seed=1)
    starts = sum(r.kind == "start" for r in log) // 2
    assert why == "decided" and 3 <= starts < 8
    found = next(
        c
        for c in judge(chosen, log).comparisons
        if (c.a, c.b, c.metric) == ("own-1", "shared", "cycle_ms")
    )
    assert found.valid and found.units == (starts,) and found.interval.decided
    # It has paid for the look.
    assert found.level == pytest.approx(rule.checkpoints.level(starts))
    assert found.level > 0.97


def test_no_difference_runs_on_and_a_wished_resolution_stops_where_it_is_reached():
    assert told(*planned(stop=True), speedup=0.0, seed=1)[1] is None
    assert told(*planned(stop=True, resolution=0.1), speedup=0.0)[1] == "resolution"
    assert told(*planned(stop=True, resolution=0.0001), speedup=0.2)[1] is None


def test_a_budget_ends_the_run_before_the_round_that_would_exceed_it():
    chosen, tasks, rule = planned(budget_s=1.0)
    log, why = told(chosen, tasks, rule, speedup=0.0)
    assert (
        why == "seconds" and sum(r.kind == "start" for r in log) == 6
    )  # three rounds, without which nothing could be said
    assert told(*planned(budget_s=1e6), speedup=0.2)[1] is None
    assert told(*planned(budget_s=1.0, stop=True), speedup=0.0)[1] == "seconds"


@pytest.mark.parametrize("again", [False, True])
def test_the_lab_leaves_out_what_is_left_and_says_so(again, run, monkeypatch):  # noqa: F811
    fake = Servers(monkeypatch)
    short = lab.Run(
        run.profile.model_copy(
            update={
                "plan": run.profile.plan.model_copy(
                    update={
                        "arms": ("none", "shared", "own-1"),
                        "starts": 5,
                        "pairs": 5,
                        "budget_s": 1.0,
                    }
                )
            }
        ),
        run.folder,
    )
    short.__dict__["prompts"] = [{"id": f"p{n}", "input_ids": [n]} for n in range(40)]
    for _ in range(1 + again):
        short.measure(plans.draft_tp(short.profile, 40))
    said = {r.name: r.value for r in short.records if isinstance(r, Finding)}
    assert (
        said["stopped"]["why"] == "seconds"
        and said["stopped"]["blocks_left"] > 0
        and "checkpoints" not in said
    )
    groups = [call for call in fake.calls if call[0] == "start" and "none" in call]
    assert len(groups) == 3
