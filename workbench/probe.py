"""Does this SGLang have an option for the draft's TP size? Arguments, environment, run-time calls and model code, read from what is installed."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from workbench.engine.cpu.paths import python_path
from workbench.errors import WorkbenchError

# What an option for the draft's TP would have to be called: it speaks of the draft (or speculation) and of parallelism.
_DRAFT = re.compile(r"(?i)draft|specul")
_PARALLEL = re.compile(r"(?i)(^|[-_ ])tp($|[-_ ])|tensor.?parallel|parallel.?size")


@dataclass(frozen=True)
class Place:
    """One thing that could set the draft's TP. kind: argument, environment, run-time call or model code; where: file and line, if known."""

    kind: str
    name: str
    about: str
    where: str = ""

    @property
    def draft(self) -> bool:
        return bool(_DRAFT.search(self.name))

    @property
    def sets_draft_tp(self) -> bool:
        """It names both the draft and parallelism. What a help text only mentions is listed, not counted."""
        return self.draft and bool(_PARALLEL.search(self.name))


@cache
def installed() -> dict[str, Any]:
    """What the installed SGLang says of itself: {"version", "places": [...], "source": {name: {"where", "text"}}, "group"}.

    Read in a process of its own, since importing SGLang needs the CPU engine's stand-ins where no GPU packages are.
    Raises: WorkbenchError when SGLang cannot be imported.
    """
    path = os.pathsep.join([*python_path(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    if not os.path.exists("/dev/nvidiactl"):
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    done = subprocess.run([sys.executable, "-m", "workbench.inspection"], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise WorkbenchError(f"SGLang cannot be inspected: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no word why'}")
    return json.loads(done.stdout.splitlines()[-1])


def places() -> list[Place]:
    """Everything that speaks of the draft or of tensor parallelism."""
    return [place for entry in installed()["places"] if (place := Place(**entry)).draft or _PARALLEL.search(place.name)]


def answer() -> str:
    """The notebook's question answered in one sentence, from what was found."""
    found = [place for place in places() if place.sets_draft_tp]
    version = installed()["version"]
    searched = f"{sum(p['kind'] == 'argument' for p in installed()['places'])} arguments, " \
               f"{sum(p['kind'] == 'environment' for p in installed()['places'])} environment variables, " \
               f"{sum(p['kind'] == 'run-time call' for p in installed()['places'])} run-time settings and the draft models' own code"
    if found:
        return f"SGLang {version} may have an option for the draft's TP size: {', '.join(p.name for p in found)} (of {searched}). Read it before patching."
    return (f"SGLang {version} has no option for the draft's TP size ({searched} were searched): the draft runs on the target's TP group "
            "unless DP attention is on, and another group needs a patch.")
