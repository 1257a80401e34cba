"""Tables of a run's log: blocks, failures, findings, checks and starts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from workbench.experiment.checks import Check
from workbench.experiment.runlog import Block, Failure, Finding, Line, Start
from workbench.judge.verdict_file import VerdictFile
from workbench.report.cells import flat

MAX_ROWS = 5_000


MAX_DATA = 500  # characters of a finding's data that are shown


def measured(records: Sequence[Line]) -> list[Block]:
    """The blocks that count for comparisons, in the order of the log."""
    return [r for r in records if isinstance(r, Block) and r.role == "measure"]


def blocks(records: Sequence[Line]) -> pd.DataFrame:
    """One row a measured block: completion tokens of all its requests over the block's seconds,
    first sent to last ended.
    """
    rows = [
        (
            b.experiment,
            b.arm,
            b.start,
            b.pair,
            sum(r.completion_tokens for r in b.requests),
            b.seconds,
            1,
        )
        for b in measured(records)
    ]
    table = pd.DataFrame(
        rows, columns=["experiment", "arm", "start", "pair", "tokens", "time (s)", "blocks"]
    )
    return _with_throughput(table.astype({"pair": "Int64"}))


def thinned(table: pd.DataFrame, limit: int = MAX_ROWS) -> pd.DataFrame:
    """``blocks`` in at most ``limit`` rows: neighbouring blocks of one arm and start are added up,
    "blocks" says how many.

    Raises: ValueError when there are as many arms as rows allowed.
    """
    if len(table) <= limit:
        return table
    keys = (
        ["experiment", "arm", "start"]
        if table.groupby(["experiment", "arm", "start"]).ngroups < limit
        else ["experiment", "arm"]
    )
    room = (
        limit - table.groupby(keys).ngroups
    )  # each group's last bin may be part full: one row more a group
    if room < 1:
        raise ValueError(
            f"{len(table)} blocks cannot be shown in {limit} rows: they are of too many arms"
        )
    table = table.sort_values([*keys, "pair"], kind="stable")
    neighbours = table.groupby(keys).cumcount() // math.ceil(len(table) / room)
    summed = ("tokens", "time (s)", "blocks")
    merged = table.groupby([*keys, neighbours.rename("bin")]).agg(
        {c: "sum" if c in summed else "first" for c in table if c not in keys}
    )
    return _with_throughput(merged.reset_index().drop(columns="bin"))


def output(verdict: VerdictFile, arm: str) -> str:
    """Whether an arm's answers are none's, and where some are not, how many: also where the verdict
    puts them down to chance.
    """
    counts = [c for c in verdict.parity_counts if c.arm == arm]
    result = verdict.parity.get(arm, "not checked")
    differ = sum(c.mismatched or 0 for c in counts)
    if not differ:
        return result
    return f"{differ} of {sum(c.compared or 0 for c in counts)} differ" + (
        ", as often as chance allows" if result == "identical" else ""
    )


def failures(records: Sequence[Line]) -> pd.DataFrame:
    """One row for each thing that was to be measured and was not, requests that ended in an error
    included.
    """
    rows = [
        (r.experiment, r.arm, r.what, r.reason, "\n".join(r.log_tail))
        for r in records
        if isinstance(r, Failure)
    ]
    rows += [
        (b.experiment, b.arm, "request", f"{r.prompt}: {r.error}", "")
        for b in records
        if isinstance(b, Block)
        for r in b.requests
        if r.error
    ]
    return pd.DataFrame(rows, columns=["experiment", "arm", "what", "reason", "end of the log"])


def findings(records: Sequence[Line]) -> pd.DataFrame:
    """One row a named answer of a notebook; of two with one name the later. Data of many values
    stay in the log.
    """
    latest = {(r.experiment, r.name): r.value for r in records if isinstance(r, Finding)}
    words = {
        key: value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in latest.items()
    }
    rows = [
        (
            *key,
            (
                said
                if isinstance(latest[key], str) or len(said) <= MAX_DATA
                else "data, in runs.jsonl"
            ),
        )
        for key, said in words.items()
    ]
    return pd.DataFrame(rows, columns=["experiment", "finding", "value"])


def checks(found: Sequence[Check]) -> pd.DataFrame:
    """One row a check of the preflight."""
    return pd.DataFrame(
        [vars(check) for check in found], columns=["name", "status", "detail", "mend"]
    )


def starts(records: Sequence[Line]) -> list[Start]:
    """The first start of each experiment and set of arms: the later ones differ in port and time
    only.
    """
    first: dict[tuple, Start] = {}
    for record in records:
        if isinstance(record, Start):
            first.setdefault((record.experiment, record.arms), record)
    return list(first.values())


def provenance(facts: Mapping[str, Any]) -> pd.DataFrame:
    """One row a fact, nested ones by their dotted path."""
    return pd.DataFrame(list(flat(facts)), columns=["fact", "value"])


def _with_throughput(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(
        **{
            "throughput (tokens/s)": (
                table["tokens"] / table["time (s)"].where(table["time (s)"] > 0)
            )
        }
    )
