"""02_budget's and 07_cycle's answers from simulated logs with known cycles: they follow the log, and are silent without one."""
import dataclasses
import json

import pytest
import simulated_runs
from simulated_runs import CYCLE_S, change, is_block
from test_machine import machine as gpu_machine
from test_trace import COMMUNICATION, cycle_by_cycle
from tiny_models import DEEPSEEK, write_pair

from workbench import budget, ceilings, charts, cost, cycle, tables, width
from workbench import machine as machines
from workbench.arms import Arm
from workbench.lab import Lab
from workbench.machine import Latency, Machine
from workbench.runlog import Finding, RunLog


def cpu_machine(latency: float = 1e-4) -> Machine:
    latencies = tuple(Latency(kind, "gloo", 2, False, ((1, latency),)) for kind in ("all_reduce", "all_gather", "broadcast"))
    return dataclasses.replace(gpu_machine(), name="simulated", engine="cpu", thin_bytes_per_s=1e9, matrix_ops_per_s=1e10, launch_s=0.0,
                               graph_launch_s=None, graph_replay_s=None, latencies=latencies)


def lab(folder, records=(), **changes) -> Lab:
    """A run with that log, for a tiny pair and two prompts of 10 tokens."""
    write_pair(folder)
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([{"id": f"p{n}", "input_ids": list(range(10))} for n in range(2)]))
    profile = simulated_runs.profile(pair={"target": str(folder / "target"), "draft": str(folder / "draft")},
                                     workload={"prompts": str(prompts), "max_new_tokens": 24}, **changes)
    with RunLog(folder / "run" / "runs.jsonl") as file:
        for record in records:
            file.append(record)
    return Lab(profile, folder / "run")


def kept(machine: Machine) -> Finding:
    return Finding(experiment="budget", name="machine", time=simulated_runs.TIME, value=machine.to_json())


def log(**how) -> list:
    """A sound run in which none's step and shared's draft-extend have stage times too."""
    def staged(block):
        rounds, arm = sum((r.verify_ct or r.completion_tokens - 1) for r in block.requests), Arm.parse(block.arm)
        extra = {"draft_extend": 0.04 * CYCLE_S["shared"] * rounds} if arm.speculates else {"decode": 0.9 * CYCLE_S["none"] * rounds}
        return {"rounds": dict.fromkeys((*block.rounds, *extra), rounds), "stage_seconds": block.stage_seconds | extra}
    return change([kept(cpu_machine()), *simulated_runs.sound(noise=0.0, **how)], is_block, staged)


@pytest.fixture()
def run(tmp_path):
    return lab(tmp_path, log())


@pytest.fixture()
def verdict(run):
    return run.verdict.to_json()


# ------------------------------------------------------------------ what stands behind a prediction

def test_a_log_without_measurements_takes_this_machine_and_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "of", lambda profile: cpu_machine())
    empty = lab(tmp_path)
    assert budget.basis(empty).inputs == cpu_machine()
    assert Machine.from_json(empty.finding("machine")) == cpu_machine()


def test_the_logs_own_machine_is_used_and_nothing_is_measured(run, monkeypatch):
    monkeypatch.setattr(machines, "of", lambda profile: pytest.fail("measured"))
    assert budget.basis(run).inputs == cpu_machine()


def test_measurements_of_an_unknown_machine_are_not_predicted_from_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "of", lambda profile: pytest.fail("measured"))
    stranger = lab(tmp_path, simulated_runs.sound())
    found, verdict = budget.basis(stranger), stranger.verdict.to_json()
    assert found.inputs is None and "run 02_budget before the servers" in found.why
    assert "No prediction for this machine: the log holds measurements" in budget.answer(stranger, verdict, found)
    assert "There is no prediction" in cycle.answer(stranger, verdict, found)
    assert budget.placements(stranger, found) == {} and cycle.predicted(stranger, verdict, found) == {}
    assert budget.inputs(found).loc[0, "why"] == found.why and budget.verify_table(stranger, found).empty


def test_a_pair_that_is_not_here_has_no_prediction(tmp_path):
    away = lab(tmp_path, [kept(cpu_machine())])
    for file in (tmp_path / "target").iterdir():
        file.unlink()
    assert "pair.target" in budget.basis(away).why


# ------------------------------------------------------------------ 02_budget

def test_without_a_log_the_numbers_are_the_origins(tmp_path):
    empty = lab(tmp_path)
    assert budget.numbers(empty, empty.verdict.to_json()) == ceilings.Numbers()


