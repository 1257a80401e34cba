"""02_budget's and 07_cycle's answers from simulated logs with known cycles: they follow the log,
and are silent without one.
"""

import dataclasses
import json
import math

import pandas as pd
import pytest
import simulated_runs
from simulated_runs import CYCLE_S, change, is_block
from test_machine import machine as gpu_machine
from test_torch_trace import COMMUNICATION, cycle_by_cycle
from tiny_models import DEEPSEEK, write_pair

from workbench.answers import budget, cycle, cycle_check, host_time, profiled_cycles, steps
from workbench.experiment.arms import Arm
from workbench.experiment.runlog import Finding, RunLog
from workbench.judge.verdict_file import ArmEntry, VerdictFile
from workbench.predict import ceilings, cycle_time, measure_machine, stage_work
from workbench.predict.machine import Latency, Machine
from workbench.report import cells, chart_parts, cycle_charts
from workbench.run import recording
from workbench.run.lab import Run

read = VerdictFile.read


def cpu_machine(latency: float = 1e-4) -> Machine:
    latencies = tuple(
        Latency(kind, "gloo", 2, False, ((1, latency),))
        for kind in ("all_reduce", "all_gather", "broadcast")
    )
    return dataclasses.replace(
        gpu_machine(),
        name="simulated",
        engine="cpu",
        thin_bytes_per_s=1e9,
        matrix_ops_per_s=1e10,
        launch_s=0.0,
        graph_launch_s=None,
        graph_replay_s=None,
        latencies=latencies,
    )


def lab(folder, records=(), **changes) -> Run:
    """A run with that log, for a tiny pair and two prompts of 10 tokens."""
    write_pair(folder)
    prompts = folder / "prompts.json"
    prompts.write_text(
        json.dumps([{"id": f"p{n}", "input_ids": list(range(10))} for n in range(2)])
    )
    profile = simulated_runs.profile(
        pair={"target": str(folder / "target"), "draft": str(folder / "draft")},
        workload={"prompts": str(prompts), "max_new_tokens": 24},
        **changes,
    )
    with RunLog(folder / "run" / "runs.jsonl") as file:
        for record in records:
            file.append(record)
    return Run(profile, folder / "run")


def kept(machine: Machine) -> Finding:
    return Finding(
        experiment="budget", name="machine", time=simulated_runs.TIME, value=machine.to_json()
    )


def log(**how) -> list:
    """A sound run in which none's step and shared's draft-extend have stage times too."""

    def staged(block):
        rounds, arm = (
            sum((r.verify_ct or r.completion_tokens - 1) for r in block.requests),
            Arm.parse(block.arm),
        )
        extra = (
            {"draft_extend": 0.04 * CYCLE_S["shared"] * rounds}
            if arm.speculates
            else {"decode": 0.9 * CYCLE_S["none"] * rounds}
        )
        return {
            "rounds": dict.fromkeys((*block.rounds, *extra), rounds),
            "stage_seconds": block.stage_seconds | extra,
        }

    return change([kept(cpu_machine()), *simulated_runs.sound(noise=0.0, **how)], is_block, staged)


@pytest.fixture()
def run(tmp_path):
    return lab(tmp_path, log())


@pytest.fixture()
def verdict(run):
    return run.verdict.file


# ------------------------------------------------------------------ what stands behind a prediction


def test_a_log_without_measurements_takes_this_machine_and_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_machine, "saved_or_measured", lambda profile: cpu_machine())
    empty = lab(tmp_path)
    assert budget.basis(empty).inputs == cpu_machine()
    assert empty.finding("machine", Machine) == cpu_machine()


def test_the_logs_own_machine_is_used_and_nothing_is_measured(run, monkeypatch):
    monkeypatch.setattr(
        measure_machine, "saved_or_measured", lambda profile: pytest.fail("measured")
    )
    assert budget.basis(run).inputs == cpu_machine()


