"""Tables of a run: pure functions from run-log records and a verdict to pandas tables, with units
in the column names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from workbench.engine import stages as stages_table
from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.profile_sections import Speculation
from workbench.judge.findings import SettingTried
from workbench.judge.verdict_file import (
    ComparedEntry,
    IntervalEntry,
    ParityEntry,
    ReasonEntry,
    VerdictFile,
)
from workbench.report.cells import NOT_APPLICABLE, UNKNOWN, decimal, number, parsed
from workbench.report.log_tables import output

STAGES = stages_table.SPECULATION
BEFORE = stages_table.BEFORE  # once a request, so no part of a cycle
METRIC_NAMES = {"tokens_per_s": "throughput", "cycle_ms": "cycle time"}
RATIO_COLUMNS = [
    "experiment",
    "comparison",
    "metric",
    "ratio",
    "low",
    "high",
    "these",
    "these low",
    "these high",
    "control",
    "control low",
    "control high",
    "level (%)",
    "starts",
    "pairs",
    "resolution (%)",
    "wanted",
    "wanted (s)",
    "method",
    "claims",
    "valid",
    "reasons",
]
DRAFT_ONLY = [
    "draft TP (ranks)",
    "drafting",
    "accept length (tokens/cycle)",
    "accept rate (%)",
    "draft collectives (per cycle)",
]


def with_result(table: pd.DataFrame, verdict: VerdictFile) -> pd.DataFrame:
    """``blocks`` less those of arms that the verdict gives no speed: what is not known to be an
    arm's is not shown as its.
    """

    def known(experiment: str, arm: str) -> bool:
        facts = verdict.experiments.get(experiment, verdict.arms).get(arm)
        return facts is None or not math.isnan(number(facts.tokens_per_s))

    return table.loc[
        [known(experiment, arm) for experiment, arm in zip(table["experiment"], table["arm"])]
    ]


def arms(verdict: VerdictFile, profile: Mapping[str, Any]) -> pd.DataFrame:
    """One row an arm, as the verdict has it; accept length counts the bonus token, accept rate is
    correct over proposed drafts.

    An unknown number is NaN; what an arm without a draft cannot have is ``NOT_APPLICABLE``.
    """
    rows = []
    for name, facts in verdict.arms.items():
        arm = parsed(name)
        row = {
            "arm": name,
            "draft TP (ranks)": _draft_ranks(arm, profile),
            "throughput (tokens/s)": number(facts.tokens_per_s),
            "cycle (ms)": number(facts.cycle_ms),
            "accept length (tokens/cycle)": number(facts.accept_length),
            "accept rate (%)": 100 * number(facts.accept_rate),
            "draft collectives (per cycle)": number(facts.collectives_per_round.get("draft")),
            "drafting": drafting(arm, profile) if arm else UNKNOWN,
            "output": output(verdict, name),
            "attested": facts.attested,
        }
        if arm is not None and not arm.speculates:
            row |= {column: NOT_APPLICABLE for column in DRAFT_ONLY}
        rows.append(row)
    return pd.DataFrame(rows)


def comparisons(verdict: VerdictFile) -> pd.DataFrame:
    """One row a comparison: the ratio of arm a to arm b with its interval; a refused one has no
    ratio, only its reasons.

    starts: server starts, the units of the interval (of the smaller side); pairs: pairs of blocks
    in them, where they held both arms. these low and high: the interval over those pairs, which
    speaks of these servers alone. control: the same arm against itself. claims: whether the claim
    rests on this metric. wanted: starts in all that the wished-for resolution needs, wanted (s):
    what the further ones cost.
    """
    return _ratios(verdict.comparisons)


def controls(verdict: VerdictFile) -> pd.DataFrame:
    """One row an A/A comparison, an arm against itself, in the columns of ``comparisons``."""
    headline = (verdict.control,) if verdict.control else ()
    return _ratios(verdict.controls or headline)


def refusals(verdict: VerdictFile) -> pd.DataFrame:
    """One row a reason why (part of) the result was refused, with all that it concerns."""
    said = [(reason, _about(reason)) for reason in verdict.reasons]
    said += [
        (reason, f"{row.metric} of {row.comparison}")
        for table in (comparisons(verdict), controls(verdict))
        for row in table.itertuples()
        for reason in row.reasons
    ]
    concerns: dict[tuple[str, str], dict[str, None]] = {}
    for reason, about in said:
        concerns.setdefault((reason.sentence, reason.key), {})[about] = None
    return pd.DataFrame(
        [(sentence, "; ".join(about), key) for (sentence, key), about in concerns.items()],
        columns=["reason", "concerns", "key"],
    )


def accept_by_position(verdict: VerdictFile) -> pd.DataFrame:
    """One row an arm and position in the draft: how often the draft token there was accepted, with
    its interval.

    From the verdict's "accept", as workbench.judge.accept defines it: rounds with at least so many
    correct drafts over all rounds. The shares of one arm and the bonus token add up to its accept
    length.
    """
    rows = [
        (name, position, *(100 * number(end) for end in (share.value, share.low, share.high)))
        for name, facts in verdict.arms.items()
        for position, share in enumerate(facts.accepted_at, 1)
    ]
    return pd.DataFrame(rows, columns=["arm", "position", "accepted (% of cycles)", "low", "high"])


def collectives(verdict: VerdictFile) -> pd.DataFrame:
    """One row an arm and stage of the cycle: collectives a cycle, and in words which kinds."""
    rows = []
    for name, facts in verdict.arms.items():
        for stage, count in in_order(facts.collectives_per_round):
            kinds = facts.collectives_by_kind.get(stage, {})
            words = ", ".join(
                f"{decimal(n)} {kind.replace('_', '-')}" for kind, n in kinds.items() if n != 0
            )
            rows.append((name, stage.replace("_", "-"), number(count), words))
    return pd.DataFrame(rows, columns=["arm", "stage", "collectives (per cycle)", "kinds"])


def stage_times(verdict: VerdictFile) -> pd.DataFrame:
    """One row an arm and stage: milliseconds a cycle, where measured."""
    rows = [
        (name, stage.replace("_", "-"), number(ms))
        for name, facts in verdict.arms.items()
        for stage, ms in in_order(facts.stage_ms)
    ]
    return pd.DataFrame(rows, columns=["arm", "stage", "time (ms/cycle)"])


def parity(verdict: VerdictFile) -> pd.DataFrame:
    """One row an arm and experiment: whether its answers are those of no speculation, and the
    counts (of answers) behind it.
    """
    counts = verdict.parity_counts or [
        ParityEntry(arm=arm, result=result) for arm, result in verdict.parity.items()
    ]
    rows = [
        (
            c.arm,
            c.experiment or UNKNOWN,
            c.result,
            number(c.mismatched),
            number(c.compared),
            number(c.own_mismatched),
            number(c.own_compared),
        )
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


SPEED = "speed (% of the best)"  # a column of the searches' maps


def settings(tried: Sequence[SettingTried]) -> pd.DataFrame:
    """One row a setting of the communication layer, as 06's search kept it."""
    table = pd.DataFrame([row.model_dump(by_alias=True) for row in tried])
    return table[[*(c for c in table if c != "about"), *(c for c in table if c == "about")]]


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


