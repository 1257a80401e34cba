"""A profile: a named, complete setting (pair, machine, server, workload, plan), read from a YAML
file and checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    Field,
    ValidationError,
    field_validator,
)

from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.profile_sections import (
    ROOT,
    Node,
    Pair,
    Plan,
    Reported,
    Section,
    Server,
    Speculation,
    Sweep,
    Workload,
    first,
    plain_number,
)

# Active when above 0 (speculative/spec_utils.py:276 SGLANG_SIMULATE_ACC_LEN)
SIMULATED_ACCEPTANCE = "SGLANG_SIMULATE_ACC_LEN"
_LOOPBACK = ("127.", "localhost", "::1")
PROFILES = ROOT / "notebooks" / "profiles"


class Profile(Section):
    """nodes: the machines of one server, tp / nodes consecutive ranks on each; a number stands for
    as many on this machine's loopback.
    """

    name: str
    engine: Literal["cpu", "cuda"]
    about: str = ""
    pair: Pair
    tp: int = Field(2, ge=1)
    nodes: tuple[Node, ...] = (Node(name="node-0"),)
    speculation: Speculation = Speculation()
    server: Server = Server()
    workload: Workload
    plan: Plan = Plan()
    sweep: Sweep = Sweep()
    reported: Reported | None = None

    @property
    def acceptance_simulated(self) -> bool:
        """Whether SGLang is told to hold the accept length (SGLANG_SIMULATE_ACC_LEN): tokens and
        accept rates then say nothing.
        """
        try:
            return float(self.server.environment.get(SIMULATED_ACCEPTANCE) or -1) > 0
        except ValueError:  # no number, which the preflight refuses
            return False

    @field_validator("nodes", mode="before")
    @classmethod
    def _counted(cls, given: Any) -> Any:
        if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= 64:
            return tuple(Node(name=f"node-{number}") for number in range(given))
        if isinstance(given, (list, tuple)) and given:
            return given
        raise ValueError("give a number from 1 to 64 or a list of nodes")

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(Arm.parse(name) for name in self.plan.arms)

    @property
    def flags(self) -> dict[str, str | int | float | bool]:
        """The server's flags under SGLang's spelling: no dashes in front, ``-`` between words."""
        return {
            name.lstrip("-").replace("_", "-"): value for name, value in self.server.flags.items()
        }

    def flag(self, name: str, default: Any = None) -> Any:
        """One server flag, or the default."""
        return self.flags.get(name, default)

    def number(self, name: str, default: float | None = None) -> float | None:
        """One server flag as a number, or the default.

        Raises: BadInput when it is not one.
        """
        value = self.flag(name, default)
        return None if value is None else plain_number(f"server.flags.{name}", value)

    @property
    def ranks_a_node(self) -> int:
        """Ranks of the target on each node; consecutive ones, as SGLang places them
        (entrypoints/engine.py:2045 _calculate_rank_ranges).
        """
        return self.tp // len(self.nodes)

    @property
    def on_loopback(self) -> bool:
        """Whether the first node is reached by this machine alone."""
        return self.nodes[0].address.startswith(_LOOPBACK)


# Sections whose names are SGLang's or the system's: one of them is changed without the others.
_OPEN = ("server.flags", "server.environment")


def available() -> list[str]:
    """Names of the profiles that ship with the workbench."""
    return sorted(p.stem for p in PROFILES.glob("*.yaml"))


def load(name: str | Path, changes: dict[str, Any] | None = None) -> Profile:
    """The profile of a name (in notebooks/profiles) or of a YAML file, with dotted changes applied.

    changes: e.g. ``{"plan.pairs": 12}``; a bare last name is enough where only one section has it
        (``{"pairs": 12}``). ``{"server.flags.NAME": value}`` changes one flag, None takes it
        out; ``server.environment.NAME`` likewise.
    Raises: BadInput for an unknown profile or field, broken YAML, or a value that does not fit.
    """
    if str(name).startswith("recorded:"):
        raise BadInput(
            "profile",
            f"{name} is a recording, which is only replayed",
            f"use workbench replay {name}, or name a profile",
        )
    path = (
        Path(name) if str(name).endswith((".yaml", ".yml", ".json")) else PROFILES / f"{name}.yaml"
    )
    if not path.is_file():
        raise BadInput(
            "profile",
            f"{str(name)!r} is unknown",
            f"use one of {', '.join(available())} or the path of a YAML file",
        )
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        where = (
            f" in line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        )
        raise BadInput(
            "profile", f"{path.name} is not valid YAML{where}", "mend its syntax"
        ) from None
    if not isinstance(data, dict):
        raise BadInput(
            "profile", f"{path.name} holds no fields", "write the profile as key: value lines"
        )
    data.setdefault("name", path.stem)
    for key, value in (changes or {}).items():
        _change(data, key, value)
    try:
        return Profile(**data)
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"])) or "profile"
        raise BadInput(field, first(error), f"mend it in {path.name} or by -p") from None


def parameters() -> dict[str, str]:
    """Every name that ``-p`` takes: the dotted path, and its last part where that names one field
    only.
    """
    paths = [
        f"{section}.{field}"
        for section, info in Profile.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
        for field in info.annotation.model_fields
    ] + ["tp", "nodes"]
    last = [p.rsplit(".", 1)[-1] for p in paths]
    return {p: p for p in paths} | {n: p for n, p in zip(last, paths) if last.count(n) == 1}


def _change(data: dict, key: str, value: Any) -> None:
    known = parameters()
    section, _, name = key.rpartition(".")
    if name and known.get(section) in _OPEN:
        return _change_one(data, known[section], name, value)
    if key not in known:
        raise BadInput(
            "parameter",
            f"{key!r} is unknown",
            f"use one of {', '.join(sorted(k for k in known if '.' not in k))}",
        )
    *sections, field = known[key].split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[field] = value


def _change_one(data: dict, section: str, name: str, value: Any) -> None:
    """One flag or variable, or without it for None."""
    for part in section.split("."):
        data[part] = dict(data.get(part) or {})
        data = data[part]
    spelling = (lambda word: word.lstrip("-").replace("_", "-")) if "flags" in section else str
    for known in [known for known in data if spelling(known) == spelling(name)]:
        del data[known]
    if value is not None:
        data[spelling(name)] = value
