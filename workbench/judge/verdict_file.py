"""verdict.json as a model: what it holds is checked when it is written and when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from workbench.experiment.names import load_of
from workbench.judge.accept import Accept
from workbench.judge.comparisons import Comparison
from workbench.judge.refusal import Refusal

SCHEMA = 1


class Entry(BaseModel):
    """A part of verdict.json. What a file lacks is unknown: None, or empty."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)


class ReasonEntry(Entry):
    """Why there is no result (``refusals.Refusal``)."""

    key: str = ""
    sentence: str = ""
    experiment: str = ""
    arms: tuple[str, ...] = ()

    @classmethod
    def of(cls, r: Refusal) -> ReasonEntry:
        return cls(key=r.key, sentence=r.sentence, experiment=r.experiment, arms=r.arms)


class IntervalEntry(Entry):
    """A ratio with its interval (``stats.Interval``)."""

    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    method: str | None = None
    n: int | None = None


class AlikeEntry(Entry):
    """How pairs of one start resemble each other (``clustering.Clustering``)."""

    icc: float | None = None
    p: float | None = None
    lag1: float | None = None
    neighbours: int = 0
    trend: float | None = None
    change: float | None = None


class Yardstick(Entry):
    """The control that a difference is held against: an arm over itself."""

    a: str
    b: str
    method: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    sd: float | None = None

    @classmethod
    def of(cls, c: Comparison) -> Yardstick:
        return cls(**{name: getattr(ControlEntry.of(c), name) for name in cls.model_fields})


class ComparedEntry(Entry):
    """What a comparison and a control have in common (``comparisons.Comparison``).

    starts: server starts of the smaller side, the units of the interval; units: of each side.
    pairs: pairs of blocks in the starts that held both arms; 0 across starts.
    claims: whether the claim of its arms rests on this metric; equal: why the accept lengths are
        equal, where they are.
    interval: how it was made.
    beside: over all pairs, which speaks of these servers alone.
    alike: how pairs of one start resemble each other.
    """

    experiment: str = ""
    a: str = ""
    b: str = ""
    metric: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    starts: int | None = None
    pairs: int | None = None
    units: tuple[int, ...] = ()
    claims: bool = True
    equal: str | None = None
    method: str | None = None
    interval: str | None = None
    beside: IntervalEntry | None = None
    alike: AlikeEntry | None = None
    sd: float | None = None
    resolution: float | None = None
    wanted: int | None = None
    wanted_seconds: float | None = None
    valid: bool = False
    reasons: tuple[ReasonEntry, ...] = ()

    @property
    def load(self) -> int | None:
        """The requests at once at which 05_steps compares; None for other comparisons."""
        return load_of(self.experiment)


class ComparisonEntry(ComparedEntry):
    """A comparison with its yardstick; None where no control fits."""

    control: Yardstick | None = None

    @classmethod
    def of(cls, c: Comparison, control: Yardstick | None) -> ComparisonEntry:
        return cls(**_compared(c), control=control)


class ControlEntry(ComparedEntry):
    """A control. arm: the second label of the arm that is compared with itself."""

    arm: str = ""

    @classmethod
    def of(cls, c: Comparison) -> ControlEntry:
        return cls(**_compared(c), arm=c.b)


class EstimateEntry(Entry):
    """A value with its interval (``accept.Estimate``)."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class AcceptEntry(Entry):
    """How many drafts an arm's target took (``accept.Accept``)."""

    requests: int | None = None
    unknown: int | None = None
    units: int | None = None
    rounds: int | None = None
    length: EstimateEntry | None = None
    drafts: EstimateEntry | None = None
    length_by_request: EstimateEntry | None = None
    reported_length: EstimateEntry | None = None
    rate: EstimateEntry | None = None
    positions: tuple[EstimateEntry, ...] | None = None

    @classmethod
    def of(cls, taken: Accept) -> AcceptEntry:
        return cls.model_validate(asdict(taken))


