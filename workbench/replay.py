"""Replay an investigation: every notebook in order through papermill, each kept as executed, and
what the run is worth at the end.
"""

from __future__ import annotations

import workbench.report.lean_imports  # noqa: F401  (before papermill, which isort would put first)

# isort: split
import logging
import os
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nbformat
import papermill
import psutil
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from workbench.answers import negative_control
from workbench.answers.experiments import EXPERIMENTS
from workbench.experiment import plans
from workbench.experiment.errors import BadInput
from workbench.experiment.profile_sections import ROOT
from workbench.experiment.runlog import NEGATIVE, Block, Finding
from workbench.judge import told
from workbench.judge.stopping import STOPPED
from workbench.judge.verdict_file import VerdictFile
from workbench.publish import publish
from workbench.run import recording, ticket
from workbench.run.kernel import OwnKernel
from workbench.run.lab import Run
from workbench.serving import server

log = logging.getLogger(__name__)
INTERACTIVE = "interactive"  # tag of cells with widgets, which a replay leaves out


@dataclass(frozen=True)
class Notebook:
    """One notebook of the investigation. needs: notebooks without whose success it says nothing;
    measures: the experiment that it runs.
    """

    name: str
    needs: tuple[str, ...] = ()
    measures: str | None = None


_MEASURED = {experiment.notebook: name for name, experiment in EXPERIMENTS.items()}
# Those with a number, in its order; the last one publishes.
NOTEBOOKS = tuple(
    Notebook(path.stem, measures=_MEASURED.get(path.stem))
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
)


def missing(lab: Run) -> dict[str, dict[str, int]]:
    """{experiment: {arm: blocks that its plan has and the log has not}} of the experiments in the
    log that no rule of the plan ended, with the
    negative control where it was asked for; empty for a run that came to its end."""
    begun = {r.experiment for r in lab.records if isinstance(r, Block)}
    ended = {r.experiment for r in lab.records if isinstance(r, Finding) and r.name == STOPPED}
    plans_left = {
        name: lab.left(experiment.tasks(lab))
        for name, experiment in EXPERIMENTS.items()
        if name in begun - ended
    }
    found = {
        experiment: dict(Counter(task.planned.arm for _, task in left))
        for experiment, left in plans_left.items()
        if left
    }
    if controls := negative_control.missing(lab):
        found[NEGATIVE] = {arm.name: 1 for arm in controls}
    return found


def replay(lab: Run, *, resume: bool = False, skip: Collection[str] = ()) -> int:
    """Execute the notebooks into the run's folder; returns the exit status: 0 valid, 1 a notebook
    failed, 3 finished but not valid.

    resume: leave out notebooks that an earlier replay finished; blocks in the log are never
        measured again. Of a recording, notebooks whose experiment it does not hold are left out,
        and its verdict must be the recorded one (else 1).
    Raises: BadInput for an unknown notebook in skip, or when another replay is at work on the
        folder. KeyboardInterrupt when it is interrupted: verdict and report are then those of what
        was measured.
    """
    unknown = set(skip) - {notebook.name for notebook in NOTEBOOKS}
    if unknown:
        raise BadInput(
            "skip",
            f"{', '.join(sorted(unknown))} is no notebook",
            f"use one of {', '.join(n.name for n in NOTEBOOKS)}",
        )
    with ticket.Claim(lab.folder) as claim:
        chosen = [
            notebook
            for notebook in NOTEBOOKS
            if notebook.name not in skip and _applies(notebook, lab)
        ]
        try:
            if lab.recording:
                failed = _render(lab, chosen, resume)
            else:
                _ = lab.records  # a damaged log is told before SGLang is imported
                with server.imported_once(lab.profile):
                    failed = _notebooks(lab, claim, chosen, resume)
        except KeyboardInterrupt:
            lab.stopped("by hand")
            _published(lab)
            claim.ended(130)
            raise
        last = NOTEBOOKS[-1]  # it publishes, as its last act
        judged = _published(
            lab,
            (
                VerdictFile.load(lab.folder / "verdict.json")
                if last in chosen and last.name not in failed
                else None
            ),
        )
        moved = (
            list(recording.differences(recording.stored_verdict(lab.recording), judged))
            if lab.recording
            else []
        )
        for difference in moved:
            log.error("not the recorded verdict: %s", difference)
        status = 1 if failed or moved else told.exit_status(lab.verdict)
        claim.ended(status)
    return status


def _notebooks(
    lab: Run, claim: ticket.Claim, chosen: Sequence[Notebook], resume: bool
) -> list[str]:
    """Execute them in order; returns the names of those that failed or were left out. The others go
    on.
    """
    folder, failed = lab.folder / "notebooks", []
    folder.mkdir(parents=True, exist_ok=True)
    for number, notebook in enumerate(chosen, 1):
        output, place = (
            folder / f"{notebook.name}.ipynb",
            f"[{number}/{len(chosen)}] {notebook.name}",
        )
        claim.at(notebook.name, number, len(chosen))
        if set(notebook.needs) & set(failed):
            log.warning("%s is left out: it needs %s", place, ", ".join(notebook.needs))
            failed.append(notebook.name)
        elif resume and notebook is not NOTEBOOKS[-1] and finished(output):
            log.info("%s was finished before", place)
        else:
            log.info(
                "%s%s",
                place,
                plans.left_words(_left_s(lab, chosen[number - 1 :])).replace(
                    " left", " of measuring left at least"
                ),
            )
            if not _execute(notebook, lab, output):
                failed.append(notebook.name)
    return failed


