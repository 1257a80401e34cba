"""The report: a run's verdict, records and provenance as one HTML file that opens with no network
and runs no script.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import yaml

from workbench.experiment.runlog import Block, Finding, Line
from workbench.experiment.sweeps import COLLECTIVES, is_sweep
from workbench.report import charts, html, tables
from workbench.report.html import Download, Figure, Table
from workbench.run.provenance import sentence as origin

QUESTION = "Is the draft’s tensor parallelism what makes EAGLE-3 slow?"
DATA_LIMIT = 20_000_000  # bytes of raw data inside the file; browsers and mail get slow beyond


def render(
    verdict: Mapping[str, Any],
    records: Sequence[Line],
    provenance: Mapping[str, Any],
    profile: Mapping[str, Any],
    cycles: pd.DataFrame | None = None,
    sweep_map: pd.DataFrame | None = None,
) -> str:
    """The report of one run as HTML text.

    verdict: the content of verdict.json; any number in it may be missing (shown as "unknown").
    records: of runs.jsonl.
    provenance: of provenance.json; "command" (text or a list) is the command that made the run,
        "recording" the name of a recorded one, both optional.
    profile: ``Profile.model_dump()``.
    cycles: stages measured and predicted (``cycle_check.bars``).
    sweep_map: the candidates of the search over steps (``steps.sweep_map``).
    """
    refusals = tables.refusals(verdict)
    main, swept = (
        _part(verdict, lambda experiment: not is_sweep(experiment)),
        _part(verdict, is_sweep),
    )
    if not main["arms"]:
        main, swept = verdict, {}  # a run of sweeps alone, or of nothing
    comparisons, controls = tables.comparisons(main), tables.controls(main)
    everyone = list(verdict.get("arms") or {})  # an arm has one colour in the whole page
    files, left_out = downloads(verdict, records, provenance, profile)
    return html.render(
        "report.html.j2",
        question=QUESTION,
        sentence=verdict.get("sentence") or "No verdict was stated.",
        valid=bool(verdict.get("valid")),
        name=verdict.get("profile") or tables.UNKNOWN,
        labels=labels(verdict, provenance, profile),
        about=profile.get("about", ""),
        recorded=(
            f"{origin(provenance)} Nothing was measured for this page."
            if verdict.get("source") == "recorded"
            else ""
        ),
        arms=html.table(tables.arms(main, profile)),
        colours=charts.palette(everyone),
        sweeps=sweeps(swept, records, profile, sweep_map) if swept else None,
        conditions=conditions(records, profile),
        costs=costs(comparisons, profile),
        comparisons=html.table(_ratios(comparisons, controls)),
        notes=verdict.get("notes") or [],
        parity=html.table(tables.parity(verdict)),
        reasons=refusals["reason"].tolist(),
        refusals=html.table(refusals),
        figures=[*figures(main, records, everyone), *_cycles(cycles)],
        failures=html.table(tables.failures(records)),
        findings=html.table(tables.findings(records)),
        provenance=html.table(tables.provenance(provenance)),
        commands=commands(verdict, records, provenance),
        files=files,
        left_out=left_out,
    )


def labels(
    verdict: Mapping[str, Any], provenance: Mapping[str, Any], profile: Mapping[str, Any]
) -> list[str]:
    """What a reader must know before any number: which engine, live or recorded, and whether it
    stands for something else.
    """
    name = str(verdict.get("profile") or profile.get("name") or tables.UNKNOWN)
    found = {"cpu": ["CPU engine: proves function, never speed"], "cuda": ["GPU"]}.get(
        verdict.get("engine"), ["engine unknown"]
    )
    found += (
        ["accept length simulated"]
        if any(f.get("accept_simulated") for f in (verdict.get("arms") or {}).values())
        else []
    )
    recording = f"recorded: {provenance.get('recording') or name.removeprefix('recorded:')}"
    found += [
        {"live": "live run", "recorded": recording}.get(
            verdict.get("source"), "live or recorded unknown"
        )
    ]
    about = str(profile.get("about", "")).lower()
    return found + [
        word for sign, word in (("simulat", "simulated"), ("stand-in", "stand-in")) if sign in about
    ]


def conditions(records: Sequence[Line], profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The setting beside any speed-up: pair, ranks, how it drafts, load and prompts; from the
    blocks where they say it.
    """
    pair, work, plan = (profile.get(section) or {} for section in ("pair", "workload", "plan"))
    blocks = tables.measured(records)
    load = ", ".join(
        map(
            str,
            sorted({b.concurrency for b in blocks} or {work.get("concurrency", tables.UNKNOWN)}),
        )
    )
    prompts = ", ".join(sorted({b.prompts_from for b in blocks})) or tables.UNKNOWN
    return [
        ("target", str(pair.get("target", tables.UNKNOWN))),
        ("draft", str(pair.get("draft", tables.UNKNOWN))),
        ("target TP", f"{tables.decimal(profile.get('tp'))} ranks{_spread(profile)}"),
        ("drafting", tables.drafting(None, profile)),
        ("requests at once", load),
        ("requests a block", tables.decimal(work.get("requests_per_block"))),
        ("new tokens a request", f"at most {tables.decimal(work.get('max_new_tokens'))}"),
        ("prompts", prompts),
        ("blocks measured", f"{len(blocks)} in {len({b.start for b in blocks})} server starts"),
        ("seed", tables.decimal(plan.get("seed"))),
    ]