class ArmEntry(Entry):
    """One arm in one experiment. What is not known to be the arm's has no numbers.

    collectives_per_round: {stage: number}; collectives_by_kind: {stage: {kind: number}}.
    stage_ms: {stage: milliseconds a round}.
    attested: every rank reported this placement in every block.
    """

    tokens_per_s: float | None = None
    cycle_ms: float | None = None
    accept_length: float | None = None
    accept_rate: float | None = None
    accept: AcceptEntry | None = None
    accept_simulated: bool = False
    collectives_per_round: dict[str, float] = Field(default_factory=dict)
    collectives_by_kind: dict[str, dict[str, float]] = Field(default_factory=dict)
    stage_ms: dict[str, float] = Field(default_factory=dict)
    attested: bool | None = None
    experiment: str = ""
    blocks: int = 0
    starts: int = 0

    @property
    def load(self) -> int | None:
        """The requests at once at which 05_steps compared it; None for other experiments."""
        return load_of(self.experiment)

    @property
    def accepted_at(self) -> tuple[EstimateEntry, ...]:
        """How often the draft at each position was accepted; empty where that is not known."""
        return (self.accept.positions if self.accept else None) or ()


class ParityEntry(Entry):
    """Answers of one arm against those of no speculation (``token_parity.Parity``)."""

    experiment: str = ""
    sentence: str = ""
    arm: str = ""
    result: str = ""
    mismatched: int | None = None
    compared: int | None = None
    own_mismatched: int | None = None
    own_compared: int | None = None
    violations: int | None = Field(None, alias="owed")


class VerdictFile(Entry):
    """The content of verdict.json.

    version: of the schema.
    arms: each from the headline's experiment, else from the one that measured it most.
    experiments: {experiment: {arm: facts}}.
    control: the headline's; controls: all of them.
    parity: {arm: identical, differs or not checked}.
    """

    version: int = Field(SCHEMA, alias="schema")
    profile: str = ""
    source: str = ""
    engine: str = ""
    valid: bool = False
    sentence: str = ""
    reasons: tuple[ReasonEntry, ...] = ()
    notes: tuple[str, ...] = ()
    arms: dict[str, ArmEntry] = Field(default_factory=dict)
    experiments: dict[str, dict[str, ArmEntry]] = Field(default_factory=dict)
    comparisons: tuple[ComparisonEntry, ...] = ()
    control: ControlEntry | None = None
    controls: tuple[ControlEntry, ...] = ()
    parity: dict[str, str] = Field(default_factory=dict)
    parity_counts: tuple[ParityEntry, ...] = ()

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> VerdictFile:
        """The model of a file's content.

        Raises: pydantic.ValidationError where the content is none.
        """
        return cls.model_validate(dict(data) | {"control": data.get("control") or None})

    @classmethod
    def load(cls, path: Path) -> VerdictFile:
        """The model of a file (``read``)."""
        return cls.read(json.loads(path.read_text()))

    def to_json(self, exclude_unset: bool = False) -> dict[str, Any]:
        """Plain types, under the schema's names; a run without a control holds {} there.

        exclude_unset: without what the file that this was read from lacks.
        """
        content = self.model_dump(mode="json", by_alias=True, exclude_unset=exclude_unset)
        return content | {"control": content["control"] or {}}


def _compared(c: Comparison) -> dict[str, Any]:
    i = c.interval
    return {
        "experiment": c.experiment,
        "a": c.a,
        "b": c.b,
        "metric": c.metric,
        "ratio": i.ratio if i else None,
        "low": i.low if i else None,
        "high": i.high if i else None,
        "level": c.level,
        "starts": min(c.units),
        "pairs": c.pairs,
        "units": c.units,
        "claims": c.claims,
        "equal": c.equal,
        "method": c.method,
        "interval": i.method if i else None,
        "beside": IntervalEntry(**vars(c.beside)) if c.beside else None,
        "alike": AlikeEntry(**vars(c.alike)) if c.valid and c.pairs else None,
        "sd": c.sd,
        "resolution": c.resolution,
        "wanted": c.wanted,
        "wanted_seconds": c.wanted_seconds,
        "valid": c.valid,
        "reasons": tuple(map(ReasonEntry.of, c.reasons)),
    }
