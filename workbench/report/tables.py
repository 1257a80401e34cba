"""Tables of a run: pure functions from run-log records and a verdict to pandas tables, with units
in the column names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from workbench.experiment.arms import Arm
from workbench.experiment.checks import Check
from workbench.experiment.errors import BadInput
from workbench.experiment.profile import Speculation
from workbench.experiment.runlog import Block, Failure, Finding, Line, Start
from workbench.experiment.sweeps import crossing

MAX_ROWS = 5_000
MAX_DATA = 500  # characters of a finding's data that are shown
UNKNOWN = "unknown"
NOT_APPLICABLE = "–"
STAGES = ("draft", "verify", "draft_extend")
BEFORE = ("prefill", "draft_prefill")  # once a request, so no part of a cycle
METRIC_NAMES = {"tokens_per_s": "throughput", "cycle_ms": "cycle time"}
DRAFT_ONLY = [
    "draft TP (ranks)",
    "drafting",
    "accept length (tokens/cycle)",
    "accept rate (%)",
    "draft collectives (per cycle)",
]


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


def with_result(table: pd.DataFrame, verdict: Mapping[str, Any]) -> pd.DataFrame:
    """``blocks`` less those of arms that the verdict gives no speed: what is not known to be an
    arm's is not shown as its.
    """

    def known(experiment: str, arm: str) -> bool:
        facts = (
            (verdict.get("experiments") or {}).get(experiment, verdict.get("arms") or {}).get(arm)
        )
        return facts is None or not math.isnan(number(facts.get("tokens_per_s")))

    return table.loc[
        [known(experiment, arm) for experiment, arm in zip(table["experiment"], table["arm"])]
    ]


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


def _output(verdict: Mapping[str, Any], arm: str) -> str:
    """Whether an arm's answers are none's, and where some are not, how many: also where the verdict
    puts them down to chance.
    """
    counts = [c for c in verdict.get("parity_counts") or [] if c.get("arm") == arm]
    result, differ = (
        (verdict.get("parity") or {}).get(arm) or "not checked",
        sum(c["mismatched"] for c in counts),
    )
    if not differ:
        return result
    return f"{differ} of {sum(c['compared'] for c in counts)} differ" + (
        ", as often as chance allows" if result == "identical" else ""
    )


def arms(verdict: Mapping[str, Any], profile: Mapping[str, Any]) -> pd.DataFrame:
    """One row an arm, as the verdict has it; accept length counts the bonus token, accept rate is
    correct over proposed drafts.

    An unknown number is NaN; what an arm without a draft cannot have is ``NOT_APPLICABLE``.
    """
    rows = []
    for name, facts in (verdict.get("arms") or {}).items():
        arm = parsed(name)
        row = {
            "arm": name,
            "draft TP (ranks)": _draft_ranks(arm, profile),
            "throughput (tokens/s)": number(facts.get("tokens_per_s")),
            "cycle (ms)": number(facts.get("cycle_ms")),
            "accept length (tokens/cycle)": number(facts.get("accept_length")),
            "accept rate (%)": 100 * number(facts.get("accept_rate")),
            "draft collectives (per cycle)": number(
                (facts.get("collectives_per_round") or {}).get("draft")
            ),
            "drafting": drafting(arm, profile) if arm else UNKNOWN,
            "output": _output(verdict, name),
            "attested": facts.get("attested"),
        }
        if arm is not None and not arm.speculates:
            row |= {column: NOT_APPLICABLE for column in DRAFT_ONLY}
        rows.append(row)
    return pd.DataFrame(rows)


def comparisons(verdict: Mapping[str, Any]) -> pd.DataFrame:
    """One row a comparison: the ratio of arm a to arm b with its interval; a refused one has no
    ratio, only its reasons.

    pairs: pairs of blocks (method "paired") or server starts a side ("starts"). low and high by
    BCa: the bootstrap's interval, where there is one beside the headline's. wanted: pairs or starts
    in all that the wished-for resolution needs, wanted (s): what the further ones cost.
    """
    return _ratios(verdict.get("comparisons") or [])


def controls(verdict: Mapping[str, Any]) -> pd.DataFrame:
    """One row an A/A comparison, an arm against itself, in the columns of ``comparisons``."""
    found = verdict.get("controls") or verdict.get("control") or []
    return _ratios(
        [
            {"a": c.get("arm"), "b": c.get("arm"), **c}
            for c in ([found] if isinstance(found, Mapping) else found)
        ]
    )


def refusals(verdict: Mapping[str, Any]) -> pd.DataFrame:
    """One row a reason why (part of) the result was refused, with all that it concerns."""
    said = [(reason, _about(reason)) for reason in verdict.get("reasons") or []]
    said += [
        (reason, name)
        for name, facts in (verdict.get("arms") or {}).items()
        for reason in facts.get("reasons") or []
    ]
    said += [
        (reason, f"{row.metric} of {row.comparison}")
        for table in (comparisons(verdict), controls(verdict))
        for row in table.itertuples()
        for reason in row.reasons
    ]
    concerns: dict[tuple[str, str], dict[str, None]] = {}
    for reason, about in said:
        reason = reason if isinstance(reason, Mapping) else {"sentence": str(reason)}
        concerns.setdefault((reason.get("sentence", UNKNOWN), reason.get("key", "")), {})[about] = (
            None
        )
    return pd.DataFrame(
        [(sentence, "; ".join(about), key) for (sentence, key), about in concerns.items()],
        columns=["reason", "concerns", "key"],
    )


def accept_by_position(verdict: Mapping[str, Any]) -> pd.DataFrame:
    """One row an arm and position in the draft: how often the draft token there was accepted, with
    its interval.

    From the verdict's "accept", as workbench.judge.accept defines it: rounds with at least so many
    correct drafts over all rounds. The shares of one arm and the bonus token add up to its accept
    length.
    """
    rows = [
        (name, position, *(100 * number(share.get(key)) for key in ("value", "low", "high")))
        for name, facts in (verdict.get("arms") or {}).items()
        for position, share in enumerate((facts.get("accept") or {}).get("positions") or [], 1)
    ]
    return pd.DataFrame(rows, columns=["arm", "position", "accepted (% of cycles)", "low", "high"])


def collectives(verdict: Mapping[str, Any]) -> pd.DataFrame:
    """One row an arm and stage of the cycle: collectives a cycle, and in words which kinds."""
    rows = []
    for name, facts in (verdict.get("arms") or {}).items():
        for stage, count in in_order(facts.get("collectives_per_round")):
            kinds = (facts.get("collectives_by_kind") or {}).get(stage) or {}
            words = ", ".join(
                f"{decimal(n)} {kind.replace('_', '-')}" for kind, n in kinds.items() if n != 0
            )
            rows.append((name, stage.replace("_", "-"), number(count), words))
    return pd.DataFrame(rows, columns=["arm", "stage", "collectives (per cycle)", "kinds"])


def stage_times(verdict: Mapping[str, Any]) -> pd.DataFrame:
    """One row an arm and stage: milliseconds a cycle, where measured."""
    rows = [
        (name, stage.replace("_", "-"), number(ms))
        for name, facts in (verdict.get("arms") or {}).items()
        for stage, ms in in_order(facts.get("stage_ms"))
    ]
    return pd.DataFrame(rows, columns=["arm", "stage", "time (ms/cycle)"])


def parity(verdict: Mapping[str, Any]) -> pd.DataFrame:
    """One row an arm and experiment: whether its answers are those of no speculation, and the
    counts (of answers) behind it.
    """
    counts = verdict.get("parity_counts") or [
        {"arm": arm, "result": result} for arm, result in (verdict.get("parity") or {}).items()
    ]
    keys = ("mismatched", "compared", "own_mismatched", "own_compared")
    rows = [
        (c.get("arm"), c.get("experiment"), c.get("result"), *(number(c.get(key)) for key in keys))
        for c in counts
    ]
    return pd.DataFrame(
        rows,
        columns=[
            "arm",
            "experiment",
            "answers",
            "differ from none",
            "compared",
            "differ from itself",
            "run twice",
        ],
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


SPEED = "speed (% of the best)"  # a column of the searches' maps


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
    return pd.DataFrame(list(_flat(facts)), columns=["fact", "value"])


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table for people: every cell a string, a missing value the word "unknown", one number of
    decimals a column.
    """
    return pd.DataFrame(
        {column: _words(table[column].tolist()) for column in table.columns}, dtype=object
    )


