"""Findings as types: what a notebook found is checked when it is written and when it is read."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from workbench.experiment.errors import WorkbenchError
from workbench.experiment.runlog import Finding

T = TypeVar("T")


class Found(BaseModel):
    """A kind of finding. What the log lacks of it has its default; it holds nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def plain(value: Any, kind: Any = None) -> Any:
    """A finding's value as the log holds it: plain types, without what was not said.

    kind: the type of the value where its class does not say it all, as list[Check].
    """
    return _adapter(kind or type(value)).dump_python(
        value, mode="json", by_alias=True, exclude_unset=True
    )


def read(record: Finding, kind: type[T]) -> T:
    """The value of a finding in the log, as the type that it was written as.

    Raises: WorkbenchError when it is another.
    """
    try:
        return _adapter(kind).validate_python(record.value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise WorkbenchError(
            f"runs.jsonl: the finding {record.name} of {record.experiment} is damaged: {where} is"
            f" wrong ({first['msg']}); restore the file or drop that line."
        ) from None


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)
