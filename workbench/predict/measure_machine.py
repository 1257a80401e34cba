"""This machine measured by one process a rank, and the inputs that a profile's predictions take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from workbench.experiment.errors import WorkbenchError
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import ROOT
from workbench.predict.machine import (
    FOLDER,
    INPUTS,
    NOT_REACHED,
    Machine,
    custom_all_reduce,
    latencies,
    load,
    log,
    name_of,
    rates,
    save,
    unmeasured,
)
from workbench.serving import faults, server_log

PROGRAM = (sys.executable, "-m", "workbench.engine.machine_bench")


# on an idle machine less than two minutes are taken, half of one by the first import of SGLang
DEADLINE_S = 300


def measure(
    engine: str,
    ranks: int,
    *,
    name: str,
    environment: Mapping[str, str] | None = None,
    custom: bool = True,
    deadline_s: float = DEADLINE_S,
) -> Machine:
    """Measure this machine with one process a rank (workbench/engine/machine_bench.py), all of
    which have ended on return.

    What fails, or is not reached within ``deadline_s``, is unknown with its reason; the rest is
    kept.
    environment: the profile's server environment, so that NCCL is set as it is when serving.
    custom: SGLang's own all-reduce too.
    Raises: WorkbenchError when nothing at all could be measured.
    """
    begun, why = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder, "result.json"), Path(folder, "log")
        order = json.dumps(
            {"engine": engine, "ranks": ranks, "custom": custom, "result": str(result)}
        )
        supervisor = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "workbench.serving.supervisor",
                uuid.uuid4().hex[:12],
                str(output),
                "-",
                *PROGRAM,
                order,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=ROOT,
            # Gloo looks up the host's own name, which a machine without a network may not resolve;
            # all ranks are here.
            env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **(environment or {})},
        )
        try:
            supervisor.wait(deadline_s)
        except subprocess.TimeoutExpired:
            why = f"it took more than {deadline_s:g} s"
        finally:
            supervisor.communicate(timeout=60)  # closes the pipe, which ends what is left
        failure = ": ".join(filter(None, [why, server_log.clean(_last(output))]))
        found = json.loads(result.read_text()) if result.exists() else {}
    found = _with_reasons(found, failure)
    if not any(found.get(rate) for rate in INPUTS) and not any(
        entry["points"] for entry in found.get("latencies", [])
    ):
        reason = next(iter(found["unknown"].values())) if found else failure
        raise WorkbenchError(f"the machine could not be measured: {reason}")
    return Machine.from_json(
        found
        | {
            "name": name,
            "engine": engine,
            "ranks": ranks,
            "seconds": round(time.monotonic() - begun, 1),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
    )


def _with_reasons(found: dict[str, Any], failure: str) -> dict[str, Any]:
    """What was not reached has the reason why the measurement ended before it."""

    def reason(why: str) -> str:
        return f"{why}: {failure}" if why == NOT_REACHED else why

    if not found:
        return found
    return found | {
        "unknown": {name: reason(why) for name, why in found["unknown"].items()},
        "latencies": [entry | {"why": reason(entry["why"])} for entry in found["latencies"]],
    }


def _last(output: Path) -> str:
    if fault := faults.first(output):
        return fault.sentence
    return next(iter(server_log.tail(output, 1)), "it said nothing")


def main(profile: Profile, folder: Path = FOLDER) -> Machine:
    """``workbench bench machine PROFILE``: measure the machine as the profile uses it, save it
    under its name, and log what was found.

    Raises: BadInput when the profile's GPUs are not here; WorkbenchError when the measurement
        fails.
    """
    name = name_of(profile)
    machine = measure(
        profile.engine,
        profile.tp,
        name=name,
        environment=profile.server.environment,
        custom=custom_all_reduce(profile),
    )
    path = save(machine, folder)
    caveat = "; a CPU says nothing about GPUs" if machine.engine == "cpu" else ""
    tables = [
        table.to_string(index=False, float_format="{:.4g}".format)
        for table in (rates(machine), latencies(machine))
    ]
    log.info("%s, measured in %.0f s%s\n%s", path.name, machine.seconds, caveat, "\n".join(tables))
    for what, why in unmeasured(machine).items():
        log.warning("%s: %s", what, why)
    return machine


def saved_or_measured(profile: Profile, folder: Path = FOLDER) -> Machine:
    """The machine of a profile: as saved, else measured now.

    Raises: as ``main``.
    """
    return load(name_of(profile), folder) or main(profile, folder)
