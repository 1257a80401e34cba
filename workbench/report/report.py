"""The report: a run's verdict, records and provenance as one HTML file that opens with no network
and runs no script.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import yaml

from workbench.experiment.names import is_sweep
from workbench.experiment.runlog import Line
from workbench.judge.verdict_file import VerdictFile
from workbench.report import (
    cells,
    chart_parts,
    html,
    log_tables,
    tables,
)
from workbench.report.figures import cycle_figures, figures, ratios, without_tokens
from workbench.report.html import Download
from workbench.report.sweep_section import sweeps
from workbench.run.provenance import sentence as origin

QUESTION = "Is the draft’s tensor parallelism what makes EAGLE-3 slow?"
DATA_LIMIT = 20_000_000  # bytes of raw data inside the file; browsers and mail get slow beyond


def render(
    verdict: VerdictFile,
    records: Sequence[Line],
    provenance: Mapping[str, Any],
    profile: Mapping[str, Any],
    cycles: pd.DataFrame | None = None,
    sweep_map: pd.DataFrame | None = None,
) -> str:
    """The report of one run as HTML text.

    verdict: any number in it may be missing (shown as "unknown").
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
    if not main.arms:
        main, swept = verdict, None  # a run of sweeps alone, or of nothing
    comparisons, controls = tables.comparisons(main), tables.controls(main)
    everyone = list(verdict.arms)  # an arm has one colour in the whole page
    files, left_out = downloads(verdict, records, provenance, profile)
    return html.render(
        "report.html.j2",
        question=QUESTION,
        sentence=verdict.sentence or "No verdict was stated.",
        valid=verdict.valid,
        name=verdict.profile or cells.UNKNOWN,
        labels=labels(verdict, provenance, profile),
        about=profile.get("about", ""),
        recorded=(
            f"{origin(provenance)} Nothing was measured for this page."
            if verdict.source == "recorded"
            else ""
        ),
        arms=html.table(tables.arms(main, profile)),
        colours=chart_parts.palette(everyone),
        sweeps=sweeps(swept, records, profile, sweep_map) if swept else None,
        conditions=conditions(records, profile),
        costs=costs(comparisons, profile),
        comparisons=html.table(ratios(comparisons, controls)),
        notes=verdict.notes,
        parity=html.table(tables.parity(verdict)),
        reasons=refusals["reason"].tolist(),
        refusals=html.table(refusals),
        figures=[*figures(main, records, everyone), *cycle_figures(cycles)],
        failures=html.table(log_tables.failures(records)),
        findings=html.table(log_tables.findings(records)),
        provenance=html.table(log_tables.provenance(provenance)),
        commands=commands(records, provenance),
        files=files,
        left_out=left_out,
    )


def labels(
    verdict: VerdictFile, provenance: Mapping[str, Any], profile: Mapping[str, Any]
) -> list[str]:
    """What a reader must know before any number: which engine, live or recorded, and whether it
    stands for something else.
    """
    name = str(verdict.profile or profile.get("name") or cells.UNKNOWN)
    found = {"cpu": ["CPU engine: proves function, never speed"], "cuda": ["GPU"]}.get(
        verdict.engine, ["engine unknown"]
    )
    found += (
        ["accept length simulated"]
        if any(facts.accept_simulated for facts in verdict.arms.values())
        else []
    )
    recording = f"recorded: {provenance.get('recording') or name.removeprefix('recorded:')}"
    found += [
        {"live": "live run", "recorded": recording}.get(verdict.source, "live or recorded unknown")
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
    blocks = log_tables.measured(records)
    load = ", ".join(
        map(
            str,
            sorted({b.concurrency for b in blocks} or {work.get("concurrency", cells.UNKNOWN)}),
        )
    )
    prompts = ", ".join(sorted({b.prompts_from for b in blocks})) or cells.UNKNOWN
    return [
        ("target", str(pair.get("target", cells.UNKNOWN))),
        ("draft", str(pair.get("draft", cells.UNKNOWN))),
        ("target TP", f"{cells.decimal(profile.get('tp'))} ranks{_spread(profile)}"),
        ("drafting", tables.drafting(None, profile)),
        ("requests at once", load),
        ("requests a block", cells.decimal(work.get("requests_per_block"))),
        ("new tokens a request", f"at most {cells.decimal(work.get('max_new_tokens'))}"),
        ("prompts", prompts),
        ("blocks measured", f"{len(blocks)} in {len({b.start for b in blocks})} server starts"),
        ("seed", cells.decimal(plan.get("seed"))),
    ]


def _spread(profile: Mapping[str, Any]) -> str:
    names = [str(node.get("name")) for node in profile.get("nodes") or ()]
    return f" on {len(names)} nodes ({', '.join(names)})" if len(names) > 1 else ""


def costs(comparisons: pd.DataFrame, profile: Mapping[str, Any]) -> list[str]:
    """What the resolution that the plan wishes for would take, a sentence a comparison; none
    without such a wish.
    """
    wished = cells.decimal(100 * cells.number((profile.get("plan") or {}).get("resolution")))
    return [
        f"{row['comparison']}, {row['metric']}: a resolution of {wished} % takes"
        f" {row['wanted']:.0f}"
        f" {'starts' if row['method'] == 'paired' else 'starts a side'} in all,"
        f" {row['wanted (s)']:.0f} s more than this run."
        for row in comparisons.dropna(subset=["wanted", "wanted (s)"]).to_dict("records")
    ]


def _part(verdict: VerdictFile, wanted: Callable[[str], bool]) -> VerdictFile:
    """The verdict's arms, comparisons and controls of some experiments; what names none counts as
    theirs that are no sweeps.
    """

    control = verdict.control
    return verdict.model_copy(
        update={
            "arms": {name: f for name, f in verdict.arms.items() if wanted(f.experiment)},
            "comparisons": tuple(c for c in verdict.comparisons if wanted(c.experiment)),
            "control": control if control and wanted(control.experiment) else None,
            "controls": tuple(c for c in verdict.controls if wanted(c.experiment)),
        }
    )


def commands(records: Sequence[Line], provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
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
    for start in log_tables.starts(records):
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
    verdict: VerdictFile,
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
        log = _jsonl([without_tokens(r) for r in records])
    files = [
        ("runs.jsonl", "every measured fact, one a line", log),
        ("verdict.json", "the verdict as data", _json(verdict.to_json())),
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


def _jsonl(records: Sequence[Line]) -> bytes:
    return b"".join(r.model_dump_json().encode() + b"\n" for r in records)


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2, default=str).encode()


def _profile_yaml(profile: Mapping[str, Any]) -> bytes:
    """The profile as ``workbench replay`` reads it."""
    return yaml.safe_dump(json.loads(_json(profile)), sort_keys=False, allow_unicode=True).encode()