def test_measurements_of_an_unknown_machine_are_not_predicted_from_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(
        measure_machine, "saved_or_measured", lambda profile: pytest.fail("measured")
    )
    stranger = lab(tmp_path, simulated_runs.sound())
    found, verdict = budget.basis(stranger), stranger.verdict.file
    assert found.inputs is None and "run 02_budget before the servers" in found.why
    assert "No prediction for this machine: the log holds measurements" in budget.answer(
        stranger, verdict, found
    )
    assert "There is no prediction" in cycle_check.sentence(stranger, verdict, found)
    assert (
        budget.placements(stranger, found) == {}
        and cycle_check.alone(stranger, verdict, found) == {}
    )
    assert (
        budget.inputs(found).loc[0, "why"] == found.why
        and budget.verify_table(stranger, found).empty
    )


def test_a_pair_that_is_not_here_has_no_prediction(tmp_path):
    away = lab(tmp_path, [kept(cpu_machine())])
    for file in (tmp_path / "target").iterdir():
        file.unlink()
    assert "pair.target" in budget.basis(away).why


# ------------------------------------------------------------------ 02_budget


def test_without_a_log_the_numbers_are_the_origins(tmp_path):
    empty = lab(tmp_path)
    assert budget.numbers(empty, empty.verdict.file) == ceilings.Numbers()


def test_with_a_log_the_numbers_are_its_own(run, verdict):
    found = budget.numbers(run, verdict, budget.basis(run))
    assert (1 / found.baseline, found.cycle_s) == pytest.approx(
        (CYCLE_S["none"], CYCLE_S["shared"]), rel=1e-3
    )
    assert found.accept_length == pytest.approx(verdict.arms["shared"].accept_length)
    assert found.draft_s == pytest.approx(
        0.24 * CYCLE_S["shared"], rel=1e-3
    ) and found.collective_s == pytest.approx((1e-4, 1e-4))
    assert (
        found.collectives_a_step == pytest.approx(8 / 3)
        and found.source == "this run's cycle times"
    )


def test_collectives_hidden_in_graphs_are_those_of_the_source(tmp_path):
    records = [r for r in log() if r.kind != "finding"] + [kept(gpu_machine())]
    gpu = lab(tmp_path, records, engine="cuda")
    found = budget.Basis(
        gpu_machine(
            latencies=tuple(
                Latency(kind, "nccl", 2, True, ((1, 1e-5),))
                for kind in ("all_reduce", "all_gather", "broadcast")
            )
        ),
        *(budget.model_shape.read(tmp_path / side, f"pair.{side}") for side in ("target", "draft")),
    )
    hidden = ArmEntry(collectives_per_round={"draft": 0})
    assert budget.collectives(gpu, hidden, found) == 12
    assert budget.collectives(gpu, hidden, budget.Basis(why="none")) is None
    assert (
        budget.numbers(gpu, gpu.verdict.file).collectives_a_step
        == ceilings.Numbers().collectives_a_step
    )


def test_numbers_that_cannot_be_are_not_used(tmp_path):
    slow = lab(
        tmp_path,
        change(
            log(), lambda r: is_block(r, "none", "measure"), lambda b: simulated_runs.slowed(b, 9)
        ),
    )
    assert budget.numbers(slow, slow.verdict.file).source.startswith(
        f"{ceilings.REPORTED} (this run's cannot be used: speculative"
    )


def test_the_budget_names_the_best_placement(run, verdict):
    found = budget.basis(run)
    said, placed = budget.answer(run, verdict, found), budget.placements(run, found)
    assert cycle_time.best(placed).arm == "own-1"
    saved = placed["shared"].draft_s - placed["own-1"].draft_s
    assert (
        f"least on own-1, {1e3 * placed['own-1'].draft_s:.3g} ms: separating saves"
        f" {1e3 * saved:.3g} ms" in said
    )
    assert said.endswith("not a statement about GPUs.")
    free = dataclasses.replace(found, inputs=cpu_machine(latency=0.0))
    assert "no less on a group of its own" in budget.answer(run, verdict, free)