def test_with_a_log_the_numbers_are_its_own(run, verdict):
    found = budget.numbers(run, verdict, budget.basis(run))
    assert (1 / found.baseline, found.cycle_s) == pytest.approx((CYCLE_S["none"], CYCLE_S["shared"]), rel=1e-3)
    assert found.accept_length == pytest.approx(verdict["arms"]["shared"]["accept_length"])
    assert found.draft_s == pytest.approx(0.24 * CYCLE_S["shared"], rel=1e-3) and found.collective_s == pytest.approx((1e-4, 1e-4))
    assert found.collectives_a_step == pytest.approx(8 / 3) and found.source == "this run's cycle times"


def test_collectives_hidden_in_graphs_are_those_of_the_source(tmp_path):
    records = [r for r in log() if r.kind != "finding"] + [kept(gpu_machine())]
    gpu = lab(tmp_path, records, engine="cuda")
    found = budget.Basis(gpu_machine(latencies=tuple(Latency(kind, "nccl", 2, True, ((1, 1e-5),)) for kind in (
        "all_reduce", "all_gather", "broadcast"))), *(budget.pair.read(tmp_path / side, f"pair.{side}") for side in ("target", "draft")))
    assert budget.collectives(gpu, {"collectives_per_round": {"draft": 0}}, found) == 12
    assert budget.collectives(gpu, {"collectives_per_round": {"draft": 0}}, budget.Basis(why="none")) is None
    assert budget.numbers(gpu, gpu.verdict.to_json()).collectives_a_step == ceilings.Numbers().collectives_a_step


def test_numbers_that_cannot_be_are_not_used(tmp_path):
    slow = lab(tmp_path, change(log(), lambda r: is_block(r, "none", "measure"), lambda b: simulated_runs.slowed(b, 9)))
    assert budget.numbers(slow, slow.verdict.to_json()).source.startswith("the origin's numbers (this run's cannot be used: speculative")


def test_the_budget_names_the_best_placement(run, verdict):
    found = budget.basis(run)
    said, predictions = budget.answer(run, verdict, found), budget.placements(run, found)
    assert cost.best(predictions).arm == "own-1"
    saved = predictions["shared"].draft_s - predictions["own-1"].draft_s
    assert f"least on own-1, {1e3 * predictions['own-1'].draft_s:.3g} ms: separating saves {1e3 * saved:.3g} ms" in said
    assert said.endswith("not a statement about GPUs.")
    free = dataclasses.replace(found, inputs=cpu_machine(latency=0.0))
    assert "no less on a group of its own" in budget.answer(run, verdict, free)


def test_the_placements_table_adds_up_and_can_be_drawn(run):
    predictions = budget.placements(run, budget.basis(run))
    table, bars = budget.placement_table(predictions), budget.placement_bars(predictions)
    assert table.iloc[:, 1:4].sum(axis=1).tolist() == pytest.approx(table["drafting (ms/cycle)"].tolist())
    assert bars.groupby("arm")["time (ms/cycle)"].sum().to_dict() == pytest.approx(dict(zip(table["arm"], table["drafting (ms/cycle)"])))
    assert "own-1" in charts.svg(charts.stage_times(bars))


def test_a_mixtures_verify_table_counts_experts(tmp_path, run):
    found, dense = budget.basis(run), budget.verify_table(run, budget.basis(run))
    assert dense["tokens verified"].tolist() == list(range(1, 9)) and "experts" not in " ".join(dense)
    folder = tmp_path / "moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DEEPSEEK))
    sparse = budget.verify_table(run, dataclasses.replace(found, target=budget.pair.read(folder, "pair.target")))
    assert sparse["experts read (of a layer)"].tolist() == pytest.approx([8 * (1 - 0.75**w) for w in range(1, 9)])


# ------------------------------------------------------------------ 07_cycle

def test_stages_and_the_host_make_up_the_cycle(verdict):
    told = cycle.measured(verdict)
    shared = told["shared"]
    assert shared["cycle"] == pytest.approx(25, rel=1e-3)
    assert [shared[s] for s in ("draft", "verify", "draft_extend", "host")] == pytest.approx([5, 17.5, 1, 1.5], rel=0.01)
    assert told["none"]["decode"] == pytest.approx(9, rel=1e-3) and "draft" not in told["none"]
    assert cycle.measured_table(verdict).set_index("arm").loc["shared", "draft-extend (ms)"] == pytest.approx(1, rel=0.01)


def test_the_model_is_fitted_on_shared_and_tested_on_the_others(run, verdict):
    found = budget.basis(run)
    rows = cycle.compared(run, verdict, found).set_index("arm")
    assert set(rows.index) == {"none", "shared", "own-1"}           # no replica
    alone = {name: 1e3 * cost.predict(run.profile, found.target, found.draft, Arm.parse(name), found.inputs,
                                      context=10 + 24 / 2).cycle_s for name in ("shared", "own-1", "none")}
    assert rows["model alone (ms)"].to_dict() == pytest.approx(alone)
    expected = 25 + alone["own-1"] - alone["shared"]
    assert rows.loc["own-1", "with shared's remainder (ms)"] == pytest.approx(expected, rel=1e-3)
    assert rows.loc["own-1", "then off (%)"] == pytest.approx(100 * (expected / 23.5 - 1), rel=0.01)
    assert rows["then off (%)"].isna().to_dict() == {"none": True, "shared": True, "own-1": False}