def in_order(stages: Mapping[str, float | None]) -> list[tuple[str, float | None]]:
    """The stages of a cycle in their order, others after them; without those that come once a
    request.
    """

    def place(item: tuple[str, float | None]) -> tuple[int, str]:
        name = item[0].replace("-", "_")
        return (STAGES.index(name) if name in STAGES else len(STAGES), name)

    return sorted(
        (item for item in stages.items() if item[0].replace("-", "_") not in BEFORE),
        key=place,
    )


def _about(reason: ReasonEntry) -> str:
    """What a reason of the whole run is about: its arms and experiment where it names them."""
    return " in ".join(filter(None, [" and ".join(reason.arms), reason.experiment])) or "the run"


def _ratios(compared: Sequence[ComparedEntry]) -> pd.DataFrame:
    rows = []
    for c in compared:
        interval = c if c.valid else IntervalEntry()
        # Said also where the starts are too few for a claim.
        few = all(reason.key == "too_few_starts" for reason in c.reasons)
        these = c.beside if c.beside and few else IntervalEntry()
        control = getattr(c, "control", None) or IntervalEntry()
        rows.append(
            {
                "experiment": c.experiment,
                "comparison": f"{c.a} ÷ {c.b}",
                "metric": METRIC_NAMES.get(c.metric, c.metric),
                "ratio": number(interval.ratio),
                "low": number(interval.low),
                "high": number(interval.high),
                "these": number(these.ratio),
                "these low": number(these.low),
                "these high": number(these.high),
                "control": number(control.ratio),
                "control low": number(control.low),
                "control high": number(control.high),
                "level (%)": 100 * number(c.level),
                "starts": number(c.starts),
                "pairs": number(c.pairs),
                "resolution (%)": 100 * number(c.resolution),
                "wanted": number(c.wanted),
                "wanted (s)": number(c.wanted_seconds),
                "method": c.method or UNKNOWN,
                "claims": c.claims,
                "valid": c.valid,
                "reasons": c.reasons,
            }
        )
    return pd.DataFrame(rows, columns=RATIO_COLUMNS)


def _draft_ranks(arm: Arm | None, profile: Mapping[str, Any]) -> float:
    """Ranks in the draft's group: the target's own for the shared placement."""
    return math.nan if arm is None else number(arm.group or profile.get("tp"))


def at_loads(verdict: VerdictFile) -> pd.DataFrame:
    """``comparisons`` of 05's best settings, with the "requests at once" of each."""
    chosen = [c for c in verdict.comparisons if c.load is not None]
    return _ratios(chosen).assign(**{"requests at once": [c.load for c in chosen]})


def load_table(verdict: VerdictFile) -> pd.DataFrame:
    """The ratios of tokens/s by requests at once, for ``charts.by_load``."""
    rows = at_loads(verdict)
    here = rows[rows["valid"] & (rows["metric"] == METRIC_NAMES["tokens_per_s"])]
    columns = ["comparison", "requests at once", "ratio", "low", "high"]
    return here[columns].sort_values("requests at once")