def test_the_placements_table_adds_up_and_can_be_drawn(run):
    placed = budget.placements(run, budget.basis(run))
    table, bars = budget.placement_table(placed), budget.placement_bars(placed)
    assert table.iloc[:, 1:4].sum(axis=1).tolist() == pytest.approx(
        table["drafting (ms/cycle)"].tolist()
    )
    assert bars.groupby("arm")["time (ms/cycle)"].sum().to_dict() == pytest.approx(
        dict(zip(table["arm"], table["drafting (ms/cycle)"]))
    )
    assert "own-1" in chart_parts.svg(cycle_charts.stage_times(bars))


def test_a_mixtures_verify_table_counts_experts(tmp_path, run):
    found, dense = budget.basis(run), budget.verify_table(run, budget.basis(run))
    assert dense["tokens verified"].tolist() == list(range(1, 9)) and "experts" not in " ".join(
        dense
    )
    folder = tmp_path / "moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DEEPSEEK))
    sparse = budget.verify_table(
        run, dataclasses.replace(found, target=budget.model_shape.read(folder, "pair.target"))
    )
    assert sparse["experts read (of a layer)"].tolist() == pytest.approx(
        [8 * (1 - 0.75**w) for w in range(1, 9)]
    )


# ------------------------------------------------------------------ 07_cycle


def test_stages_and_the_host_make_up_the_cycle(verdict):
    told = cycle.measured(verdict)
    shared = told["shared"]
    assert shared["cycle"] == pytest.approx(25, rel=1e-3)
    assert [shared[s] for s in ("draft", "verify", "draft_extend", "host")] == pytest.approx(
        [5, 17.5, 1, 1.5], rel=0.01
    )
    assert told["none"]["decode"] == pytest.approx(9, rel=1e-3) and "draft" not in told["none"]
    assert cycle.measured_table(verdict).set_index("arm").loc[
        "shared", "draft-extend (ms)"
    ] == pytest.approx(1, rel=0.01)


def test_other_loads_are_left_out_and_other_communication_is_not_predicted(run, verdict):
    shared = verdict.arms["shared"]
    others = {
        "shared+comm=nccl-ring": shared.model_copy(update={"experiment": "collectives"}),
        "shared+steps=2": shared.model_copy(update={"experiment": "steps_at_4"}),
    }
    more = verdict.model_copy(update={"arms": verdict.arms | others})
    assert set(cycle.measured(more)) == {*cycle.measured(verdict), "shared+comm=nccl-ring"}
    assert set(cycle_check.alone(run, more, budget.basis(run))) == {"none", "shared", "own-1"}
    assert cycle.curve(run, more) == cycle.curve(run, verdict)


def test_the_model_takes_nothing_from_the_run(run, verdict):
    found = budget.basis(run)
    rows = cycle_check.compared(run, verdict, found).set_index("arm")
    assert set(rows.index) == {"none", "shared", "own-1"}  # no replica
    alone = {
        name: (
            1e3
            * cycle_time.predict(
                run.profile,
                found.target,
                found.draft,
                Arm.parse(name),
                found.inputs,
                context=10 + 24 / 2,
            ).cycle_s
        )
        for name in ("shared", "own-1", "none")
    }
    assert rows["model alone (ms)"].to_dict() == pytest.approx(alone)
    off = 100 * (alone["own-1"] / 23.5 - 1)
    assert rows.loc["own-1", "off (%)"] == pytest.approx(off, rel=0.01)


def test_measured_and_predicted_stand_side_by_side(run, verdict):
    bars = cycle_check.bars(run, verdict, budget.basis(run))
    sums = bars.groupby("arm")["time (ms/cycle)"].sum()
    predicted = 1e3 * cycle_check.alone(run, verdict, budget.basis(run))["shared"].cycle_s
    assert sums["shared, measured"] == pytest.approx(25, rel=1e-3)
    assert sums["shared, predicted"] == pytest.approx(predicted)
    assert set(bars["stage"]) == {"draft", "verify", "draft-extend", "host and rest"}
    assert set(bars["arm"]) == {
        f"{arm}, {how}" for arm in ("none", "shared", "own-1") for how in ("measured", "predicted")
    }
    assert "shared, predicted" in chart_parts.svg(cycle_charts.stage_times(bars))


