"""Replay an investigation: every notebook in order through papermill, each kept as executed, and what the run is worth at the end."""
from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import workbench.light  # noqa: F401  (before papermill)
import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError

from workbench import recording, verdict
from workbench.errors import BadInput
from workbench.lab import Lab
from workbench.profile import ROOT
from workbench.publish import publish

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Notebook:
    """One notebook of the investigation. needs: notebooks without whose success it says nothing; measures: the experiment that it runs."""

    name: str
    needs: tuple[str, ...] = ()
    measures: str | None = None


NOTEBOOKS = (Notebook("01_probe"), Notebook("02_budget"), Notebook("03_baseline", measures="baseline"),
             Notebook("04_draft_tp", measures="draft_tp"), Notebook("07_cycle"), Notebook("08_report"))


def replay(lab: Lab, *, resume: bool = False, skip: Collection[str] = ()) -> int:
    """Execute the notebooks into the run's folder; returns the exit status: 0 valid, 1 a notebook failed, 3 finished but not valid.

    resume: leave out notebooks that an earlier replay finished; blocks in the log are never measured again. Of a recording those are left
    out whose experiment it does not hold, and its verdict must be the recorded one (else 1).
    Raises: BadInput for an unknown notebook in skip.
    """
    unknown = set(skip) - {notebook.name for notebook in NOTEBOOKS}
    if unknown:
        raise BadInput("skip", f"{', '.join(sorted(unknown))} is no notebook", f"use one of {', '.join(n.name for n in NOTEBOOKS)}")
    folder, failed = lab.folder / "notebooks", []
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [notebook for notebook in NOTEBOOKS if notebook.name not in skip and _applies(notebook, lab)]
    for number, notebook in enumerate(chosen, 1):
        output = folder / f"{notebook.name}.ipynb"
        if set(notebook.needs) & set(failed):
            log.warning("%s is left out: it needs %s", notebook.name, ", ".join(notebook.needs))
            failed.append(notebook.name)
        elif resume and notebook.name != "08_report" and finished(output):
            log.info("[%d/%d] %s was finished before", number, len(chosen), notebook.name)
        else:
            log.info("[%d/%d] %s", number, len(chosen), notebook.name)
            if not _execute(notebook, lab, output):
                failed.append(notebook.name)
    last = NOTEBOOKS[-1]            # it publishes, as its last act
    judged = json.loads((lab.folder / "verdict.json").read_text()) if last in chosen and last.name not in failed else publish(lab)
    log.info("%s", judged["sentence"])
    log.info("report: %s", lab.folder / "report.html")
    moved = list(recording.differences(recording.stored_verdict(lab.recording), judged)) if lab.recording else []
    for difference in moved:
        log.error("not the recorded verdict: %s", difference)
    return 1 if failed or moved else verdict.exit_status(lab.verdict)


def _applies(notebook: Notebook, lab: Lab) -> bool:
    if lab.recording and notebook.measures and notebook.measures not in lab.provenance["blocks"]:
        log.info("%s is left out: the recording holds no block of %s", notebook.name, notebook.measures)
        return False
    return True


def finished(output: Path) -> bool:
    """An executed notebook that ran to its end without an error (papermill says so in its metadata)."""
    if not output.exists():
        return False
    said = nbformat.read(output, as_version=4).metadata.get("papermill", {})
    return bool(said.get("end_time")) and not said.get("exception")


def _execute(notebook: Notebook, lab: Lab, output: Path) -> bool:
    # A notebook that fails is kept, executed up to its error, by papermill itself.
    parameters = {"profile": str(lab.folder / "profile.json"), "out": str(lab.folder)}
    try:
        papermill.execute_notebook(ROOT / "notebooks" / f"{notebook.name}.ipynb", output, parameters, kernel_name="python3",
                                   cwd=ROOT / "notebooks", progress_bar=False, log_output=True, request_save_on_cell_execute=True,
                                   extra_arguments=["--IPKernelApp.log_level=40"])
    except PapermillExecutionError as error:
        log.error("%s failed: %s: %s", notebook.name, error.ename, error.evalue.splitlines()[0] if error.evalue else "")
        return False
    return True
