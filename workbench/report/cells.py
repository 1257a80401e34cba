"""What stands in a cell: numbers with the digits they bear, unknown, lists in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput

UNKNOWN = "unknown"


NOT_APPLICABLE = "–"


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


def flat(facts: Any, path: str = "") -> Iterator[tuple[str, str]]:
    items = facts.items() if isinstance(facts, Mapping) else enumerate(facts, 1)
    for key, value in items:
        here = f"{path}.{key}" if path else str(key)
        listed = isinstance(value, (list, tuple))
        if (
            isinstance(value, Mapping)
            or listed
            and any(isinstance(item, (Mapping, list, tuple)) for item in value)
        ):
            yield from flat(value, here)
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
