"""The stages of a cycle: the one table of their names, and of what each belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage, by the name that counters, logs and verdicts use.

    cycle: part of every cycle; else it comes once a request.
    drafts: the draft model is at work.
    """

    name: str
    cycle: bool
    drafts: bool

    @property
    def label(self) -> str:
        """The name as people read it."""
        return self.name.replace("_", "-")


# In the order of a cycle; decode is the step without speculation.
TABLE = (
    Stage("draft", cycle=True, drafts=True),
    Stage("verify", cycle=True, drafts=False),
    Stage("draft_extend", cycle=True, drafts=True),
    Stage("decode", cycle=True, drafts=False),
    Stage("prefill", cycle=False, drafts=False),
    Stage("draft_prefill", cycle=False, drafts=True),
)
NAMES = tuple(stage.name for stage in TABLE)
CYCLE = tuple(stage.name for stage in TABLE if stage.cycle)
SPECULATION = tuple(name for name in CYCLE if name != "decode")
BEFORE = tuple(stage.name for stage in TABLE if not stage.cycle)
DRAFTING = tuple(stage.name for stage in TABLE if stage.cycle and stage.drafts)