def number(value: Any) -> float:
    """The finite number that a JSON value is; NaN (unknown) for everything else, never 0."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else math.nan


def decimal(value: Any, places: int = 2) -> str:
    """A number without trailing zeros; "unknown" for what is none."""
    value = number(value)
    if math.isnan(value):
        return UNKNOWN
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def fixed(value: Any, places: int = 3) -> str:
    """A number with so many decimals; "unknown" for what is none."""
    value = number(value)
    return UNKNOWN if math.isnan(value) else f"{value:,.{places}f}"


def parsed(name: str) -> Arm | None:
    """The arm of a name; None for a name that is none, so that a damaged verdict still gives a
    report.
    """
    try:
        return Arm.parse(name)
    except BadInput:
        return None


def drafting(arm: Arm | None, profile: Mapping[str, Any]) -> str:
    """How an arm (None: the profile) drafts, e.g. "chain of 3 steps" or "tree of 3 steps, topk 2, 8
    tokens".
    """
    try:
        spec = Speculation(**(profile.get("speculation") or {}))
        spec = spec.of(arm) if arm else spec
    except (ValueError, BadInput):
        return UNKNOWN
    steps = f"{spec.steps} step" + ("s" if spec.steps != 1 else "")
    return (
        f"chain of {steps}"
        if spec.topk == 1
        else f"tree of {steps}, topk {spec.topk}, {spec.draft_tokens} tokens"
    )


def in_order(stages: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """The stages of a cycle in their order, others after them; without those that come once a
    request.
    """

    def place(item: tuple[str, Any]) -> tuple[int, str]:
        name = item[0].replace("-", "_")
        return (STAGES.index(name) if name in STAGES else len(STAGES), name)

    return sorted(
        (item for item in (stages or {}).items() if item[0].replace("-", "_") not in BEFORE),
        key=place,
    )


def _about(reason: Any) -> str:
    """What a reason of the whole run is about: its arms and experiment where it names them."""
    named = reason if isinstance(reason, Mapping) else {}
    return (
        " in ".join(
            filter(None, [" and ".join(named.get("arms") or []), named.get("experiment") or ""])
        )
        or "the run"
    )


def _ratios(items: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    rows = []
    for item in items:
        valid = bool(item.get("valid", True))
        ratio, low, high = (
            number(item.get(key)) if valid else math.nan for key in ("ratio", "low", "high")
        )
        metric, beside = (
            item.get("metric", "tokens_per_s"),
            (item.get("beside") or {} if valid else {}),
        )
        rows.append(
            (
                item.get("experiment") or "",
                f"{item.get('a')} ÷ {item.get('b')}",
                METRIC_NAMES.get(metric, metric),
                ratio,
                low,
                high,
                number(beside.get("low")),
                number(beside.get("high")),
                100 * number(item.get("level")),
                number(item.get("pairs")),
                100 * number(item.get("resolution")),
                number(item.get("wanted")),
                number(item.get("wanted_seconds")),
                item.get("method") or UNKNOWN,
                valid,
                item.get("reasons") or [],
            )
        )
    return pd.DataFrame(
        rows,
        columns=[
            "experiment",
            "comparison",
            "metric",
            "ratio",
            "low",
            "high",
            "low by BCa",
            "high by BCa",
            "level (%)",
            "pairs",
            "resolution (%)",
            "wanted",
            "wanted (s)",
            "method",
            "valid",
            "reasons",
        ],
    )


def _with_throughput(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(
        **{
            "throughput (tokens/s)": (
                table["tokens"] / table["time (s)"].where(table["time (s)"] > 0)
            )
        }
    )


def _draft_ranks(arm: Arm | None, profile: Mapping[str, Any]) -> float:
    """Ranks in the draft's group: the target's own for the shared placement."""
    return math.nan if arm is None else number(arm.group or profile.get("tp"))


def _flat(facts: Any, path: str = "") -> Iterator[tuple[str, str]]:
    items = facts.items() if isinstance(facts, Mapping) else enumerate(facts, 1)
    for key, value in items:
        here = f"{path}.{key}" if path else str(key)
        listed = isinstance(value, (list, tuple))
        if (
            isinstance(value, Mapping)
            or listed
            and any(isinstance(item, (Mapping, list, tuple)) for item in value)
        ):
            yield from _flat(value, here)
        elif listed:
            yield here, " ".join(map(str, value)) or "none"
        else:
            yield (
                here,
                (
                    UNKNOWN
                    if value is None
                    else {True: "yes", False: "no"}[value]
                    if isinstance(value, bool)
                    else str(value)
                ),
            )


def _words(cells: list[Any]) -> list[str]:
    numbers = [abs(n) for cell in cells if not math.isnan(n := number(cell))]
    largest = max(numbers, default=0)
    most = 0 if largest >= 1000 else 1 if largest >= 100 else 2 if largest >= 10 else 3
    places = next(p for p in range(most + 1) if all(round(n, p) == round(n, most) for n in numbers))

    def words(cell: Any) -> str:
        if isinstance(cell, bool):
            return "yes" if cell else "no"
        return cell if isinstance(cell, str) else fixed(cell, places)

    return [words(cell) for cell in cells]


def load_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The ratios of tokens/s by requests at once, for ``charts.by_load``. rows:
    ``tables.comparisons``.
    """
    here = rows[
        rows["experiment"].str.startswith(crossing(""))
        & rows["valid"]
        & (rows["metric"] == METRIC_NAMES["tokens_per_s"])
    ]
    loads = here["experiment"].str.removeprefix(crossing("")).astype(int)
    return here.assign(**{"requests at once": loads})[
        ["comparison", "requests at once", "ratio", "low", "high"]
    ].sort_values("requests at once")