def test_the_answer_says_what_is_spent_what_could_and_what_was_saved(run, verdict):
    said = cycle.answer(run, verdict, budget.basis(run))
    assert "A cycle of shared takes 25 ms: draft 5, verify 17.5, draft-extend 1" in said
    assert "Drafting is 6 ms of it, 24 %: no placement can save more." in said
    assert "Its 8 collectives a cycle would take 0.8 ms" in said
    assert "own-1 saved 6 % of the cycle (" in said and "not a statement about GPUs" in said
    again = tuple(c.model_copy(update={"experiment": "steps"}) for c in verdict.comparisons)
    more = verdict.model_copy(update={"comparisons": verdict.comparisons + again})
    assert cycle.answer(run, more, budget.basis(run)) == said
    assert cycle_check.order(
        more, cycle_check.alone(run, verdict, budget.basis(run))
    ) == cycle_check.order(verdict, cycle_check.alone(run, verdict, budget.basis(run)))


@pytest.mark.parametrize(
    "speedup, noise, words",
    [(-0.06, 0.0, "own-1 cost 6 % of the cycle"), (0.0, 0.01, "cannot be told from nothing")],
)
def test_a_loss_and_nothing_are_said_as_they_are(tmp_path, speedup, noise, words):
    found = lab(
        tmp_path, [kept(cpu_machine()), *simulated_runs.sound(speedup=speedup, noise=noise)]
    )
    assert words in cycle.answer(found, found.verdict.file, budget.basis(found))


def test_a_refused_comparison_claims_no_saving(tmp_path):
    found = lab(
        tmp_path,
        [kept(cpu_machine()), *simulated_runs.DEFECTS["accept_moved"](simulated_runs.sound())],
    )
    said = cycle.answer(found, found.verdict.file, budget.basis(found))
    assert (
        "Whether own-1 saved anything is not known: " in said
        and "own-1 saved" not in said.replace("Whether own-1 saved", "")
    )


def test_without_stage_times_there_is_no_answer(tmp_path):
    found = lab(tmp_path, change(simulated_runs.sound(), is_block, lambda b: {"stage_seconds": {}}))
    verdict = found.verdict.file
    assert cycle.answer(found, verdict, budget.basis(found)).startswith(
        "No answer: the stages of shared's cycle were not measured."
    )
    (tmp_path / "empty").mkdir()
    nothing = lab(tmp_path / "empty")
    assert cycle.answer(nothing, nothing.verdict.file, budget.Basis(why="none")).startswith(
        "No answer"
    )
    for table in (
        cycle.measured_table(VerdictFile()),
        cycle_check.bars(nothing, VerdictFile(), budget.Basis()),
        profiled_cycles.table({}),
        steps.choice_table(()),
    ):
        assert cells.shown(table).empty
    missed = cycle_check.misses(cycle_check.compared(nothing, VerdictFile(), budget.Basis()))
    for chart in (
        cycle_charts.stage_times(cycle_check.bars(nothing, VerdictFile(), budget.Basis())),
        cycle_charts.misses(missed, 15),
        cycle_charts.decomposition(profiled_cycles.bars({})),
        cycle_charts.verify_width(cycle.widths(nothing, VerdictFile(), budget.Basis())),
    ):
        chart_parts.svg(chart)


def test_a_longer_chain_tells_of_more_widths(tmp_path, run, verdict):
    content = verdict.to_json()
    facts = json.loads(json.dumps(content["arms"]["shared"]))
    content["arms"]["shared+steps=5"] = facts
    facts["stage_ms"]["verify"] = 20.0
    deeper = VerdictFile.read(content)
    assert cycle.curve(run, deeper) == pytest.approx({1: 9e-3, 4: 17.5e-3, 6: 20e-3}, rel=1e-2)
    rows = cycle.widths(run, deeper, budget.basis(run)).set_index("tokens verified")
    assert rows.loc[6, "measured (ms)"] == pytest.approx(20) and math.isnan(
        rows.loc[5, "measured (ms)"]
    )
    assert rows["predicted (ms)"].is_monotonic_increasing and rows.index.tolist() == list(
        range(1, 9)
    )
    assert "measured" in chart_parts.svg(cycle_charts.verify_width(rows.reset_index()))


