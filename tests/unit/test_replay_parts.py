"""A replay's parts without a kernel: what counts as finished, what a batch leaves out, what is left
to measure, and an interruption anywhere.
"""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from simulated_replay import measured
from simulated_sweeps import play

from workbench import replay
from workbench.answers.experiments import EXPERIMENTS
from workbench.experiment import names, plans, runlog
from workbench.experiment.errors import WorkbenchError
from workbench.experiment.profile_sections import ROOT
from workbench.experiment.runlog import Block, Failure, RunLog
from workbench.judge import verdict
from workbench.run import lab
from workbench.serving import gpus


def cell(status: str, *tags: str):
    return new_code_cell("pass", metadata={"papermill": {"status": status}, "tags": list(tags)})


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (("completed", "completed"), True),
        (("completed", "failed"), False),
        (("completed", "pending"), False),
        (("completed", "running"), False),
        ((), False),
    ],
)
def test_a_notebook_is_finished_when_every_cell_ran_to_its_end(statuses, expected, tmp_path):
    path = tmp_path / "n.ipynb"
    # As a killed kernel leaves it: papermill writes an end and no error.
    nbformat.write(
        new_notebook(
            cells=[cell(s) for s in statuses],
            metadata={"papermill": {"end_time": "2026", "exception": None}},
        ),
        path,
    )
    assert replay.finished(path) is expected


@pytest.mark.parametrize("content", [None, "", '{"cells": [{"cell_ty'])
def test_a_notebook_that_is_not_there_or_was_half_written_is_not_finished(content, tmp_path):
    path = tmp_path / "n.ipynb"
    if content is not None:
        path.write_text(content)
    assert replay.finished(path) is False


def test_a_batch_leaves_interactive_cells_out_and_nothing_else():
    notebook = new_notebook(cells=[cell("", "parameters"), cell("", replay.INTERACTIVE), cell("")])
    assert [c.metadata.tags for c in replay.batch(notebook).cells] == [["parameters"], []]


@pytest.mark.parametrize("name", [n.name for n in replay.NOTEBOOKS])
def test_a_batch_of_every_notebook_has_no_widget(name):
    kept = replay.batch(nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4))
    assert not [c for c in kept.cells if "panel(" in c.source or "ipywidgets" in c.source]


def test_every_notebook_that_measures_has_a_plan():
    assert set(EXPERIMENTS) == {n.measures for n in replay.NOTEBOOKS if n.measures}


def test_what_is_left_is_known_from_the_log(tmp_path):
    done = measured(tmp_path / "done")
    assert all(not done.left(each.tasks(done)) for each in EXPERIMENTS.values())
    assert replay._left_s(done, replay.NOTEBOOKS) is None
    part = lab.open_lab("cpu-tiny", tmp_path / "part")
    with RunLog(part.folder / "runs.jsonl") as file:
        for record in [
            r
            for r in done.records
            if r.kind == "start" or r.kind == "block" and r.experiment == "baseline"
        ]:
            file.append(record)
    left = replay._left_s(part, replay.NOTEBOOKS)
    # Six starts of 04's two servers and some of 05's and 06's, of 15 s, two at once; and blocks.
    assert left > 15 * 8 and plans.left_words(left).endswith("min left")


@pytest.mark.parametrize("after", [0, 1, 3, 5, 8, 9])
def test_a_baseline_that_is_interrupted_anywhere_ends_with_a_result(after):
    from simulated_runs import profile

    chosen = profile(plan={"pairs": 6})
    plan = lambda _: plans.baseline(chosen, 100)
    first = play(plan, lambda _: 1.0, most=after)
    records = play(plan, lambda _: 1.0, records=first)
    (control,) = [c for c in verdict.judge(chosen, records).controls if c.metric == "tokens_per_s"]
    assert control.valid and control.units[0] >= 3
    assert play(plan, lambda _: 1.0, records=records) == records


def test_who_stopped_a_run_is_told_and_is_no_refusal(tmp_path):
    run = measured(tmp_path)
    assert run.verdict.valid
    run.stopped("by hand")
    judged = run.verdict
    assert judged.valid and any("stopped by hand after a block on" in note for note in judged.notes)
    assert isinstance(run.records[-1], Failure) and run.records[-1].what == "stopped"


def test_a_setting_that_was_left_out_is_told_and_is_no_refusal(tmp_path):
    run = measured(tmp_path)
    with RunLog(run.folder / "runs.jsonl") as file:
        file.append(
            Failure(
                experiment=names.COLLECTIVES,
                arm="shared+comm=gloo-lo-x2",
                time="t",
                what="setting",
                reason="it hangs.",
            )
        )
    assert (
        run.verdict.valid
        and "collectives: shared+comm=gloo-lo-x2 was left out (it hangs)." in run.verdict.notes
    )


def test_two_processes_do_not_write_one_log(tmp_path, monkeypatch):
    monkeypatch.setattr(runlog, "FREE_WITHIN_S", 0.2)
    with RunLog(tmp_path / "run" / "runs.jsonl"):
        with pytest.raises(WorkbenchError, match="run is being measured by another process"):
            with RunLog(tmp_path / "run" / "runs.jsonl"):
                pass
    with RunLog(tmp_path / "run" / "runs.jsonl"):
        pass


def test_time_left_is_by_blocks_of_their_kind_and_starts(tmp_path):
    run = measured(tmp_path)
    tasks = [task for _, task in plans.numbered(plans.baseline(run.profile, len(run.prompts)))]
    alone = [
        r.seconds
        for r in run.records
        if isinstance(r, Block)
        and r.role != "parity"
        and (len(r.requests), r.concurrency) == (run.profile.workload.requests_per_block, 1)
    ]
    told = plans.left_s(run.records, [t for t in tasks if t.planned.role == "measure"], 2)
    assert told == pytest.approx(30 + 12 * sum(alone) / len(alone), rel=0.01)
    assert plans.left_s([], tasks, 1) is None
    assert [plans.left_words(s) for s in (None, 3, 42, 99, 125, 3600)] == [
        "",
        ", about 5 s left",
        ", about 40 s left",
        ", about 100 s left",
        ", about 2 min left",
        ", about 60 min left",
    ]


def test_the_facts_of_this_machine_are_found_without_a_gpu():
    found = gpus.facts(lab.load("cpu-tiny"))
    assert found.engine == "cpu" and found.ranks == 2 and "lo" in found.interfaces
