"""The files of a model folder: its JSON, and the tensors that its safetensors hold, without reading
their contents.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from workbench.experiment.errors import BadInput

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}


@dataclass(frozen=True)
class Tensor:
    """One weight as stored: its name, shape and safetensors dtype (``F32``, ``BF16``, ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)


def weight_files(folder: Path, field: str) -> list[Path]:
    """The safetensors files of a folder, by its index where it has one.

    Raises: BadInput when the index names a file that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    named = read_json(index, field).get("weight_map", {})
    files = [folder / name for name in sorted(set(named.values()))]
    for path in files:
        if not path.is_file():
            raise BadInput(
                field,
                f"{path.name} is missing, which {index.name} names",
                "download the folder again",
            )
    return files


def header(path: Path, field: str) -> list[Tensor]:
    """What one safetensors file holds. Raises: BadInput when it is damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = ((name, file.get_slice(name)) for name in file.keys())
            return [Tensor(name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices]
    except (SafetensorError, OSError) as error:
        raise BadInput(
            field,
            f"{path.name} is damaged ({str(error).rstrip('.')})",
            "download or build it again",
        ) from None


def read_json(path: Path, field: str) -> dict[str, Any]:
    """The fields of a JSON file. Raises: BadInput when it is missing or holds none."""
    try:
        data = json.loads(path.read_text())
    except OSError:
        raise BadInput(
            field,
            f"{path.parent} has no readable {path.name}",
            "give the folder of a model, with config.json and *.safetensors",
        ) from None
    except ValueError:
        raise BadInput(
            field, f"{path.name} is not valid JSON", "download or write it again"
        ) from None
    if not isinstance(data, dict):
        raise BadInput(field, f"{path.name} holds no fields", "download or write it again")
    return data