def _spread(profile: Mapping[str, Any]) -> str:
    names = [str(node.get("name")) for node in profile.get("nodes") or ()]
    return f" on {len(names)} nodes ({', '.join(names)})" if len(names) > 1 else ""


def costs(comparisons: pd.DataFrame, profile: Mapping[str, Any]) -> list[str]:
    """What the resolution that the plan wishes for would take, a sentence a comparison; none
    without such a wish.
    """
    wished = tables.decimal(100 * tables.number((profile.get("plan") or {}).get("resolution")))
    return [
        f"{row['comparison']}, {row['metric']}: a resolution of {wished} % takes"
        f" {row['wanted']:.0f}"
        f" {'pairs of blocks' if row['method'] == 'paired' else 'starts a side'} in all,"
        f" {row['wanted (s)']:.0f} s more than this run."
        for row in comparisons.dropna(subset=["wanted", "wanted (s)"]).to_dict("records")
    ]


@dataclass(frozen=True)
class Sweeps:
    """What 05_steps and 06_collectives found, for a section of its own."""

    arms: Table
    comparisons: Table
    settings: Table
    figures: tuple[Figure, ...]


def sweeps(
    verdict: Mapping[str, Any],
    records: Sequence[Line],
    profile: Mapping[str, Any],
    searched: pd.DataFrame | None = None,
) -> Sweeps | None:
    """The section on the sweeps; None without any. verdict: the part of it that is theirs."""
    comparisons, controls, found = tables.comparisons(verdict), tables.controls(verdict), []
    if searched is not None and searched[tables.SPEED].notna().any():
        found.append(
            html.figure(
                "Search over draft steps",
                "Speed of every candidate as a share of the best one’s, and in brackets how many"
                " pairs of blocks it was given: the search halves the field. The best of many looks"
                " better than it is; what it gains is told by fresh blocks, below.",
                lambda width: charts.sweep_map(searched, width),
            )
        )
    loads = tables.load_table(comparisons)
    if len(loads):
        found.append(
            html.figure(
                "The best settings by requests at once",
                "Each point is a ratio of throughput with its interval; where a line "
                "crosses 1 the other arm takes over.",
                lambda width: charts.by_load(loads, width),
            )
        )
    collectives = comparisons["experiment"] == COLLECTIVES
    for (metric, method), rows in comparisons[collectives].groupby(
        ["metric", "method"], sort=False
    ):
        if rows["ratio"].notna().any():
            control = controls[
                (controls["experiment"] == COLLECTIVES)
                & (controls["metric"] == metric)
                & (controls["method"] == method)
            ]
            found.append(
                _forest(
                    str(metric), str(method), rows, control, "Settings of the communication layer: "
                )
            )
    kept = next(
        (
            r.value
            for r in reversed(records)
            if isinstance(r, Finding) and (r.experiment, r.name) == (COLLECTIVES, "settings")
        ),
        [],
    )
    arms = tables.arms(verdict, profile)
    if arms.empty and not found and not kept:
        return None
    return Sweeps(
        html.table(arms),
        html.table(_ratios(comparisons, controls)),
        html.table(pd.DataFrame(kept)),
        tuple(found),
    )