@pytest.mark.parametrize(
    ("ratio", "low", "high", "words"),
    [
        (
            1.004,
            1.001,
            1.007,
            "costs 0.4 % of throughput (95 % interval 0.1 to 0.7 %), no more than the 1 %",
        ),
        (
            1.03,
            1.02,
            1.04,
            "costs 2.9 % of throughput (95 % interval 2 to 3.8 %), more than the 1 %",
        ),
        (1.0, 0.97, 1.03, "which this run cannot tell from more or less than the 1 %"),
    ],
)
def test_the_cost_of_timing_is_that_of_an_arm_without_it(ratio, low, high, words):
    compared = {
        "a": "shared+timing=off",
        "b": "shared",
        "metric": "tokens_per_s",
        "ratio": ratio,
        "low": low,
        "high": high,
        "level": 0.95,
        "valid": True,
        "reasons": [],
    }
    assert words in cycle.timing(read({"comparisons": [compared]}))
    other = read({"comparisons": [compared | {"a": "own-1"}]})
    assert "name the arm shared+timing=off" in cycle.timing(other)
    refused = {"valid": False, "ratio": None, "reasons": [{"sentence": "too few pairs."}]}
    assert (
        cycle.timing(read({"comparisons": [compared | refused]}))
        == "What timing the stages costs is not known: too few pairs."
    )


# ------------------------------------------------------------------ predicted against measured


def test_a_model_that_misses_is_said_to_miss_and_a_wrong_order_is_named(run, verdict):
    found = budget.basis(run)
    said = cycle_check.sentence(run, verdict, found)
    rows = cycle_check.compared(run, verdict, found).set_index("arm")
    assert (
        all(abs(miss) > 15 for miss in rows["off (%)"])
        and f"own-1 ({rows.loc['own-1', 'off (%)']:+.2g} %)" in said
    )
    assert "With nothing taken from the run, the model misses 15 % for" in said
    assert "It orders each of the 3 pairs of arms" in said
    worst = rows["off (%)"].abs().idxmax()
    told, stages = (
        cycle.measured(verdict)[worst],
        cycle_check.alone(run, verdict, found)[worst].stages,
    )
    apart = told["verify"] - 1e3 * stages["verify"].total_s
    assert f"Of {worst}, which it misses most" in said and f"{apart:+.2g} ms in verify" in said
    content = verdict.to_json()
    for c in content["comparisons"]:
        if (c["a"], c["b"], c["metric"]) == ("own-1", "shared", "cycle_ms"):
            c["ratio"] = 1 / c["ratio"]
    turned = read(content)
    assert "It orders own-1 and shared the other way round than measured." in cycle_check.sentence(
        run, turned, found
    )


def test_misses_are_drawn_by_run_and_arm(run, verdict):
    table = cycle_check.compared(run, verdict, budget.basis(run))
    both = cycle_check.misses(pd.concat([table.assign(run="first"), table.assign(run="second")]))
    assert sorted(set(both["label"])) == sorted(
        f"{name}: {arm}" for name in ("first", "second") for arm in ("none", "shared", "own-1")
    )
    assert "second: own-1" in chart_parts.svg(cycle_charts.misses(both, cycle_check.ALLOWED))


def gpu_basis(folder) -> budget.Basis:
    """A GPU machine for the tiny pair in that folder."""
    found = tuple(
        Latency(kind, "nccl", 2, graph, ((1, 1e-5),))
        for kind in ("all_reduce", "all_gather", "broadcast")
        for graph in (False, True)
    )
    return budget.Basis(
        gpu_machine(latencies=found),
        *(budget.model_shape.read(folder / side, f"pair.{side}") for side in ("target", "draft")),
    )


