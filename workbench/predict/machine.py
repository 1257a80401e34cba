"""The cost model's measured inputs: what one machine needs for bytes, operations, launches and
collectives; saved and used again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import ConfigDict, TypeAdapter, ValidationError

from workbench.engine.orders import SHARED_MEMORY
from workbench.experiment.errors import BadInput
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import ROOT
from workbench.serving import gpus

log = logging.getLogger(__name__)
THIN_BYTES = (
    2 * 7168 * 7168
)  # weights of the thin product on a GPU (workbench/engine/machine_bench.py)
NOT_REACHED = "not reached"  # as workbench/engine/machine_bench.py writes it
FOLDER = ROOT / "outputs" / "machines"
# Settings of a server that change what a collective takes. Debugging output does not, or should
# not.
_CHANGE_LATENCIES = re.compile(
    r"NCCL_(?!DEBUG)|TORCH_SYMM_MEM_|SGLANG_\w*CUSTOM_ALL_REDUCE|" + SHARED_MEMORY
)


@dataclass(frozen=True)
class Latency:
    """What one collective takes, by size. kind: all_reduce, all_gather or broadcast; backend: nccl,
    custom (SGLang's own all-reduce), gloo or shared (memory of a CPU's ranks); ranks: of the
    group; graph: inside a CUDA graph. points: (bytes of one rank's input, seconds on the slowest
    rank), by size; where there are none, why says so, and unused that SGLang does without it
    here.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    kind: str
    backend: str
    ranks: int
    graph: bool
    points: tuple[tuple[int, float], ...]
    why: str = ""
    unused: bool = False

    @property
    def name(self) -> str:
        return (
            f"{self.kind}, {self.ranks} ranks, {self.backend}{', in a graph' if self.graph else ''}"
        )

    def at(self, size: float) -> float:
        """Seconds for a message of ``size`` bytes: linear between the measured ones (Hockney's
        latency + size / bandwidth, Parallel Computing 20, 1994, piece by piece), the smallest
        one's below them, the last piece's line above them.
        """
        sizes, seconds = (np.array(column, dtype=float) for column in zip(*self.points))
        if size <= sizes[-1] or len(sizes) == 1:
            return float(np.interp(size, sizes, seconds))
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return float(seconds[-1] + max(0.0, slope) * (size - sizes[-1]))


