"""An arm: one configuration under test, and the grammar of its name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

from workbench.experiment.communication import SETTINGS
from workbench.experiment.errors import BadInput

_NAME = re.compile(
    r"(?P<placement>none|shared|own-(?P<group>[1-9]\d*))(#(?P<replica>[1-9]\d*))?(?P<settings>(\+[a-z_]+=[a-z0-9-]+)*)"
)


@dataclass(frozen=True)
class ArmSetting:
    """A setting in which an arm can depart from its profile: the one entry that says all of it.

    words: the values that it takes; None for whole numbers.
    server: of the whole server, from its start on, and of arms without a draft too; else of the
        draft, switched in a running server, and the field of that name in
        ``profile_sections.Speculation``.
    audit: the value with which an arm is measured only to tell what the workbench itself costs.
    """

    words: tuple[str, ...] | None = None
    server: bool = False
    audit: str | None = None

    def value(self, text: str) -> int | str | None:
        """What a text means here; None for nothing."""
        if self.words is None:
            return int(text) if text.isdigit() else None
        return text if text in self.words else None


def setting(**facts: Any) -> Any:
    """A field of an arm that holds a setting; facts: as of ``ArmSetting``."""
    return field(default=None, metadata={"setting": ArmSetting(**facts)})


@dataclass(frozen=True)
class Arm:
    """One configuration under test.

    placement: ``none`` (no speculation), ``shared`` (the draft on the target's TP group, SGLang's
        way) or ``own`` (the draft replicated on groups of ``group`` consecutive ranks).
    group: ranks in one draft group; None unless ``own``.
    replica: the same configuration under a second label, for a control (an arm against itself).
    steps, topk, draft_tokens, agreement, timing: where this arm departs from its profile; None
    means the profile's.
    comm: a named setting of the communication layer (workbench.experiment.communication); None
        means what the profile says.

    The name is ``PLACEMENT[#REPLICA][+key=value...]``: ``own-1``, ``shared#2``,
    ``own-2+steps=2+agreement=off``, ``none+comm=nccl-ring``.
    """

    placement: str
    group: int | None = None
    replica: int | None = None
    steps: int | None = setting()
    topk: int | None = setting()
    draft_tokens: int | None = setting()
    agreement: str | None = setting(words=("broadcast", "check", "off"), audit="off")
    timing: str | None = setting(words=("on", "off"), audit="off")
    comm: str | None = setting(words=tuple(SETTINGS), server=True)

    @classmethod
    def settings(cls) -> dict[str, ArmSetting]:
        """{name: setting} of all in which an arm can depart from its profile, in their order."""
        return {f.name: f.metadata["setting"] for f in fields(cls) if "setting" in f.metadata}

    @classmethod
    def parse(cls, name: str) -> Arm:
        """The arm of a name.

        Raises: BadInput when the name is not one of the grammar above.
        """
        match = _NAME.fullmatch(str(name))
        if match is None:
            raise BadInput(
                "arm",
                f"{name!r} is unknown",
                "use none, shared or own-N, with +key=value for a setting",
            )
        known, chosen = cls.settings(), {}
        for item in filter(None, match["settings"].split("+")):
            key, text = item.split("=")
            value = known[key].value(text) if key in known else None
            if value is None:
                raise BadInput("arm", f"{name!r} has the unknown setting {item!r}", _use(known))
            chosen[key] = value
        if match["placement"] == "none" and any(not known[key].server for key in chosen):
            raise BadInput(
                "arm", f"{name!r} gives settings of a draft to an arm without one", "use plain none"
            )
        group = int(match["group"]) if match["group"] else None
        replica = int(match["replica"]) if match["replica"] else None
        return cls(match["placement"].split("-")[0], group, replica, **chosen)

    @property
    def name(self) -> str:
        name = self.placement if self.group is None else f"own-{self.group}"
        name += f"#{self.replica}" if self.replica else ""
        return name + "".join(f"+{key}={value}" for key, value in self.departures.items())

    @property
    def departures(self) -> dict[str, int | str]:
        """{setting: value} of those in which the arm departs from its profile."""
        given = {key: getattr(self, key) for key in self.settings()}
        return {key: value for key, value in given.items() if value is not None}

    @property
    def served_as(self) -> tuple[tuple[str, int | str], ...]:
        """The settings that are a server's: arms that differ in one cannot share a server."""
        known = self.settings()
        return tuple((key, value) for key, value in self.departures.items() if known[key].server)

    @property
    def audits(self) -> bool:
        """Whether it is measured only to tell what the workbench itself costs."""
        known = self.settings()
        return any(value == known[key].audit for key, value in self.departures.items())

    @property
    def speculates(self) -> bool:
        return self.placement != "none"

    @property
    def configuration(self) -> Arm:
        """The arm without its replica label: equal for two arms that are served by the same
        configuration.
        """
        return replace(self, replica=None)


def _use(known: dict[str, ArmSetting]) -> str:
    numbers = [key for key, found in known.items() if found.words is None]
    words = [
        f"{key} with one of {', '.join(found.words)}"
        for key, found in known.items()
        if found.words is not None
    ]
    return f"use {', '.join(numbers)} with a number, or {' or '.join(words)}"