def test_kernels_are_those_that_a_trace_counted(tmp_path):
    gpu = lab(tmp_path, log(), engine="cuda")
    found, verdict = gpu_basis(tmp_path), gpu.verdict.file
    estimated = cycle_check.alone(gpu, verdict, found)["own-1"].stages["verify"].launch_s
    assert cycle_check.kernels(gpu, found) == {}
    folder = gpu.folder / "traces" / "shared"
    folder.mkdir(parents=True)
    many = {
        "draft": [("small", 2)] * 60,
        "verify": [("small", 2)] * 90,
        "draft_extend": [("small", 2)] * 40,
    }
    cycle_by_cycle(many).write(folder / "TP-0.trace.json")
    collectives = {
        stage: sum(c.count for c in work.collectives)
        for stage, work in stage_work.stages(
            gpu.profile, found.target, found.draft, Arm("shared")
        ).items()
    }
    assert cycle_check.kernels(gpu, found) == {
        "draft": 60 - collectives["draft"],
        "verify": 90 - collectives["verify"],
        "draft_extend": 40 - collectives["draft_extend"],
    }
    counted = cycle_check.alone(gpu, verdict, found)["own-1"].stages["verify"].launch_s
    assert counted == pytest.approx(
        (90 - collectives["verify"]) * 1.5e-6 + 8e-6
    ) and counted != pytest.approx(estimated)


def test_where_the_host_works_beside_the_device_no_arm_is_faster_than_it(tmp_path):
    """Cycles of 25 and 23.5 ms, devices that need less than 1: both are the host's, and a known one
    is no shorter cycle than it needs.
    """
    gpu, found = lab(tmp_path, log(), engine="cuda"), gpu_basis(tmp_path)
    verdict = gpu.verdict.file
    rows = cycle_check.compared(gpu, verdict, found).set_index("arm")
    assert rows.loc["own-1", "model alone (ms)"] < 1
    assert "The device is idle for more than three quarters of a cycle" in cycle_check.sentence(
        gpu, verdict, found
    )
    known = dataclasses.replace(found, host={"shared": 24e-3, "none": 9e-3}, host_from="other")
    rows = cycle_check.compared(gpu, verdict, known).set_index("arm")
    assert rows["model alone (ms)"].to_dict() == pytest.approx(
        {"none": 9, "shared": 24, "own-1": 24}
    )  # own-1's as shared's
    said = cycle_check.sentence(gpu, verdict, known)
    assert (
        "is known from recorded:other, where the device is idle" in said
        and "within 15 % of every measured cycle" in said
    )


