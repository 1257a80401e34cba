"""What the workbench orders an engine process to do: one JSON value in the environment, the only
way into SGLang's spawned processes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields

# the release that the patch is written against; every citation of its source is of this one
SGLANG = "0.5.23"
VARIABLE = "DRAFT_TP_ORDERS"
SHARED_MEMORY = (  # off: ranks on a CPU talk through gloo alone (engine/cpu/shared.py)
    "DRAFT_TP_SHARED_MEMORY"
)


@dataclass(frozen=True)
class Draft:
    """One draft in memory: on the target's TP group (``group`` None) or on groups of ``group``
    consecutive ranks; equal ones by number.
    """

    group: int | None = None
    number: int = 1


@dataclass(frozen=True)
class Placement:
    """What one arm asks of its draft.

    group: ranks of one draft group, None for the target's TP group.
    number: tells apart drafts of one size that are held twice, for a control; arms of equal group
        and number share their draft's weights and KV pool.
    steps, draft_tokens: of the chain or tree; None where the server's own flags say it.
    agreement: ``broadcast`` (rank 0's tree is verified everywhere), ``check`` (compare, stop on a
        difference) or ``off``; only a draft on groups of its own needs any.
    timing: ``on`` or ``off``: whether each stage is timed while this arm is active.
    """

    arm: str
    group: int | None = None
    number: int = 1
    steps: int | None = None
    draft_tokens: int | None = None
    agreement: str = "broadcast"
    timing: str = "on"

    @property
    def draft(self) -> Draft:
        return Draft(self.group, self.number)


@dataclass(frozen=True)
class Orders:
    """Orders for every process of one server.

    server: the identity it reports, so that a client knows whose answer it reads.
    arms: the placements this server holds, the first active at start; empty for a server without
        a draft.
    cpu: serve on the CPU engine.
    overlap: with the overlapping scheduler loop there, which SGLang turns off on a CPU; for tests
        of it.
    omit, corrupt_rank, refusing_rank: faults for negative controls only: a place of the patch left
    out ("kv_pool", "embedding", "kv_budget"; of a server of several arms "forced_state",
    "target_scope"), a rank whose draft tokens are shifted, a rank that refuses the last arm. A
    server with a fault reports it, and the workbench takes no result from it.
    """

    server: str = ""
    arms: tuple[Placement, ...] = ()
    cpu: bool = False
    overlap: bool = False
    omit: tuple[str, ...] = ()
    corrupt_rank: int | None = None
    refusing_rank: int | None = None

    @property
    def separates(self) -> bool:
        return any(placement.group for placement in self.arms)

    @property
    def drafts(self) -> tuple[Draft, ...]:
        """The drafts in memory, that of the first arm first."""
        return tuple(dict.fromkeys(placement.draft for placement in self.arms))

    @property
    def hot(self) -> bool:
        """Whether the server switches between arms."""
        return len(self.arms) > 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Orders:
        """Raises: ValueError when the text is not a complete set of known orders."""
        data = json.loads(text)
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"unknown orders {sorted(unknown)}")
        data["arms"] = tuple(Placement(**arm) for arm in data.get("arms", ()))
        data["omit"] = tuple(data.get("omit", ()))
        return cls(**data)

    @classmethod
    def from_environment(cls) -> Orders | None:
        """The orders of this process; None when it was not started by the workbench."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls.from_json(text)
