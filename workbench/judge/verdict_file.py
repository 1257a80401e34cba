"""The content of verdict.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.judge import accept
from workbench.judge.accept_checks import Refusal
from workbench.judge.comparisons import Comparison


def comparison_entry(c: Comparison) -> dict[str, Any]:
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
        "pairs": min(c.units),
        "units": list(c.units),
        "method": c.method,
        "interval": i.method if i else None,
        "beside": vars(c.beside) if c.beside else None,
        "sd": c.sd,
        "resolution": c.resolution,
        "wanted": c.wanted,
        "wanted_seconds": c.wanted_seconds,
        "valid": c.valid,
        "reasons": [reason_entry(r) for r in c.reasons],
    }


def reason_entry(r: Refusal) -> dict[str, Any]:
    return {"key": r.key, "sentence": r.sentence, "experiment": r.experiment, "arms": list(r.arms)}


def accept_entry(taken: accept.Accept) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return (
            vars(value)
            if isinstance(value, accept.Estimate)
            else [vars(v) for v in value]
            if isinstance(value, tuple)
            else value
        )

    return {name: plain(value) for name, value in vars(taken).items()}


def most_measured(
    experiments: dict[str, dict[str, dict[str, Any]]], first: str | None
) -> dict[str, dict[str, Any]]:
    arms = dict.fromkeys(arm for found in experiments.values() for arm in found)
    return {
        arm: max(
            (found[arm] for found in experiments.values() if arm in found),
            key=lambda facts: (facts["experiment"] == first, facts["blocks"]),
        )
        for arm in arms
    }


def worst(results: Sequence[str]) -> str:
    return next(r for r in ("differs", "identical", "not checked") if r in results)
