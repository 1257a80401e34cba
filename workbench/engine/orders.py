"""What the workbench orders an engine process to do: one JSON value in the environment, the only way into SGLang's spawned processes."""
from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields

VARIABLE = "DRAFT_TP_ORDERS"


@dataclass(frozen=True)
class Placement:
    """Where one arm's draft runs: on the target's TP group (``group`` None) or on groups of ``group`` consecutive ranks."""

    arm: str
    group: int | None = None


@dataclass(frozen=True)
class Orders:
    """Orders for every process of one server.

    server: the identity it reports, so that a client knows whose answer it reads.
    arms: the placements this server holds, the first in force at start; empty for a server without a draft.
    agreement: ``broadcast`` (rank 0's tree is verified everywhere), ``check`` (compare, stop on a difference) or ``off``.
    cpu: serve on the CPU engine.
    omit, corrupt_rank: faults for negative controls only: a place of the patch left out ("kv_pool", "embedding", "kv_budget"),
        a rank whose draft tokens are shifted. A server with a fault attests it, and the workbench takes no result from it.
    """

    server: str = ""
    arms: tuple[Placement, ...] = ()
    agreement: str = "broadcast"
    cpu: bool = False
    omit: tuple[str, ...] = ()
    corrupt_rank: int | None = None

    @property
    def separates(self) -> bool:
        return any(placement.group for placement in self.arms)

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