def test_the_host_is_told_by_a_recording_of_the_same_machine_whose_device_is_idle(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(recording, "FOLDER", tmp_path / "recordings")
    gpu, inputs = lab(tmp_path, log(), engine="cuda"), gpu_basis(tmp_path).inputs
    facts = {"machine": {"cores": 2}, "gpus": [{"name": "g"}], "versions": {"sglang": "1"}}

    def recorded(
        name: str, hour: int, cycle_ms: float = 25.0, requests: int = 1, **changes
    ) -> None:
        folder = recording.FOLDER / name
        folder.mkdir(parents=True)
        profile = gpu.profile.model_copy(
            update={"workload": gpu.profile.workload.model_copy(update={"concurrency": requests})}
        )
        (folder / "runs.jsonl").write_text("")
        (folder / "profile.json").write_text(profile.model_dump_json())
        (folder / "provenance.json").write_text(
            json.dumps(facts | {"time": f"2026-01-01T{hour:02}:00:00+00:00"} | changes)
        )
        (folder / "verdict.json").write_text(
            json.dumps({"arms": {"shared": {"cycle_ms": cycle_ms}, "none": {"cycle_ms": None}}})
        )

    (gpu.folder / "provenance.json").write_text(
        json.dumps(facts | {"time": "2026-01-01T12:00:00+00:00"})
    )
    assert host_time.from_recordings(gpu, inputs) == ("", {})
    recorded("earlier", 9, 24.0)
    recorded("busy", 12, cycle_ms=1.0)
    recorded("another-machine", 12, machine={"cores": 3})
    recorded("another-load", 12, requests=4)
    assert host_time.from_recordings(gpu, inputs) == ("earlier", {"shared": pytest.approx(24e-3)})
    recorded("nearer", 14)
    assert host_time.from_recordings(gpu, inputs)[0] == "nearer"
    assert (
        host_time.from_recordings(Run(gpu.profile, recording.FOLDER / "nearer"), inputs)[0]
        == "earlier"
    )  # never of itself
    assert host_time.from_recordings(lab(tmp_path, ()), inputs) == (
        "",
        {},
    )  # the CPU engine's device is the host


def test_every_recording_is_predicted_from_its_own_machine(tmp_path, run):
    for name, records in (
        ("known", run.records),
        ("unknown", [r for r in run.records if r.kind != "finding"]),
    ):
        folder = tmp_path / "recordings" / name
        with RunLog(folder / "runs.jsonl") as file:
            for record in records:
                file.append(record)
        (folder / "profile.json").write_text(run.profile.model_dump_json())
        (folder / "provenance.json").write_text(json.dumps({"recording": name, "blocks": {}}))
        (folder / "prompts.json").write_text(json.dumps(list(run.prompts)))
        (folder / "verdict.json").write_text(json.dumps(run.verdict.to_json()))
    table, said = cycle_check.recorded(tmp_path / "recordings")
    expected = cycle_check.compared(run, run.verdict.file, budget.basis(run))
    pd.testing.assert_frame_equal(table.drop(columns="run"), expected)
    assert (
        set(table["run"]) == {"known"}
        and said["unknown"].startswith("There is no prediction")
        and "misses 15 %" in said["known"]
    )
    empty, nothing = cycle_check.recorded(tmp_path / "none")
    assert empty.empty and nothing == {} and "run" in empty


# ------------------------------------------------------------------ profiled cycles


def test_traces_in_the_runs_folder_are_decomposed_by_arm_and_kept_in_the_log(run):
    assert profiled_cycles.decompositions(run) == {} and profiled_cycles.answer(
        {}, VerdictFile()
    ).startswith("No cycle was profiled")
    folder = run.folder / "traces" / "shared"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        cycle_by_cycle(COMMUNICATION).write(folder / f"TP-{rank}.trace.json.gz", packed=True)
    found = profiled_cycles.decompositions(run)
    assert found["shared"].parts["draft"].seconds["collective"] == pytest.approx(20 * 120e-6)
    assert profiled_cycles.table(found)["arm"].unique().tolist() == ["shared"]
    said = profiled_cycles.answer(found, run.verdict.file)
    assert said.startswith("shared: A cycle of") and said.endswith(
        "Without the profiler a cycle takes 25 ms."
    )
    bars = profiled_cycles.bars(found)
    total = profiled_cycles.table(found).set_index("stage")["total (ms/cycle)"]
    assert bars.groupby("stage")["time (ms/cycle)"].sum()["draft"] == pytest.approx(total["draft"])
    assert "shared, draft" in chart_parts.svg(cycle_charts.decomposition(bars))
    for file in folder.iterdir():
        file.unlink()  # a recording has the log alone
    assert profiled_cycles.decompositions(run) == found


def test_a_trace_that_cannot_be_read_is_said_so(run):
    folder = run.folder / "traces" / "own-1"
    folder.mkdir(parents=True)
    (folder / "TP-0.trace.json").write_text('{"traceEvents": [')
    found = profiled_cycles.decompositions(run)
    assert "damaged or cut off" in found["own-1"].why and profiled_cycles.table(found).empty
    assert profiled_cycles.answer(found, VerdictFile()).startswith(
        "own-1: no trace (trace: TP-0.trace.json is damaged or cut off"
    )
