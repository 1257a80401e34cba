"""Two runs side by side: what differs in where they come from, and whether their results do. Pure,
from what two folders hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from workbench.judge import stats
from workbench.judge.stats import Interval
from workbench.judge.verdict_file import VerdictFile
from workbench.report import (
    cells,
    chart_parts,
    charts,
    cycle_charts,
    html,
    log_tables,
    report,
    tables,
)
from workbench.run import provenance

# What differs between any two runs and explains nothing comes last; a setting that differs explains
# most.
_LAST = ("command", "time", "workbench_commit", "workbench_sources", "workbench_changed")


@dataclass(frozen=True)
class Side:
    """One run: its name, its verdict, and its provenance.json and profile as plain data."""

    name: str
    verdict: VerdictFile
    provenance: Mapping[str, Any]
    profile: Mapping[str, Any]


def differences(a: Side, b: Side) -> pd.DataFrame:
    """One row a fact of provenance or setting that differs: what it is, and what it was in each run
    ("–" where it was not said).
    """
    rows = []
    for source, one, other in (
        ("setting", a.profile, b.profile),
        ("provenance", a.provenance, b.provenance),
    ):
        left, right = (
            dict(log_tables.provenance(facts).itertuples(index=False)) for facts in (one, other)
        )
        rows += [
            (
                fact,
                source,
                left.get(fact, cells.NOT_APPLICABLE),
                right.get(fact, cells.NOT_APPLICABLE),
            )
            for fact in dict.fromkeys([*left, *right])
            if left.get(fact) != right.get(fact)
        ]
    rows.sort(key=lambda row: row[0] in _LAST)
    return pd.DataFrame(rows, columns=["fact", "of", f"A: {a.name}", f"B: {b.name}"])


def compared(a: Side, b: Side) -> pd.DataFrame:
    """One row a comparison that either run made: its ratio in each, and the ratio of A's to B's
    with its interval where both have one.

    Ratios inside a run are free of what its machine or day did to all of its arms, so they can be
    held against each other; levels cannot.
    """
    left, right = (_ratios(run.verdict) for run in (a, b))
    claims = _claims(a.verdict) | _claims(b.verdict)
    rows = []
    for key in dict.fromkeys([*left, *right]):
        one, other = left.get(key), right.get(key)
        both = stats.ratio_of_ratios(one, other) if one and other else None
        rows.append(
            (
                *key,
                *(_three(one)),
                *(_three(other)),
                *(_three(both)),
                _told(key, left, both),
                key in claims,
            )
        )
    return pd.DataFrame(
        rows,
        columns=[
            "experiment",
            "comparison",
            "metric",
            "A",
            "A low",
            "A high",
            "B",
            "B low",
            "B high",
            "A ÷ B",
            "low",
            "high",
            "told",
            "claims",
        ],
    )


def sentence(a: Side, b: Side) -> str:
    """Whether the runs agree on the question, in one sentence."""
    rows = compared(a, b)
    here = rows[rows["claims"] & rows["A ÷ B"].notna()]
    headlines = [c for run in (a, b) for c in _headlines(run)]
    asked = (
        here[[key in headlines for key in zip(here["experiment"], here["comparison"])]]
        if headlines
        else here
    )
    if here.empty:
        return f"Nothing was compared with a result in both runs, {a.name} (A) and {b.name} (B)."
    row = (asked if len(asked) else here).iloc[0]
    said = (
        f"{row['comparison']} in {row['metric']} is {_interval(row, 'A')} in A and"
        f" {_interval(row, 'B')} in B; their ratio is"
        f" {row['A ÷ B']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    )
    others = [
        f"{name} ({experiment})"
        for experiment, name, told in zip(here["experiment"], here["comparison"], here["told"])
        if told == "differ" and (experiment, name) != (row["experiment"], row["comparison"])
    ]
    more = f" They differ in {', '.join(others)} too." if others else ""
    return (
        f"The runs {'differ' if row['told'] == 'differ' else 'cannot be told apart'}: {said}.{more}"
    )


def arms(a: Side, b: Side) -> pd.DataFrame:
    """One row an arm and run: the levels, which two machines or days do not share."""
    both = []
    for letter, run in (("A", a), ("B", b)):
        table = tables.arms(run.verdict, run.profile)
        both.append(table.assign(run=letter) if len(table) else table)
    rows = pd.concat(
        [table for table in both if len(table)] or [pd.DataFrame(columns=["arm", "run"])],
        ignore_index=True,
    )
    order = {name: place for place, name in enumerate(dict.fromkeys(rows["arm"]))}
    rows = rows.sort_values("arm", key=lambda names: names.map(order), kind="stable")
    return rows[
        ["arm", "run", *(column for column in rows.columns if column not in ("arm", "run"))]
    ]


def points(rows: pd.DataFrame) -> pd.DataFrame:
    """The ratios that carry the claims and that both runs have, for ``charts.two_runs``: one row a
    comparison and run.
    """
    here = rows[rows["claims"] & rows["A ÷ B"].notna()]
    label = here["comparison"]
    for column in ("metric", "experiment"):
        if here[column].nunique() > 1:
            label = label + ", " + here[column]
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "label": label,
                    "run": letter,
                    "ratio": here[letter],
                    "low": here[f"{letter} low"],
                    "high": here[f"{letter} high"],
                }
            )
            for letter in "AB"
        ],
        ignore_index=True,
    )


def _stages(a: Side, b: Side) -> pd.DataFrame:
    """Stage times of the arms that both runs have, A and B under each other."""
    left, right = (tables.stage_times(run.verdict) for run in (a, b))
    both = [arm for arm in dict.fromkeys(left["arm"]) if arm in set(right["arm"])]
    rows = [
        table[table["arm"] == arm].assign(arm=f"{arm}, {letter}")
        for arm in both
        for letter, table in (("A", left), ("B", right))
    ]
    return pd.concat(rows or [left.iloc[:0]], ignore_index=True)


def _ratios(verdict: VerdictFile) -> dict[tuple[str, str, str], Interval]:
    return {
        (row.experiment, row.comparison, row.metric): Interval(
            row.ratio, row.low, row.high, row.level, row.method, int(row.starts)
        )
        for row in tables.comparisons(verdict).rename(columns={"level (%)": "level"}).itertuples()
        if row.valid and not math.isnan(row.ratio) and row.low > 0
    }


def _claims(verdict: VerdictFile) -> set[tuple[str, str, str]]:
    rows = tables.comparisons(verdict)
    claims = rows[rows["claims"].astype(bool)]
    return set(zip(claims["experiment"], claims["comparison"], claims["metric"]))


def _headlines(run: Side) -> list[tuple[str, str]]:
    """The project's question as this run answered it first: own-N against shared at the profile's
    setting.
    """
    rows = tables.comparisons(run.verdict)
    plain = rows[rows["comparison"].str.fullmatch(r"own-\d+ ÷ shared") & rows["valid"]]
    return list(zip(plain["experiment"], plain["comparison"]))[:1]


def _told(key: tuple, left: Mapping, both: Interval | None) -> str:
    if both is None:
        return "in A alone" if key in left else "in B alone"
    return "differ" if both.decided else "cannot be told apart"


def _three(found: Interval | None) -> tuple[float, float, float]:
    return (found.ratio, found.low, found.high) if found else (math.nan,) * 3


def _interval(row: Mapping[str, Any], letter: str) -> str:
    return f"{row[letter]:.3f} ({row[f'{letter} low']:.3f} to {row[f'{letter} high']:.3f})"


def shown(rows: pd.DataFrame) -> pd.DataFrame:
    """``compared`` for people: each ratio with its interval in one cell; the experiment where there
    are several.
    """

    def cell(row: Mapping[str, Any], value: str, low: str, high: str) -> str:
        return (
            cells.NOT_APPLICABLE
            if math.isnan(row[value])
            else f"{row[value]:.3f} ({row[low]:.3f} to {row[high]:.3f})"
        )

    told = [
        (
            row["comparison"],
            row["metric"],
            cell(row, "A", "A low", "A high"),
            cell(row, "B", "B low", "B high"),
            cell(row, "A ÷ B", "low", "high"),
            row["told"],
            row["experiment"],
        )
        for row in rows.to_dict("records")
    ]
    table = pd.DataFrame(
        told,
        columns=["comparison", "metric", "ratio in A", "ratio in B", "A ÷ B", "told", "experiment"],
    )
    return table if rows["experiment"].nunique() > 1 else table.drop(columns="experiment")


def render(a: Side, b: Side) -> str:
    """Both runs as one HTML page, in the manner of the report of one."""
    rows, runs = compared(a, b), {"A": a, "B": b}
    drawn = points(rows)
    figures = (
        [
            html.figure(
                "Ratios in both runs",
                "Each pair of intervals is one comparison, as each run made it. The dashed line "
                "is no difference.",
                lambda width: charts.two_runs(drawn, width),
            )
        ]
        if len(drawn)
        else []
    )
    stages = _stages(a, b)
    if len(stages):
        figures.append(
            html.figure(
                "Where a cycle’s time goes in both runs",
                "Measured inside the server, by stage; a stage that is not shown was not measured.",
                lambda width: cycle_charts.stage_times(stages, width),
            )
        )
    names = dict.fromkeys([*a.verdict.arms, *b.verdict.arms])
    return html.render(
        "versus.html.j2",
        a=a,
        b=b,
        question=report.QUESTION,
        sentence=sentence(a, b),
        labelled=[
            (letter, report.labels(run.verdict, run.provenance, run.profile))
            for letter, run in runs.items()
        ],
        origins={
            letter: provenance.sentence(run.provenance).replace("Recorded on", "Measured on")
            for letter, run in runs.items()
        },
        differences=html.table(differences(a, b)),
        comparisons=html.table(shown(rows)),
        figures=figures,
        arms=html.table(arms(a, b)),
        colours=chart_parts.palette(list(names)),
        files=[
            html.download(
                f"{letter}-{kind}.json",
                f"{kind} of {run.name}",
                json.dumps(content, indent=1, default=str).encode(),
            )
            for letter, run in runs.items()
            for kind, content in (
                ("verdict", run.verdict.to_json()),
                ("provenance", run.provenance),
                ("profile", run.profile),
            )
        ],
    )