def test_measured_and_predicted_stand_side_by_side(run, verdict):
    bars = cycle.bars(run, verdict, budget.basis(run))
    sums = bars.groupby("arm")["time (ms/cycle)"].sum()
    assert sums["shared, measured"] == pytest.approx(25, rel=1e-3) and sums["shared, predicted"] == pytest.approx(25, rel=1e-3)
    assert set(bars["stage"]) == {"draft", "verify", "draft-extend", "host and rest"}
    assert set(bars["arm"]) == {f"{arm}, {how}" for arm in ("none", "shared", "own-1") for how in ("measured", "predicted")}
    assert "shared, predicted" in charts.svg(charts.stage_times(bars))


def test_the_answer_says_what_is_spent_what_could_and_what_was_saved(run, verdict):
    said = cycle.answer(run, verdict, budget.basis(run))
    assert "A cycle of shared takes 25 ms: draft 5, verify 17.5, draft-extend 1" in said
    assert "Drafting is 6 ms of it, 24 %: no placement can save more." in said
    assert "Its 8 collectives a cycle would take 0.8 ms" in said
    assert "own-1 saved 6 % of the cycle (" in said and "not a statement about GPUs" in said


@pytest.mark.parametrize("speedup, noise, words", [(-0.06, 0.0, "own-1 cost 6 % of the cycle"), (0.0, 0.01, "cannot be told from nothing")])
def test_a_loss_and_nothing_are_said_as_they_are(tmp_path, speedup, noise, words):
    found = lab(tmp_path, [kept(cpu_machine()), *simulated_runs.sound(speedup=speedup, noise=noise)])
    assert words in cycle.answer(found, found.verdict.to_json(), budget.basis(found))


def test_a_refused_comparison_claims_no_saving(tmp_path):
    found = lab(tmp_path, [kept(cpu_machine()), *simulated_runs.DEFECTS["accept_moved"](simulated_runs.sound())])
    said = cycle.answer(found, found.verdict.to_json(), budget.basis(found))
    assert "Whether own-1 saved anything is not known: " in said and "own-1 saved" not in said.replace("Whether own-1 saved", "")


def test_without_stage_times_there_is_no_answer(tmp_path):
    found = lab(tmp_path, change(simulated_runs.sound(), is_block, lambda b: {"stage_seconds": {}}))
    verdict = found.verdict.to_json()
    assert cycle.answer(found, verdict, budget.basis(found)).startswith("No answer: the stages of shared's cycle were not measured.")
    assert cycle.steps(found, verdict) == ()
    (tmp_path / "empty").mkdir()
    nothing = lab(tmp_path / "empty")
    assert cycle.answer(nothing, nothing.verdict.to_json(), budget.Basis(why="none")).startswith("No answer")
    for table in (cycle.measured_table({}), cycle.bars(nothing, {}, budget.Basis()), cycle.trace_table({}), width.table(())):
        assert tables.shown(table).empty
    charts.svg(charts.stage_times(cycle.bars(nothing, {}, budget.Basis())))


def test_other_step_counts_are_judged_by_what_was_measured(run, verdict):
    found = cycle.steps(run, verdict)
    positions = [share["value"] for share in verdict["arms"]["shared"]["accept"]["positions"]]
    assert [c.accept_length for c in found] == pytest.approx([1, *(1 + sum(positions[:n]) for n in (1, 2, 3))])
    # Verify of 1 is the decode step of 9 ms, of 4 tokens 17.5 ms; 2 ms a draft step, 1.5 ms host.
    assert [1e3 * c.cycle_s for c in found] == pytest.approx([10, *(9 + n * 8.5 / 3 + 2 * n + 1.5 for n in (1, 2, 3))], rel=1e-2)
    assert found[3].cycle_s == pytest.approx(25e-3, rel=1e-2)


def test_traces_in_the_runs_folder_are_decomposed_by_arm(run):
    assert cycle.decompositions(run) == {} and cycle.trace_answer({}) == "No cycle was profiled."
    folder = run.folder / "traces" / "shared"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        cycle_by_cycle(COMMUNICATION).write(folder / f"TP-{rank}.trace.json.gz", packed=True)
    parts = cycle.decompositions(run)
    assert parts["shared"]["draft"].seconds["collective"] == pytest.approx(20 * 120e-6)
    assert cycle.trace_table(parts)["arm"].unique().tolist() == ["shared"]
    assert cycle.trace_answer(parts).startswith("shared: A cycle of")
