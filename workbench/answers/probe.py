"""Does this SGLang have an option for the draft's TP size? Arguments, environment, run-time calls
and model code, read from what is installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.engine.cpu.paths import python_path
from workbench.experiment.arms import Arm
from workbench.experiment.errors import WorkbenchError
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import ROOT
from workbench.run.lab import Run
from workbench.serving import forkserver, launch_command

# What an option for the draft's TP would have to be called: it speaks of the draft (or speculation)
# and of parallelism.
_DRAFT = re.compile(r"(?i)draft|specul")
_PARALLEL = re.compile(r"(?i)(^|[-_ ])tp($|[-_ ])|tensor.?parallel|parallel.?size")


@dataclass(frozen=True)
class Place:
    """One thing that could set the draft's TP. kind: argument, environment, run-time call or model
    code; where: file and line, if known.
    """

    kind: str
    name: str
    about: str
    where: str = ""

    @property
    def draft(self) -> bool:
        return bool(_DRAFT.search(self.name))

    @property
    def sets_draft_tp(self) -> bool:
        """It names both the draft and parallelism. What a help text only mentions is listed, not
        counted.
        """
        return self.draft and bool(_PARALLEL.search(self.name))


SUPERVISOR = (sys.executable, "-m", "workbench.serving.supervisor")
COMMAND = (sys.executable, "-m", "workbench.answers.probe_sglang")


def installed(profile: Profile | None = None) -> dict[str, Any]:
    """What the installed SGLang says of itself: {"version", "places": [...], "source": {name:
    {"where", "text"}}}.

    Read in a process of its own, since importing SGLang needs the CPU engine's stand-ins where no
    GPU packages are.
    profile: of a run whose servers may have imported SGLang already, which is then not done again.
    Raises: WorkbenchError when SGLang cannot be imported.
    """
    if profile and profile.engine == "cpu" and (said := _forked(profile)):
        return json.loads(said)
    path = os.pathsep.join([*python_path(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    if not os.path.exists("/dev/nvidiactl"):
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    done = subprocess.run(
        COMMAND,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise WorkbenchError(
            "SGLang cannot be inspected:"
            f" {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no word why'}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _forked(profile: Profile) -> str | None:
    """What a fork of the servers' fork server finds; None where there is none, or it fails."""
    launch = launch_command.plan(profile, Arm("none"), port=1, server=uuid.uuid4().hex[:12])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        kept = forkserver.keep(
            [*SUPERVISOR, launch.server, str(output), "-", *COMMAND], launch.environment, ROOT
        )
        if kept is None:
            return None
        with kept.stdin:  # open until it has ended
            kept.communicate(timeout=300)
        return next((s for s in output.read_text().splitlines() if s.startswith("{")), None)


@dataclass(frozen=True)
class Probe:
    """What an SGLang was searched for. searched: how many of each kind; places: those that speak of
    the draft or of tensor parallelism; source: {name: {"where", and "text" where the SGLang is
    the one installed here}} of what decides the draft's group.
    """

    version: str
    searched: Mapping[str, int]
    places: tuple[Place, ...]
    source: Mapping[str, Mapping[str, str]]


def probe(profile: Profile | None = None) -> Probe:
    """The installed SGLang, searched; arguments and errors as in ``installed``."""
    found = installed(profile)
    places = tuple(
        place
        for entry in found["places"]
        if (place := Place(**entry)).draft or _PARALLEL.search(place.name)
    )
    return Probe(
        found["version"],
        Counter(entry["kind"] for entry in found["places"]),
        places,
        found["source"],
    )


def searched(run: Run) -> Probe | None:
    """The probe of a run's SGLang, kept in its log without SGLang's own words; None of a recording
    that holds none.
    """
    kept = run.finding("searched", Probe)
    if kept is not None or run.recording:
        return kept
    found = probe(run.profile)
    public = replace(
        found,
        places=tuple(replace(place, about="") for place in found.places),
        source={name: {"where": told["where"]} for name, told in found.source.items()},
    )
    run.record_finding("probe", "searched", public)
    return found


def table(found: Probe | None) -> pd.DataFrame:
    """One row a place; empty where nothing is known."""
    rows = [
        asdict(place) | {"sets_draft_tp": place.sets_draft_tp}
        for place in (found.places if found else ())
    ]
    return pd.DataFrame(rows, columns=["kind", "name", "about", "where", "sets_draft_tp"])


def source(found: Probe | None) -> str:
    """What decides the draft's group: where it stands in SGLang, and its text where that SGLang is
    installed here.
    """
    return "\n".join(
        f"# {name}: {told['where']}\n{told.get('text', '')[:1800]}"
        for name, told in (found.source if found else {}).items()
    )


def answer(found: Probe | None) -> str:
    """The notebook's question answered in one sentence, from what was found."""
    if found is None:
        return "Not answered when this was recorded."
    names = {
        "argument": "arguments",
        "environment": "environment variables",
        "run-time call": "run-time settings",
    }
    searched = (
        f"{', '.join(f'{found.searched[kind]} {plural}' for kind, plural in names.items())} and the"
        " draft models' own code"
    )
    if options := [place for place in found.places if place.sets_draft_tp]:
        return (
            f"SGLang {found.version} may have an option for the draft's TP size:"
            f" {', '.join(p.name for p in options)} (of {searched}). Read it before patching."
        )
    return (
        f"SGLang {found.version} has no option for the draft's TP size ({searched} were searched):"
        " the draft runs on the target's TP group unless DP attention is on, and another group"
        " needs a patch."
    )
