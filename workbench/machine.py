"""The cost model's measured inputs: what one machine needs for bytes, operations, launches and collectives; saved and used again."""
from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import ConfigDict, TypeAdapter, ValidationError

from workbench import logs
from workbench.errors import BadInput, WorkbenchError
from workbench.profile import ROOT, Profile

log = logging.getLogger(__name__)
FOLDER = ROOT / "outputs" / "machines"
DEADLINE_S = 600            # on an idle machine less than two minutes are taken, half of one by the first import of SGLang


@dataclass(frozen=True)
class Latency:
    """What one collective takes, by size. kind: all_reduce, all_gather or broadcast; backend: nccl, custom (SGLang's own all-reduce) or
    gloo; ranks: of the group; graph: inside a CUDA graph. points: (bytes of one rank's input, seconds on the slowest rank), by size.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    kind: str
    backend: str
    ranks: int
    graph: bool
    points: tuple[tuple[int, float], ...]

    def at(self, size: float) -> float:
        """Seconds for a message of ``size`` bytes: linear between the measured ones (Hockney's latency + size / bandwidth, Parallel
        Computing 20, 1994, piece by piece), the smallest one's below them, the last piece's line above them."""
        sizes, seconds = (np.array(column, dtype=float) for column in zip(*self.points))
        if size <= sizes[-1] or len(sizes) == 1:
            return float(np.interp(size, sizes, seconds))
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return float(seconds[-1] + max(0.0, slope) * (size - sizes[-1]))


@dataclass(frozen=True)
class Machine:
    """One machine as measured, under one set of communication settings.

    copy_bytes_per_s: read and written bytes of a large copy; matrix_ops_per_s: of a large square product (bf16 on GPUs, fp32 on one
    core of a CPU); launch_s: one small kernel launched by itself; graph_launch_s: one more kernel in a CUDA graph; graph_replay_s: one
    replay of a graph; both None on a CPU. Everything is the slowest rank's with all ranks at work. seconds: what measuring took.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    engine: str
    ranks: int
    copy_bytes_per_s: float
    matrix_ops_per_s: float
    launch_s: float
    graph_launch_s: float | None
    graph_replay_s: float | None
    latencies: tuple[Latency, ...]
    torch: str = ""
    time: str = ""
    seconds: float = 0.0

    def collective_s(self, kind: str, size: float, ranks: int, *, graph: bool = False, custom: bool = True) -> float:
        """Seconds of one collective of ``size`` bytes (of one rank's input) in a group of ``ranks``; a group of one talks to nobody.

        As SGLang chooses: its custom all-reduce up to its largest measured size where allowed, else NCCL (parallel_state.py:959).
        Raises: BadInput when the machine was not measured for it.
        """
        if ranks == 1:
            return 0.0
        fitting = [t for t in self.latencies if (t.kind, t.ranks) == (kind, ranks)]
        fitting = [t for t in fitting if t.graph == graph] or fitting
        own = [t for t in fitting if t.backend == "custom" and custom and size <= t.points[-1][0]]
        chosen = own or [t for t in fitting if t.backend != "custom"]
        if not chosen:
            raise BadInput("machine", f"{self.name} has no {kind} measured for groups of {ranks}",
                           "measure it again: workbench bench machine")
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
            raise BadInput("machine", f"{'.'.join(map(str, first['loc'])) or 'it'} is wrong ({first['msg']})", "measure it again") from None


_MACHINE = TypeAdapter(Machine)


def name_of(profile: Profile) -> str:
    """The machine's name under a profile: its devices, how many ranks use them, and the profile's NCCL settings, which change latencies.

    Raises: BadInput when the profile is for GPUs and fewer than its ranks are visible.
    """
    if profile.engine == "cpu":
        devices = f"cpu {len(os.sched_getaffinity(0))} cores"
    else:
        found = _gpus({**os.environ, **profile.server.environment}.get("CUDA_VISIBLE_DEVICES"))
        if len(found) < profile.tp:
            raise BadInput("tp", f"is {profile.tp}, but {len(found) or 'no'} GPU{'s are' if len(found) != 1 else ' is'} visible",
                           "measure on the machine that serves the profile")
        devices = " ".join(dict.fromkeys(found[:profile.tp]))
    settings = [f"{key}={value}" for key, value in sorted(profile.server.environment.items()) if key.startswith("NCCL_")]
    return re.sub(r"[^a-z0-9=_.]+", "-", " ".join([f"{profile.tp} ranks", devices, *settings]).lower()).strip("-")