def _part(verdict: Mapping[str, Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The verdict's arms, comparisons and controls of some experiments; what names none counts as
    theirs that are no sweeps.
    """

    def theirs(items: Any) -> list:
        return [item for item in items or [] if wanted(item.get("experiment") or "")]

    control = verdict.get("control") or {}
    return {
        **verdict,
        "arms": {
            name: facts
            for name, facts in (verdict.get("arms") or {}).items()
            if wanted(facts.get("experiment") or "")
        },
        "comparisons": theirs(verdict.get("comparisons")),
        "control": control if wanted(control.get("experiment") or "") else {},
        **({"controls": theirs(verdict["controls"])} if verdict.get("controls") else {}),
    }


def _cycles(bars: pd.DataFrame | None) -> Iterator[Figure]:
    if bars is not None and bars["time (ms/cycle)"].notna().any():
        yield html.figure(
            "Cycles measured and predicted",
            "The stages of a cycle as measured inside the server, beside what the model of"
            " 02_budget predicts from this machine’s inputs.",
            lambda width: charts.stage_times(bars, width),
        )


def figures(
    verdict: Mapping[str, Any], records: Sequence[Line], everyone: Sequence[str] = ()
) -> Iterator[Figure]:
    """Every chart that this run has numbers for, in the order of the argument: how much, how sure,
    and why.

    everyone: the arms of the whole page, by which an arm has its colour.
    """
    blocks = tables.with_result(tables.blocks(records), verdict)
    blocks = blocks.loc[[not is_sweep(experiment) for experiment in blocks["experiment"]]]
    arms = list(everyone or dict.fromkeys([*(verdict.get("arms") or {}), *blocks["arm"]]))
    comparisons, controls = tables.comparisons(verdict), tables.controls(verdict)
    for (metric, method), rows in comparisons.groupby(["metric", "method"], sort=False):
        control = controls[(controls["metric"] == metric) & (controls["method"] == method)]
        if rows["ratio"].notna().any() or control["ratio"].notna().any():
            yield _forest(str(metric), str(method), rows, control)
    for experiment, part in blocks.groupby("experiment", sort=False):
        yield from _throughput(str(experiment), part, arms)
    positions = tables.accept_by_position(verdict)
    if positions["accepted (% of cycles)"].notna().any():
        yield html.figure(
            "Accepted drafts by position",
            "Share of all cycles in which the draft token at this position was accepted, with its "
            "interval. The shares of an arm and the bonus token add up to its accept length.",
            lambda width: charts.accept_by_position(positions, arms, width),
        )
    collectives, stages = tables.collectives(verdict), tables.stage_times(verdict)
    if len(collectives):
        yield html.figure(
            "Collectives a cycle",
            "Counted inside the server on rank 0, by stage of the cycle.",
            lambda width: charts.collectives(collectives, arms, width),
        )
    if stages["time (ms/cycle)"].notna().any():
        yield html.figure(
            "Where a cycle’s time goes",
            "Measured inside the server, by stage; a stage that is not shown was not measured.",
            lambda width: charts.stage_times(stages, width),
        )


def commands(
    verdict: Mapping[str, Any], records: Sequence[Line], provenance: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What to type to repeat the run, and what each server was started with: (about, command)."""
    found = [
        (
            "This run’s setting, every field of it, is in profile.yaml below",
            "workbench replay profile.yaml",
        )
    ]
    if name := provenance.get("recording"):
        found = [("Replay the recording", f"workbench replay recorded:{shlex.quote(str(name))}")]
    if own := provenance.get("command"):
        found.insert(
            0,
            (
                "The command that measured this run",
                own if isinstance(own, str) else shlex.join(map(str, own)),
            ),
        )
    servers: dict[str, list[str]] = {}
    for start in tables.starts(records):
        about = f"{', '.join(start.arms)} ({start.experiment})"
        for part, where in (
            (start, ""),
            *((part, f", its part on {part.name}") for part in start.further),
        ):
            environment = " ".join(
                f"{key}={shlex.quote(value)}" for key, value in part.environment.items()
            )
            servers.setdefault(f"{environment} {shlex.join(part.command)}".strip(), []).append(
                about + where
            )
    return found + [
        (f"Server of {'; '.join(served)}", command) for command, served in servers.items()
    ]


def downloads(
    verdict: Mapping[str, Any],
    records: Sequence[Line],
    provenance: Mapping[str, Any],
    profile: Mapping[str, Any],
) -> tuple[list[Download], str]:
    """The raw data as data: links, and a sentence about what is left out ("" when nothing)."""
    log, left_out = _jsonl(records), ""
    if len(log) > DATA_LIMIT:
        left_out = (
            f"The run log is {html.size(log)}, too much for one page: the tokens of the answers"
            " (output_ids) are left out of this copy."
        )
        log = _jsonl([_without_tokens(r) for r in records])
    files = [
        ("runs.jsonl", "every measured fact, one a line", log),
        ("verdict.json", "the verdict as data", _json(verdict)),
        ("provenance.json", "versions, machine, hashes", _json(provenance)),
        ("profile.yaml", "every setting", _profile_yaml(profile)),
    ]
    if len(log) > DATA_LIMIT:
        left_out = (
            f"The run log is {html.size(log)}, too much for one page: take runs.jsonl from the"
            " run’s folder."
        )
        files = files[1:]
    return [html.download(name, about, content) for name, about, content in files], left_out


def _forest(
    metric: str, method: str, rows: pd.DataFrame, control: pd.DataFrame, about: str = ""
) -> Figure:
    """One figure a metric and method: paired blocks and server starts differ in scale, and each has
    its own control.
    """
    how = {"paired": ", paired in one server", "starts": ", across server starts"}.get(method, "")
    better = {
        "throughput": "Right of 1 the first arm is faster. ",
        "cycle time": "Left of 1 the first arm is faster. ",
    }.get(metric, "")
    band = (
        "The grey band is the control: how far an arm differs from itself on the same schedule."
        if control["ratio"].notna().any()
        else "There is no control of this kind to measure it by."
    )
    return html.figure(
        f"{about}{'r' if about else 'R'}atio of {metric}{how}",
        better + band,
        lambda width: charts.forest(rows, control, width),
    )


def _throughput(experiment: str, blocks: pd.DataFrame, arms: Sequence[str]) -> Iterator[Figure]:
    """By pair where one server ran several arms, by start where arms met across servers: the two
    units of comparison.
    """
    by_start = blocks.groupby("start")["arm"]
    paired = blocks[(by_start.transform("nunique") > 1) & blocks["pair"].notna()]
    size = int(max(tables.thinned(blocks)["blocks"]))
    each = (
        "Each point is a block."
        if size == 1
        else f"Each point is the mean of up to {size} neighbouring blocks."
    )
    if len(paired):
        yield html.figure(
            f"Throughput by pair of blocks: {experiment}",
            f"{each} The blocks of a pair share their prompts and ran one after the other.",
            lambda width: charts.throughput_by_pair(paired, arms, width),
        )
    if paired.empty or by_start.nunique().min() < blocks["arm"].nunique():
        yield html.figure(
            f"Throughput by server start: {experiment}",
            f"{each} The bar is the mean of a start. Servers of one arm differ, so across servers"
            " the start is the unit.",
            lambda width: charts.throughput_by_start(blocks, arms, width),
        )


def _ratios(comparisons: pd.DataFrame, controls: pd.DataFrame) -> pd.DataFrame:
    """Comparisons and controls for people: each interval in one cell, "refused" where there is no
    result.
    """
    rows = pd.concat(
        [comparisons, controls.assign(comparison=controls["comparison"] + " (control)")],
        ignore_index=True,
    )
    words = {
        "ratio": [tables.fixed(row.ratio) if row.valid else "refused" for row in rows.itertuples()]
    }
    for name, low, high in (
        ("interval", "low", "high"),
        ("interval by BCa", "low by BCa", "high by BCa"),
    ):
        words[name] = [
            (
                tables.NOT_APPLICABLE
                if pd.isna(a) and (not valid or "BCa" in name)
                else f"{tables.fixed(a)} to {tables.fixed(b)}"
            )
            for a, b, valid in zip(rows[low], rows[high], rows["valid"])
        ]
    table = rows.assign(**words).rename(columns={"pairs": "pairs or starts"})
    return table[
        [
            "comparison",
            "metric",
            *words,
            "level (%)",
            "resolution (%)",
            "pairs or starts",
            "method",
            "experiment",
        ]
    ]


def _without_tokens(record: Line) -> Line:
    if not isinstance(record, Block):
        return record
    return record.model_copy(
        update={"requests": tuple(r.model_copy(update={"output_ids": ()}) for r in record.requests)}
    )


def _jsonl(records: Sequence[Line]) -> bytes:
    return b"".join(r.model_dump_json().encode() + b"\n" for r in records)


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2, default=str).encode()


def _profile_yaml(profile: Mapping[str, Any]) -> bytes:
    """The profile as ``workbench replay`` reads it."""
    return yaml.safe_dump(json.loads(_json(profile)), sort_keys=False, allow_unicode=True).encode()
