"""A check: one thing found out before a server is started, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """name: the field of the profile or of a model's config.json that it is about. mend: empty
    where nothing is to be done.
    """

    name: str
    status: Literal["passed", "warned", "refused"]
    detail: str
    mend: str = ""


def passed(name: str, detail: str) -> Check:
    return Check(name, "passed", detail)


def warned(name: str, detail: str, mend: str) -> Check:
    return Check(name, "warned", detail, mend)


def refused(name: str, detail: str, mend: str) -> Check:
    return Check(name, "refused", detail, mend)
