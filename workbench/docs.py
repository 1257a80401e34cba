"""The written pages, README.md and docs/*.md, made from docs/src/*.md.j2 and the recordings: no
figure of a run is typed by hand.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from workbench.answers import budget, cycle_check
from workbench.answers.figures import ABSENT, Figures, table
from workbench.experiment import profile
from workbench.experiment.profile_sections import ROOT
from workbench.predict import more_ranks
from workbench.run import recording

SOURCES = ROOT / "docs" / "src"
FAULTS = ROOT / "fixtures" / "faults.json"
_CYCLES = ("none", "shared", "own-1", "own-1+agreement=off")  # columns of the table of cycles
_CELLS = ("own-1", "own-2", "own-4")  # columns of the table of forecasts
# The faults were recorded when two processes had other names.
_NAMED = {"nursery": "fork server", "keeper": "supervisor"}


def pages() -> dict[str, Path]:
    """{name of a source: the page made from it}."""
    return {
        path.name.removesuffix(".md.j2"): (
            ROOT if path.name.startswith("README") else ROOT / "docs"
        )
        / path.name.removesuffix(".j2")
        for path in sorted(SOURCES.glob("*.md.j2"))
    }


def render(page: str, folder: Path = recording.FOLDER, faults: Path = FAULTS) -> str:
    """The text of a page. folder: recordings that the figures are taken from."""
    environment = Environment(
        loader=FileSystemLoader(SOURCES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    figures = Said(folder, faults)
    environment.globals |= {
        name: getattr(figures, name) for name in dir(Said) if not name.startswith("_")
    }
    return environment.get_template(f"{page}.md.j2").render()


def write() -> list[Path]:
    """Make every page; returns those that changed."""
    changed = stale()
    for page, path in pages().items():
        if path in changed:
            path.write_text(render(page))
    return changed


def stale() -> list[Path]:
    """The pages that are not what their source and the recordings give."""
    return [
        path
        for page, path in pages().items()
        if not path.exists() or path.read_text() != render(page)
    ]


class Said(Figures):
    """What a page may say: figures of runs, of predictions and of planted faults."""

    def __init__(self, folder: Path, faults: Path):
        super().__init__(folder)
        self._faults = faults

    def cycles_table(self) -> str:
        """Measured cycles and those predicted with nothing taken from the run."""
        rows = []
        for name, arms in self._cycles.groupby("run"):
            cells = {
                row["arm"]: (
                    f"{row['measured cycle (ms)']:.2f} → {row['model alone (ms)']:.2f},"
                    f" {row['off (%)']:+.0f} %"
                )
                for _, row in arms.iterrows()
            }
            rows.append((f"`{name}`", *(cells.get(arm, ABSENT) for arm in _CYCLES)))
        return table(("recording", *(f"`{arm}`" for arm in _CYCLES)), rows)

    def cycles_missed(self) -> dict[str, Any]:
        """Which cycles the model misses by more than it may, of how many, and how many pairs of
        arms it orders as measured.
        """
        shown = self._cycles
        over = shown[shown["off (%)"].abs() > cycle_check.ALLOWED]
        right, wrong = zip(*(self._ordered(name) for name in sorted(set(shown["run"]))))
        return {
            "allowed": f"{cycle_check.ALLOWED:g} %",
            "of": len(shown),
            "count": len(over),
            "where": [(row["run"], row["arm"]) for _, row in over.iterrows()],
            "ordered": sum(map(len, right)),
            "not_ordered": sum(map(len, wrong)),
        }

    def cycle_remark(self, name: str) -> str:
        """Where the model misses most in a run, in the words of 07_cycle."""
        return re.search(
            r"which it misses most, the (measured cycle has .+? against the model)",
            self._checked[1][name],
        )[1]

    def _ordered(self, name: str) -> tuple[list[str], list[str]]:
        run, verdict = self.run(name), self.verdict(name)
        return cycle_check.order(verdict, cycle_check.alone(run, verdict, budget.basis(run)))

    @cached_property
    def _checked(self) -> tuple[pd.DataFrame, dict[str, str]]:
        return cycle_check.recorded(self.folder)

    @cached_property
    def _cycles(self) -> pd.DataFrame:
        """The tiny pair's cycles are the host's alone and left out."""
        told = self._checked[0]
        of_gpus = told["run"].str.startswith("h200") & ~told["run"].str.contains("tiny")
        return told[of_gpus & told["arm"].isin(_CYCLES)]

    def forecast_table(self) -> str:
        """Tokens/s over shared on four and eight GPUs, for both heads and both ways between
        ranks.
        """
        rows = []
        for ranks in (4, 8):
            for path in ("", "-hostpath"):
                for head in ("full-head", "head-32000"):
                    name = f"h200-x{ranks}{path}"
                    cells = [self.forecast(name, head, arm) for arm in _CELLS]
                    rows.append((f"`{name}`, {head.replace('-', ' ')}", *cells))
        return table(("profile, head", *(f"`{arm}`" for arm in _CELLS)), rows)

    def forecast(self, name: str, head: str, arm: str) -> str:
        """One cell: with the host, and in brackets by the device's work alone."""
        if arm == f"own-{profile.load(name).tp}":
            return ABSENT
        row = self._forecasts(name, head).loc[arm]
        return f"{_between(row, 'with the host')} ({_between(row, '÷ shared')})"

    def forecast_end(self, name: str, head: str, arm: str, latencies: str) -> str:
        """How far one end of a forecast is from shared, in percent. latencies: measured or
        grown.
        """
        how = {"measured": more_ranks.LEAST, "grown": more_ranks.MOST}[latencies]
        row = self._forecasts(name, head).loc[arm]
        return f"{100 * abs(row[f'with the host, {how}'] - 1):.0f} %"

    def _forecasts(self, name: str, head: str) -> pd.DataFrame:
        measured = "h200-x2-hostpath-full-head" if "hostpath" in name else "h200-x2-full-head"
        chosen = profile.load(name, {"draft": f"fixtures/shapes/dense-7168/draft-{head}"})
        return more_ranks.table(chosen, budget.basis(self.run(measured))).set_index("arm")

    # -------------------------------------------------------------- faults

    def faults_table(self) -> str:
        """One row a fault that was planted, with what became of the run."""
        found = json.loads(self._faults.read_text())
        rows = []
        for row in found["faults"]:
            status = row["status"] if row["status"] >= 0 else f"signal {-row['status']}"
            rows.append(
                (
                    _named(row["fault"]),
                    _named(row["happens"]),
                    str(status),
                    f"{row['told_s']:.1f} s",
                    f"{row['gone_s']:.1f} s",
                    f"{row['kept']} of {row['of']} blocks",
                )
            )
        machine = found["machine"]
        return (
            table(
                (
                    "fault",
                    "what happens",
                    "exit status",
                    "command ended after",
                    "last process gone after",
                    "in the log by then",
                ),
                rows,
            )
            + f"\n\nMeasured on {found['time'][:10]} on {machine['cores']} cores"
            f" ({machine['processor']}), SGLang {found['sglang']}, workbench sources"
            f" {found['workbench_sources'][:12]}."
        )


def _between(row: pd.Series, kind: str) -> str:
    """A forecast between its two assumptions on latencies, the smaller first."""
    low, high = sorted(
        f"{row[f'{kind}, {how}']:.2f}" for how in (more_ranks.LEAST, more_ranks.MOST)
    )
    return low if low == high else f"{low} to {high}"


def _named(words: str) -> str:
    for old, new in _NAMED.items():
        words = words.replace(old, new)
    return words
