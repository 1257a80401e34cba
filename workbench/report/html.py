"""What the HTML pages are made of: tables for people, charts as SVG in two widths, downloads inside
the page, templates that escape.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from workbench.report import cells, chart_parts, charts

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class Figure:
    """One chart with the sentence that says how to read it, drawn twice: for a page and for a
    phone.
    """

    title: str
    caption: str
    wide: Markup
    narrow: Markup


@dataclass(frozen=True)
class Table:
    """A table for people: columns as (name, unit, whether it holds numbers), rows of strings."""

    columns: tuple[tuple[str, str, bool], ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Download:
    name: str
    about: str
    size: str
    link: str


def render(template: str, **content: Any) -> str:
    """A page of workbench/templates; text from outside is escaped."""
    return _TEMPLATES.get_template(template).render(**content)


def figure(title: str, caption: str, chart: Callable[[int], charts.alt.TopLevelMixin]) -> Figure:
    return Figure(
        title,
        caption.strip(),
        *(
            Markup(chart_parts.svg(chart(width)))
            for width in (chart_parts.WIDE, chart_parts.NARROW)
        ),
    )


def table(frame: pd.DataFrame) -> Table:
    words = cells.shown(frame)
    columns = []
    for heading in frame.columns:
        name, _, unit = heading.partition(" (")
        columns.append(
            (
                name,
                unit.rstrip(")"),
                any(pd.notna(cells.number(cell)) for cell in frame[heading].tolist()),
            )
        )
    return Table(tuple(columns), tuple(words.itertuples(index=False, name=None)))


def download(name: str, about: str, content: bytes) -> Download:
    """A file that the page itself holds."""
    return Download(
        name,
        about,
        size(content),
        "data:application/octet-stream;base64," + base64.b64encode(content).decode(),
    )


def size(content: bytes) -> str:
    return (
        f"{len(content) / 1e6:.1f} MB"
        if len(content) >= 1e6
        else f"{max(1, round(len(content) / 1e3))} kB"
    )