def _gpus(visible: str | None) -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"] + ([f"--id={visible}"] if visible else [])
    try:
        return [] if visible == "" else subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


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
        raise BadInput("machine", f"{path.name} is not valid JSON", "delete it and measure again") from None


def measure(engine: str, ranks: int, *, name: str, environment: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S) -> Machine:
    """Measure this machine with one process a rank (workbench/engine/measure.py), all of which have ended on return.

    environment: the profile's server environment, so that NCCL is set as it is when serving.
    Raises: WorkbenchError when the measurement fails or takes longer than ``deadline_s``.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder, "result.json"), Path(folder, "log")
        order = json.dumps({"engine": engine, "ranks": ranks, "result": str(result)})
        command = [sys.executable, "-m", "workbench.engine.measure", order]
        keeper = subprocess.Popen(
            [sys.executable, "-m", "workbench.keeper", uuid.uuid4().hex[:12], str(output), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, cwd=ROOT,
            # Gloo looks up the host's own name, which a machine without a network may not resolve.
            env={**os.environ, **({"GLOO_SOCKET_IFNAME": "lo"} if engine == "cpu" else {}), **(environment or {})})
        try:
            keeper.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise WorkbenchError(f"the machine could not be measured within {deadline_s:g} s: {_last(output)}") from None
        finally:
            keeper.communicate(timeout=60)          # closes the pipe, which ends what is left
        if not result.exists():
            raise WorkbenchError(f"the machine could not be measured: {_last(output)}")
        found = json.loads(result.read_text())
    return Machine.from_json(found | {"name": name, "engine": engine, "ranks": ranks, "seconds": round(time.monotonic() - begun, 1),
                                      "time": datetime.now(timezone.utc).isoformat(timespec="seconds")})


def _last(output: Path) -> str:
    said = logs.first_failure(output) or "\n".join(logs.tail(output, 5))
    return said.splitlines()[-1] if said else "it said nothing"


def main(profile: Profile, folder: Path = FOLDER) -> Machine:
    """``workbench bench machine PROFILE``: measure the machine as the profile uses it, save it under its name, and log what was found.

    Raises: BadInput when the profile's GPUs are not here; WorkbenchError when the measurement fails.
    """
    name = name_of(profile)
    machine = measure(profile.engine, profile.tp, name=name, environment=profile.server.environment)
    path = save(machine, folder)
    caveat = "; a CPU says nothing about GPUs" if machine.engine == "cpu" else ""
    log.info("%s, measured in %.0f s%s\n%s", path.name, machine.seconds, caveat, table(machine).to_string(index=False))
    return machine


def of(profile: Profile, folder: Path = FOLDER) -> Machine:
    """The machine of a profile: as saved, else measured now.

    Raises: as ``main``.
    """
    return load(name_of(profile), folder) or main(profile, folder)


def table(machine: Machine) -> pd.DataFrame:
    """One row an input: what it is, its value and unit."""
    rows = [("copy", machine.copy_bytes_per_s / 1e9, "GB/s"), ("matrix product", machine.matrix_ops_per_s / 1e12, "TFLOP/s"),
            ("kernel launch", 1e6 * machine.launch_s, "us")]
    if machine.graph_launch_s is not None and machine.graph_replay_s is not None:
        rows += [("kernel in a graph", 1e6 * machine.graph_launch_s, "us"), ("graph replay", 1e6 * machine.graph_replay_s, "us")]
    rows += [(f"{t.kind} of {size} bytes, {t.ranks} ranks, {t.backend}{', in a graph' if t.graph else ''}", 1e6 * seconds, "us")
             for t in machine.latencies for size, seconds in t.points]
    return pd.DataFrame(rows, columns=["input", "value", "unit"])
