"""The panel of an interactive notebook: choose a run, start it as a process of its own, watch it,
stop it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from workbench.experiment import plans
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput, WorkbenchError
from workbench.experiment.profile import Profile, available, load
from workbench.experiment.profile_sections import ROOT
from workbench.judge import narrowing
from workbench.panel_html import (
    ENDED,
    STYLE,
    as_yaml,
    checks_box,
    fault_box,
    log_box,
    narrowing_chart,
    newest_log,
    size_of,
    verdict_box,
)
from workbench.predict import preflight
from workbench.replay import NOTEBOOKS
from workbench.run import ticket as tickets
from workbench.run.lab import reopen

EVERY_S = 1.0  # between two looks at the run's folder


def show(
    profile: str | Path = "cpu-tiny",
    out: str | Path = "../outputs/notebook",
    notebook: str | None = None,
) -> Panel:
    """The panel, for a notebook's last line; arguments as of ``Panel``."""
    return Panel(profile, out, notebook)


class Panel:
    """The panel. profile: chosen at first; out: any folder beside which runs have theirs; notebook:
    the one to run, None for all of them.

    A run is a detached ``workbench replay``: it outlives the tab and the kernel. The panel follows
    the folder of the one that is at work, whoever started it, and starts none beside it. view: the
    widget; a panel that is shown last in a cell shows it.
    """

    _watcher: asyncio.Task | None = None  # of the kernel's newest panel; an older one stands still

    def __init__(
        self,
        profile: str | Path = "cpu-tiny",
        out: str | Path = "../outputs/notebook",
        notebook: str | None = None,
    ):
        self.outputs, self.notebook = Path(out).resolve().parent, notebook
        self.folder: Path | None = None
        self._seen: tuple = ()
        self._shown: Path | None = None
        names = dict.fromkeys([str(profile), *available()])
        self.profile = widgets.Dropdown(
            options=[(Path(name).stem, name) for name in names],
            value=str(profile),
            description="profile",
        )
        self.arms = widgets.HBox()
        short = {"layout": widgets.Layout(width="160px")}
        self.pairs = widgets.BoundedIntText(min=1, max=1000, description="pairs", **short)
        self.starts = widgets.BoundedIntText(min=1, max=100, description="starts", **short)
        self.budget = widgets.BoundedFloatText(
            value=0,
            min=0,
            max=1e6,
            description="budget (s)",
            tooltip="no further round after so many seconds; 0: no limit",
            **short,
        )
        self.decided = widgets.Checkbox(
            description="stop when decided", indent=False, layout=widgets.Layout(width="auto")
        )
        self.scope = widgets.Dropdown(
            options=[("this notebook", notebook)] * bool(notebook)
            + [("the whole investigation", None)],
            description="run",
        )
        self.check, self.start, self.stop = (
            widgets.Button(description=d, tooltip=t, button_style=s)
            for d, t, s in (
                ("Check", "what can be known before a server is started", ""),
                ("Start", "start the run as a process of its own", "primary"),
                ("Stop now", "stop the run; what is measured is kept and judged", "danger"),
            )
        )
        self.state, self.checks, self.chart, self.log, self.result = (
            widgets.HTML() for _ in range(5)
        )
        self.bar = widgets.IntProgress(min=0, max=1, layout=widgets.Layout(width="100%"))
        self.view = widgets.VBox(
            [
                widgets.HTML(STYLE),
                widgets.HBox([self.profile, self.scope]),
                self.arms,
                widgets.HBox([self.pairs, self.starts, self.budget, self.decided]),
                widgets.HBox([self.check, self.start, self.stop]),
                self.state,
                self.bar,
                self.checks,
                self.chart,
                self.result,
                self.log,
            ]
        )
        self.view.add_class("dtw")
        self.profile.observe(lambda _: self._chosen(), "value")
        self.check.on_click(lambda _: self._say_checks())
        self.start.on_click(lambda _: self.begin())
        self.stop.on_click(lambda _: self.end())
        self._chosen()
        self.folder = tickets.alive(self.outputs)
        self.refresh()
        if Panel._watcher:
            Panel._watcher.cancel()
        try:
            Panel._watcher = asyncio.get_running_loop().create_task(self._watch())
        except RuntimeError:  # no loop: a script or a test refreshes by itself
            Panel._watcher = None

    def _ipython_display_(self) -> None:
        display(self.view)

    # ------------------------------------------------------------------ what is chosen

    @property
    def changes(self) -> dict[str, Any]:
        """What the widgets change in the profile."""
        arms = [box.description for box in self.arms.children if box.value]
        return {
            "arms": arms,
            "pairs": self.pairs.value,
            "starts": self.starts.value,
            "stop": self.decided.value,
            **({"budget_s": self.budget.value} if self.budget.value else {}),
        }

    def chosen(self) -> Profile:
        """Raises: BadInput for what cannot be run."""
        if not self.changes["arms"]:
            raise BadInput("plan.arms", "is empty", "tick an arm")
        return load(self.profile.value, self.changes)

    def _chosen(self) -> None:
        """Put a profile's own values into the widgets."""
        try:
            self._put(load(self.profile.value))
            self.checks.value = ""
        except BadInput as error:
            self.checks.value = fault_box(error)

    def _put(self, profile: Profile) -> None:
        sizes = [n for n in range(1, profile.tp) if profile.tp % n == 0]
        names = dict.fromkeys([*profile.plan.arms, "none", "shared", *(f"own-{n}" for n in sizes)])
        order = {"none": 0, "shared": 1}
        as_wide = {"indent": False, "layout": widgets.Layout(width="auto")}
        self.arms.children = [
            widgets.Checkbox(value=name in profile.plan.arms, description=name, **as_wide)
            for name in sorted(names, key=lambda name: order.get(Arm.parse(name).placement, 2))
        ]
        self.pairs.value, self.starts.value = profile.plan.pairs, profile.plan.starts
        self.budget.value, self.decided.value = profile.plan.budget_s or 0, profile.plan.stop

    def _say_checks(self) -> bool:
        """Show the preflight; whether it refuses nothing."""
        try:
            found = preflight.check(self.chosen())
        except BadInput as error:
            self.checks.value = fault_box(error)
            return False
        self.checks.value = checks_box(found)
        return all(check.status != "refused" for check in found)

    # ------------------------------------------------------------------ start, stop

    def begin(self) -> Path | None:
        """Start a run, unless one is at work under these outputs, which is followed instead;
        returns the folder of what is followed.
        """
        if not self._say_checks():
            return None
        with tickets.one_at_a_time(self.outputs):
            there = tickets.alive(self.outputs)
            self.folder = there or self._launch()
        # Nothing of the run before.
        self._seen, self.chart.value, self.result.value, self.log.value = (), "", "", ""
        self.refresh()
        return self.folder

    def _launch(self) -> Path:
        name = Path(self.profile.value).stem
        folder = self.outputs / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        folder.mkdir(parents=True)
        changes = [
            word
            for key, value in self.changes.items()
            for word in ("-p", f"{key}={as_yaml(value)}")
        ]
        skipped = [
            word
            for n in NOTEBOOKS
            if self.scope.value not in (None, n.name)
            for word in ("--skip", n.name)
        ]
        with open(folder / tickets.LOG, "wb") as said:
            # A session of its own: it ends neither with the kernel nor with the terminal of
            # JupyterLab.
            process = subprocess.Popen(
                self.command(folder, changes + skipped),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
            )
        tickets.write(folder, tickets.of_process(process.pid))
        return folder

    def command(self, folder: Path, options: Sequence[str]) -> list[str]:
        return [
            sys.executable,
            "-u",
            "-m",
            "workbench.cli",
            "replay",
            self.profile.value,
            "--out",
            str(folder),
            *options,
        ]

    def end(self) -> None:
        """Stop the run that is followed; what it measured is kept, judged and reported by the run
        itself.
        """
        if self.folder and (ticket := tickets.read(self.folder)) and ticket.alive:
            os.kill(ticket.pid, signal.SIGTERM)
            self.state.value = "<b>Stopping…</b> what is measured is kept"
            self.stop.disabled = True

    # ------------------------------------------------------------------ watch

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.refresh()
            except Exception as error:  # a torn read of a file under work: the next look tells
                self.state.value = (
                    f"<span class='muted'>{escape(type(error).__name__)}:"
                    f" {escape(str(error))}</span>"
                )

    def refresh(self) -> None:
        """Show what the folder of the followed run holds now."""
        self.folder = self.folder or tickets.alive(self.outputs)
        ticket = tickets.read(self.folder) if self.folder else None
        alive = bool(ticket and ticket.alive)
        self.start.disabled, self.stop.disabled = alive, not alive
        if ticket is None:
            self.state.value = "<span class='muted'>No run is at work.</span>"
            return
        seen = (
            ticket,
            alive,
            *(size_of(self.folder / name) for name in ("runs.jsonl", tickets.LOG)),
            tickets.progress(self.folder),
            size_of(newest_log(self.folder)),
        )
        if seen == self._seen:
            return
        self._seen = seen
        said = (
            (self.folder / tickets.LOG).read_text(errors="replace")
            if (self.folder / tickets.LOG).exists()
            else ""
        )
        self._show_progress(ticket, alive, tickets.progress(self.folder))
        self.log.value = log_box(said, newest_log(self.folder))
        if (self.folder / "profile.json").exists():
            self._show_measured(alive)

    def _show_progress(
        self, ticket: tickets.Ticket, alive: bool, at: tickets.Progress | None
    ) -> None:
        if alive:
            where = (
                f"{ticket.notebook} ({ticket.place} of {ticket.of})"
                if ticket.notebook
                else "starting"
            )
            block = (
                f", block {at.block} of {at.of} on {at.arm}" + plans.left_words(at.left_s)
                if at
                else ""
            )
            self.state.value = (
                f"<b>Running</b> {escape(self.folder.name)}: {escape(where)}{escape(block)}"
            )
        else:
            how = ENDED.get(ticket.ended, "it died; start it again from a terminal with --resume")
            self.state.value = f"<b>Ended</b> {escape(self.folder.name)}: {escape(how)}"
        self.bar.max, self.bar.value = (at.of, at.block - alive) if at else (1, 0)
        self.bar.bar_style = (
            "" if alive else {0: "success", 130: "warning"}.get(ticket.ended, "danger")
        )

    def _show_measured(self, alive: bool) -> None:
        try:
            lab = reopen(self.folder)
            if self._shown != self.folder:  # a run that was found shows what it was started with
                self._put(lab.profile)
                self._shown = self.folder
            table, asked = (
                narrowing.narrowing(lab.profile, lab.records, alive),
                narrowing.question(lab.records),
            )
            if alive and asked and table["low"].notna().any():
                tickets.tell_seen(self.folder, tickets.Seen(asked[0], len(table)))
        except WorkbenchError as error:
            self.chart.value = fault_box(error)
            return
        self.chart.value = narrowing_chart(asked, table) if asked else ""
        self.result.value = (
            verdict_box(lab) if not alive and (self.folder / "verdict.json").exists() else ""
        )