@dataclass(frozen=True)
class Machine:
    """One machine as measured, under one set of communication settings.

    copy_bytes_per_s: read and written bytes of a large copy.
    thin_bytes_per_s: weights read by a product of a few rows with them, which is what a cycle does.
    matrix_ops_per_s: of a large square product (bf16 on GPUs, fp32 on one core of a CPU).
    launch_s: one small kernel launched by itself.
    graph_launch_s: one more kernel in a CUDA graph.
    graph_replay_s: one replay of a graph; both None on a CPU. Everything is the slowest rank's with
        all ranks at work.
    unknown: {field: why it was not measured}.
    seconds: what measuring took.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    engine: str
    ranks: int
    copy_bytes_per_s: float | None = None
    thin_bytes_per_s: float | None = None
    matrix_ops_per_s: float | None = None
    launch_s: float | None = None
    graph_launch_s: float | None = None
    graph_replay_s: float | None = None
    latencies: tuple[Latency, ...] = ()
    unknown: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    time: str = ""
    seconds: float = 0.0

    def known(self, name: str) -> float:
        """The measured input of that name (a field of this class).

        Raises: BadInput with the reason when it was not measured.
        """
        value = getattr(self, name)
        if value is None:
            raise _missing(self.name, INPUTS[name][0], self.unknown.get(name, "it was not tried"))
        return value

    def read_s(self, size: float, products: float) -> float:
        """Seconds for products of a few rows to read ``size`` bytes of weights in all.

        A GPU reads large weights at a copy's bandwidth; what the measured product took beyond that
        each product takes, however large it is (Hockney's latency + size / bandwidth). Elsewhere,
        and where a product is as fast as a copy, all bytes go at the product's rate.
        Raises: BadInput when products were not measured.
        """
        thin, copy = self.known("thin_bytes_per_s"), self.copy_bytes_per_s or 0.0
        if self.engine == "cpu" or copy <= thin:
            return size / thin
        return size / copy + products * THIN_BYTES * (1 / thin - 1 / copy)

    def collective_s(
        self, kind: str, size: float, ranks: int, *, graph: bool = False, custom: bool = True
    ) -> float:
        """Seconds of one collective of ``size`` bytes (of one rank's input) in a group of
        ``ranks``; a group of one talks to nobody.

        As SGLang chooses: its custom all-reduce up to its largest measured size where allowed, else
        NCCL (parallel_state.py:960 ca_comm).
        Raises: BadInput when the machine was not measured for it.
        """
        if ranks == 1:
            return 0.0
        fitting = [t for t in self.latencies if (t.kind, t.ranks) == (kind, ranks)]
        fitting = [t for t in fitting if t.graph == graph] or fitting
        own = [
            t
            for t in fitting
            if t.backend == "custom"
            and custom
            and not t.unused
            and (not t.points or size <= t.points[-1][0])
        ]
        chosen = own or [t for t in fitting if t.backend != "custom"]
        if not chosen or not chosen[0].points:
            missing = chosen[0].name if chosen else f"{kind} in groups of {ranks}"
            raise _missing(self.name, missing, chosen[0].why if chosen else "it was not tried")
        return chosen[0].at(size)

    def to_json(self) -> dict:
        return _MACHINE.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, data: object) -> Machine:
        """Raises: BadInput when it is no complete machine."""
        try:
            return _MACHINE.validate_python(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise BadInput(
                "machine",
                f"{'.'.join(map(str, first['loc'])) or 'it'} is wrong ({first['msg']})",
                "measure it again",
            ) from None


_MACHINE = TypeAdapter(Machine)
# What each rate is called, and how it is written: times what, in which unit.
INPUTS = {
    "copy_bytes_per_s": ("copy", 1e-9, "GB/s"),
    "thin_bytes_per_s": ("weights read by a thin product", 1e-9, "GB/s"),
    "matrix_ops_per_s": ("matrix product", 1e-12, "TFLOP/s"),
    "launch_s": ("kernel launch", 1e6, "us"),
    "graph_launch_s": ("kernel in a graph", 1e6, "us"),
    "graph_replay_s": ("graph replay", 1e6, "us"),
}


def _missing(machine: str, what: str, why: str) -> BadInput:
    return BadInput(
        "machine",
        f"of {machine} there is no {what} ({why.rstrip('.')})",
        "measure it again: workbench bench machine PROFILE",
    )


def name_of(profile: Profile) -> str:
    """The machine's name under a profile: its devices, how many ranks use them, and the settings
    that change latencies.

    Raises: BadInput when the profile is for GPUs and fewer than its ranks are visible.
    """
    if profile.engine == "cpu":
        devices = f"cpu {len(os.sched_getaffinity(0))} cores {platform.machine()}"
    else:
        found = [gpu.name for gpu in gpus.ours(profile)]
        if len(found) < profile.tp:
            raise BadInput(
                "tp",
                f"is {profile.tp}, but {len(found) or 'no'}"
                f" GPU{'s are' if len(found) != 1 else ' is'} visible",
                "measure on the machine that serves the profile",
            )
        devices = " ".join(dict.fromkeys(found[: profile.tp]))
    settings = [
        f"{key}={value}"
        for key, value in sorted({**os.environ, **profile.server.environment}.items())
        if _CHANGE_LATENCIES.match(key)
    ]
    settings += [] if custom_all_reduce(profile) else ["no custom all-reduce"]
    return re.sub(
        r"[^a-z0-9=_.]+", "-", " ".join([f"{profile.tp} ranks", devices, *settings]).lower()
    ).strip("-")


def custom_all_reduce(profile: Profile) -> bool:
    """Whether the profile leaves SGLang its own all-reduce."""
    return not profile.flag("disable-custom-all-reduce", False)


def save(machine: Machine, folder: Path = FOLDER) -> Path:
    """Write the machine under its name; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{machine.name}.json"
    path.write_text(json.dumps(machine.to_json(), indent=1))
    return path


def load(name: str, folder: Path = FOLDER) -> Machine | None:
    """The saved machine of that name; None when it was not measured yet.

    Raises: BadInput when the file is damaged.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        return Machine.from_json(json.loads(path.read_text()))
    except ValueError:
        raise BadInput(
            "machine", f"{path.name} is not valid JSON", "delete it and measure again"
        ) from None


def rates(machine: Machine) -> pd.DataFrame:
    """One row an input of one device: what it is, its value and unit; an unknown one is NaN."""
    rows = [
        (called, math.nan if (value := getattr(machine, name)) is None else factor * value, unit)
        for name, (called, factor, unit) in INPUTS.items()
        if getattr(machine, name) is not None or name in machine.unknown
    ]
    return pd.DataFrame(rows, columns=["input", "value", "unit"])


def latencies(machine: Machine) -> pd.DataFrame:
    """One row a collective, in microseconds by the bytes of one rank's input; an unknown one is
    NaN, what SGLang does not use says so.
    """
    sizes = sorted({size for t in machine.latencies for size, _ in t.points})
    rows = []
    for t in machine.latencies:
        other = (
            "not used"
            if t.unused
            else "left to NCCL"
            if t.points and t.backend == "custom"
            else math.nan
        )
        found = {size: 1e6 * seconds for size, seconds in t.points}
        rows.append(
            (
                t.kind.replace("_", "-"),
                t.ranks,
                t.backend,
                "yes" if t.graph else "no",
                *(found.get(size, other) for size in sizes),
            )
        )
    return pd.DataFrame(
        rows,
        columns=[
            "collective",
            "ranks",
            "back end",
            "in a graph",
            *(f"{_bytes(size)} (us)" for size in sizes),
        ],
    )


def unmeasured(machine: Machine) -> dict[str, str]:
    """{what was not measured: why}, in words."""
    return {INPUTS[name][0]: f"unknown: {why}" for name, why in machine.unknown.items()} | {
        t.name: f"{'not used by SGLang here' if t.unused else 'unknown'}: {t.why}"
        for t in machine.latencies
        if not t.points
    }


def _bytes(size: int) -> str:
    return f"{size // 1024} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
