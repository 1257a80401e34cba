"""What the panel shows, as HTML: checks, progress, the log, the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.experiment.checks import Check
from workbench.experiment.errors import WorkbenchError
from workbench.report import cells, chart_parts, log_tables, sweep_charts, tables
from workbench.serving import server_log

STYLE = """<style>
.dtw { overflow: hidden; max-width: 68em; padding: 6px 10px; }
.dtw .widget-html, .dtw .widget-html-content { width: auto; min-width: 0; margin: 2px;
  overflow-x: auto; }
.dtw .jupyter-widgets.widget-hbox { flex-flow: row wrap; overflow: visible; align-items: center; }
.dtw .widget-checkbox { margin: 0 18px 0 6px; }
.dtw table { border-collapse: collapse; font-size: 13px; line-height: 1.35; }
.dtw th, .dtw td { text-align: left !important; padding: 3px 14px 3px 0;
  border-bottom: 1px solid var(--jp-border-color2, #e1e5e9);
  vertical-align: top; }
.dtw pre { background: var(--jp-layout-color2, #f6f7f9); border-radius: 4px; padding: 6px 10px;
  font-size: 12px; line-height: 1.4; white-space: pre-wrap;
  word-break: normal; overflow-wrap: anywhere; max-height: 15em; overflow: auto; margin: 2px 0 8px;
  display: flex; flex-direction: column-reverse; /* a log is seen from its end */ }
.dtw .bad { color: #b3412a; font-weight: 600; } .dtw .good { color: #2f7d5d; font-weight: 600; }
.dtw .muted { color: var(--jp-ui-font-color2, #5c6773); font-size: 12px; line-height: 1.4; }
.dtw .said { font-size: 15px; line-height: 1.45; margin: 8px 0; max-width: 48em; }
.dtw svg { max-width: 100%; height: auto; background: #fff; }
</style>"""


ENDED = {
    0: "finished, valid",
    1: "a notebook failed",
    2: "the input was refused",
    3: "finished without a valid result",
    130: "stopped",
}


def checks_box(found: Sequence[Check]) -> str:
    """The preflight: what warns or refuses in sight, all of it a click away."""
    table, told = log_tables.checks(found), [check for check in found if check.status != "passed"]
    refused = sum(check.status == "refused" for check in found)
    word = (
        f"<span class='bad'>{refused} refused</span>"
        if refused
        else "<span class='good'>nothing refused</span>"
    )
    return (
        f"<b>Preflight:</b> {word}, {len(told) - refused} warned, {len(found) - len(told)}"
        f" passed{_table(table[table['status'] != 'passed']) if told else ''}<details><summary"
        f" class='muted'>every check</summary>{_table(table)}</details>"
    )


def narrowing_chart(asked: tuple[str, str, str], table: pd.DataFrame) -> str:
    experiment, a, b = asked
    return (
        f"<b>{escape(f'{a} ÷ {b} in {experiment}')}</b><div class='muted'>Dots are server starts,"
        " the line is their ratio so far, the band its interval, which pays for being looked"
        f" at.</div>{chart_parts.svg(sweep_charts.narrowing(table))}"
    )


def verdict_box(lab: Any) -> str:
    verdict = lab.verdict.file
    word = (
        "<span class='good'>Valid.</span>"
        if verdict.valid
        else "<span class='bad'>Not valid.</span>"
    )
    arms = _table(cells.shown(tables.arms(verdict, lab.profile.model_dump(mode="json"))))
    where = (
        f"report.html and verdict.json lie in {lab.folder.name}; in this notebook: out ="
        f' "../outputs/{lab.folder.name}"'
    )
    return (
        f"<div class='said'>{word}"
        f" {escape(verdict.sentence)}</div>{arms}<div"
        f" class='muted'>{escape(where)}</div>"
    )


def log_box(said: str, server: Path | None) -> str:
    """The end of what the replay said, and of the newest server's log."""
    own = "\n".join(server_log.clean(line) for line in said.splitlines()[-8:])
    served = "\n".join(server_log.tail(server, 12, 160)) if server else "no server was started yet"
    name = server.name if server else "server"
    return (
        f"<div class='muted'>replay</div><pre>{escape(own) or '…'}</pre><div"
        f" class='muted'>{escape(name)}</div><pre>{escape(served)}</pre>"
    )


def _table(frame: pd.DataFrame) -> str:
    """A table with every cell escaped."""
    return frame.to_html(index=False, border=0, escape=True, na_rep="")


def fault_box(error: WorkbenchError) -> str:
    return f"<span class='bad'>{escape(str(error))}</span>"


def newest_log(folder: Path) -> Path | None:
    return max((folder / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime, default=None)


def size_of(path: Path | None) -> int:
    return path.stat().st_size if path and path.exists() else -1


def as_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
