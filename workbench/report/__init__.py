"""Tables, charts and HTML from a verdict, whoever made it."""

import workbench.report.lean_imports  # noqa: F401  (first of all: its modules import altair)
