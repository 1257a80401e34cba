"""Basis: what predictions stand on, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workbench.experiment.arms import Arm
from workbench.predict.machine import Machine
from workbench.predict.model_shape import ModelShape


@dataclass(frozen=True)
class Basis:
    """What predictions stand on: the machine's measured inputs and the shapes of the pair; or, in
    ``why``, why there are none.

    host: {arm: seconds that the host needs for a cycle}, as the recording host_from tells of this
        machine; empty where none does.
    """

    inputs: Machine | None = None
    target: ModelShape | None = None
    draft: ModelShape | None = None
    why: str = ""
    host: Mapping[str, float] = field(default_factory=dict)
    host_from: str = ""

    def host_s(self, arm: Arm) -> float:
        """Seconds that the host needs for a cycle of an arm; an unknown own-N's are own-1's, whose
        broadcast it launches too, or shared's.
        """
        like = (
            arm.name,
            *(["own-1"] if arm.placement == "own" else []),
            "shared" if arm.speculates else "none",
        )
        return next((self.host[name] for name in like if name in self.host), 0.0)
