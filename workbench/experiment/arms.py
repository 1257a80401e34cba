"""An arm: one configuration under test, and the grammar of its name."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from workbench.experiment.communication import SETTINGS
from workbench.experiment.errors import BadInput

WORDS = {
    "agreement": ("broadcast", "check", "off"),
    "timing": ("on", "off"),
    "comm": tuple(SETTINGS),
}
_NAME = re.compile(
    r"(?P<placement>none|shared|own-(?P<group>[1-9]\d*))(#(?P<replica>[1-9]\d*))?(?P<settings>(\+[a-z_]+=[a-z0-9-]+)*)"
)
_INTEGERS = ("steps", "topk", "draft_tokens")


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
    steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    agreement: str | None = None
    timing: str | None = None
    comm: str | None = None

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
        settings: dict[str, int | str] = {}
        for item in filter(None, match["settings"].split("+")):
            key, value = item.split("=")
            if key in _INTEGERS and value.isdigit():
                settings[key] = int(value)
            elif value in WORDS.get(key, ()):
                settings[key] = value
            else:
                raise BadInput(
                    "arm",
                    f"{name!r} has the unknown setting {item!r}",
                    f"use {', '.join(_INTEGERS)} with a number, or "
                    + " or ".join(
                        f"{word} with one of {', '.join(values)}" for word, values in WORDS.items()
                    ),
                )
        if match["placement"] == "none" and settings.keys() - {"comm"}:
            raise BadInput(
                "arm", f"{name!r} gives settings of a draft to an arm without one", "use plain none"
            )
        group = int(match["group"]) if match["group"] else None
        replica = int(match["replica"]) if match["replica"] else None
        return cls(match["placement"].split("-")[0], group, replica, **settings)

    @property
    def name(self) -> str:
        name = self.placement if self.group is None else f"own-{self.group}"
        name += f"#{self.replica}" if self.replica else ""
        chosen = (*_INTEGERS, *WORDS)
        return name + "".join(
            f"+{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name in chosen and getattr(self, f.name) is not None
        )

    @property
    def speculates(self) -> bool:
        return self.placement != "none"

    @property
    def configuration(self) -> Arm:
        """The arm without its replica label: equal for two arms that are served by the same
        configuration.
        """
        return replace(self, replica=None)