def _render(lab: Run, chosen: Sequence[Notebook], resume: bool) -> list[str]:
    """The notebooks of a recording, a few at once since none adds to the log; returns the names of
    those that failed.
    """
    folder = lab.folder / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    before = [
        notebook
        for notebook in chosen
        if resume and notebook is not NOTEBOOKS[-1] and finished(folder / f"{notebook.name}.ipynb")
    ]
    if before:
        log.info("finished before: %s", ", ".join(notebook.name for notebook in before))
    chosen = [notebook for notebook in chosen if notebook not in before]
    log.info("%s", ", ".join(notebook.name for notebook in chosen))
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 4)) as pool:
        done = [
            pool.submit(_execute, notebook, lab, folder / f"{notebook.name}.ipynb")
            for notebook in chosen
        ]
        try:
            return [
                notebook.name for notebook, rendered in zip(chosen, done) if not rendered.result()
            ]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            _end_kernels()
            raise


def _applies(notebook: Notebook, lab: Run) -> bool:
    if lab.recording and notebook.measures and notebook.measures not in lab.provenance["blocks"]:
        log.info(
            "%s is left out: the recording holds no block of %s", notebook.name, notebook.measures
        )
        return False
    return True


def _left_s(lab: Run, notebooks: Sequence[Notebook]) -> float | None:
    """Seconds of measuring that are left in these notebooks, as far as their plans are decided;
    None before anything was measured.
    """
    if lab.recording:
        return None
    tasks = [
        task
        for notebook in notebooks
        if notebook.measures
        for _, task in lab.left(EXPERIMENTS[notebook.measures].tasks(lab))
    ]
    return (
        plans.left_s(
            lab.records, tasks, len({(task.group, plans.kind(lab.profile, task)) for task in tasks})
        )
        if tasks
        else None
    )


def _published(lab: Run, judged: VerdictFile | None = None) -> VerdictFile:
    judged = judged or publish(lab)
    log.info("%s", judged.sentence)
    log.info("report: %s", lab.folder / "report.html")
    return judged


def finished(output: Path) -> bool:
    """An executed notebook of which every code cell ran to its end (papermill says so in each
    cell's metadata).
    """
    try:
        cells = [
            cell for cell in nbformat.read(output, as_version=4).cells if cell.cell_type == "code"
        ]
    except (
        FileNotFoundError,
        nbformat.reader.NotJSONError,
    ):  # a replay that was killed may have left half a file
        return False
    return bool(cells) and all(
        cell.metadata.get("papermill", {}).get("status") == "completed" for cell in cells
    )


def batch(notebook: NotebookNode) -> NotebookNode:
    """The notebook without its interactive cells: widgets have no place where nobody clicks, and
    leave placeholders in what is kept.
    """
    kept = [cell for cell in notebook.cells if INTERACTIVE not in cell.metadata.get("tags", ())]
    return NotebookNode({**notebook, "cells": kept})


def _execute(notebook: Notebook, lab: Run, output: Path) -> bool:
    # A notebook that fails is kept, executed up to its error, by papermill itself. It runs in a
    # thread, since nbclient takes over the signals of the main one and then tells an interrupt as a
    # dead kernel.
    source = batch(nbformat.read(ROOT / "notebooks" / f"{notebook.name}.ipynb", as_version=4))
    parameters = {"profile": str(lab.folder / "profile.json"), "out": str(lab.folder)}
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(
            papermill.execute_notebook,
            source,
            output,
            parameters,
            kernel_name="python3",
            kernel_manager_class=OwnKernel,
            cwd=ROOT / "notebooks",
            progress_bar=False,
            log_output=True,
            request_save_on_cell_execute=True,
            extra_arguments=["--IPKernelApp.log_level=50"],
        )  # told to end, an idle kernel logs an error
        try:
            done.result()
        except PapermillExecutionError as error:
            log.error(
                "%s failed: %s: %s",
                notebook.name,
                error.ename,
                error.evalue.splitlines()[0] if error.evalue else "",
            )
            return False
        except DeadKernelError:
            log.error(
                "%s failed: its kernel was ended; what it had measured is kept, and --resume goes"
                " on from there",
                notebook.name,
            )
            return False
        # a kernel that does not come up (jupyter_client/client.py, _async_wait_for_ready)
        except RuntimeError as error:
            log.error(
                "%s failed: its kernel did not start or was ended while it did (%s); --resume goes"
                " on from there",
                notebook.name,
                error,
            )
            return False
        except KeyboardInterrupt:
            _end_kernels()
            raise
    return True


def _end_kernels() -> None:
    """The servers of a kernel end with it (workbench/serving/supervisor.py). That it died, which
    papermill tells as an error, is what was wanted.
    """
    logging.getLogger("papermill").disabled = True
    for child in psutil.Process().children():
        if "ipykernel" in " ".join(child.cmdline()):
            child.kill()
