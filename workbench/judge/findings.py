"""The kinds of finding that the verdict or several notebooks read."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from workbench.experiment import findings
from workbench.experiment.findings import Found
from workbench.experiment.runlog import NEGATIVE, Finding, Line


class Wiring(Found):
    """Is the pair served as it was trained? Rounds by number of correct drafts (histograms).

    ok: None where it was not checked, for the reason in the sentence.
    alternatives: the reference's histograms with other layers, by what was changed.
    """

    ok: bool | None
    sentence: str
    server: list[int] | None = None
    reference: list[int] | None = None
    alternatives: dict[str, list[int]] | None = None


class CorruptedRank(Found):
    """What a server did that held one rank with a corrupted draft.

    within_s: seconds from the start's beginning.
    attested: whether every rank reported the placement; None where the server never got so far.
    """

    detected: bool
    sentence: str
    rank: int
    within_s: float
    attested: bool | None = None


class PlannedLooks(Found):
    """After how many server starts a live run may end, fixed before its first block."""

    looks: list[int]


class Watched(Found):
    """Somebody saw the experiment's interval while it was measured, first after so many starts."""

    starts: int


class Stopped(Found):
    """Why an experiment ended before its plan was spent: decided, resolution or seconds."""

    why: str
    blocks_left: int | None = None


class GpuMemory(Found):
    """Free bytes of each GPU before the first server and after the last."""

    free_before: list[int]
    free_after: list[int]
    given_back: bool


class SettingTried(Found):
    """One setting of the communication layer in 06's search.

    state: skipped, failed, searched, compared or not tried yet, with the reason.
    blocks: blocks of the arms that were searched with it, under the name that says which arms.
    """

    model_config = Found.model_config | {"extra": "allow"}
    __pydantic_extra__: dict[str, int]

    setting: str
    made_of: str = Field(alias="made of")
    state: str
    speed: float | None = Field(None, alias="speed (% of the best)")
    about: str


def corrupted_ranks(records: Iterable[Line]) -> dict[str, CorruptedRank]:
    """{arm: what its server with a corrupted rank did}, in the log's order
    (workbench/answers/negative_control.py).
    """
    return {
        r.name: findings.read(r, CorruptedRank)
        for r in records
        if isinstance(r, Finding) and r.experiment == NEGATIVE
    }
