"""Recordings: a finished run made small and public under fixtures/recordings/NAME, and laid out
again as a run that nothing is added to.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.experiment import runlog
from workbench.experiment.errors import BadInput, WorkbenchError
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import ROOT
from workbench.experiment.runlog import Block, Failure, Finding, RunLog
from workbench.judge import verdict
from workbench.judge.stopping import STOPPED
from workbench.judge.verdict_file import VerdictFile
from workbench.run.provenance import digest
from workbench.serving import server_log

PREFIX = "recorded:"
FOLDER = ROOT / "fixtures" / "recordings"
LIMIT = 5_000_000  # bytes of one recording
PARTS = (
    "runs.jsonl",
    "provenance.json",
    "prompts.json",
    "profile.json",
)  # profile.json last: with it a folder is laid out whole
_IN_WORDS = {"sentence", "notes"}  # of a verdict: worded anew by any later version


def names(folder: Path | None = None) -> list[str]:
    """The recordings that ship with the workbench."""
    return sorted(path.parent.name for path in (folder or FOLDER).glob("*/runs.jsonl"))


def record(
    run: Path,
    profile: Profile,
    prompts: Sequence[Mapping[str, Any]],
    name: str,
    missing: Mapping[str, Mapping[str, int]] | None = None,
    folder: Path | None = None,
) -> Path:
    """Keep a run as the recording ``name``; returns its folder.

    What is kept: every line of the log, the profile, the provenance, the prompts, trimmed server
    logs, and the verdict as it is drawn now, by which a later replay is checked. Paths of the
    machine and everything that looks like a secret are taken out.
    missing: {experiment: {arm: planned blocks that the run was stopped before}}, which the
        provenance then says.
    Raises: BadInput for a run that cannot be kept (no blocks, blocks missing, prompts that were
        changed since, too large) or a name that is taken.
    """
    folder, records, facts = (
        folder or FOLDER,
        runlog.read(run / "runs.jsonl"),
        json.loads((run / "provenance.json").read_text()),
    )
    kept = _complete(records)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise BadInput(
            "NAME",
            f"{name!r} is no name of a recording",
            "use small letters, digits, dots and dashes",
        )
    if facts.get("recording"):
        raise BadInput(
            "RUN",
            f"{run.name} is itself a replay of {PREFIX}{facts['recording']}",
            "give the folder of a measured run",
        )
    if (folder / name).exists():
        raise BadInput(
            "NAME",
            f"{PREFIX}{name} is there already",
            "give another name, or remove its folder first",
        )
    asked = profile.workload.prompts
    if asked != "random" and digest(Path(asked)) != facts["hashes"]["prompts"]:
        raise BadInput(
            "workload.prompts",
            f"{Path(asked).name} is not what it was when the run was measured",
            "record where it was measured",
        )
    public = _Public(run, profile)
    setting = Profile.model_validate(public(json.loads((run / "profile.json").read_text())))
    records = [runlog.parse(public(line.model_dump(mode="json"))) for line in records]
    made = folder / f"{name}.part"
    shutil.rmtree(made, ignore_errors=True)
    (made / "logs").mkdir(parents=True)
    try:
        with RunLog(made / "runs.jsonl") as log:
            for line in records:
                log.append(line)
        (made / "profile.json").write_text(setting.model_dump_json(indent=1) + "\n")
        _write(
            made / "provenance.json",
            public(facts)
            | {"recording": name, "blocks": kept}
            | ({"missing": missing} if missing else {}),
        )
        (made / "prompts.json").write_text(
            "[\n" + ",\n".join(json.dumps(prompt) for prompt in prompts) + "\n]\n"
        )
        for path in sorted((run / "logs").glob("*.log")):
            (made / "logs" / path.name).write_text(public(server_log.trimmed(path)))
        _write(
            made / "verdict.json",
            verdict.judge(setting, records, "recorded", setting.plan.resolution).to_json(),
        )
        size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
        if size > LIMIT:
            raise BadInput(
                "RUN",
                f"its recording takes {size / 1e6:.1f} MB, more than {LIMIT / 1e6:g} MB",
                "measure fewer pairs, starts, requests or tokens",
            )
        return made.rename(folder / name)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def judge_anew(name: str, folder: Path | None = None) -> list[str]:
    """Draw a recording's verdict again by the rules of today; returns where it was another, a few
    words each. The log stays as it is.
    """
    made = (folder or FOLDER) / name
    setting = Profile.model_validate_json((made / "profile.json").read_text())
    stored, records = stored_verdict(name, folder), runlog.read(made / "runs.jsonl")
    found = verdict.judge(setting, records, "recorded", setting.plan.resolution)
    _write(made / "verdict.json", found.to_json())
    return list(differences(stored, found.file))


def lay_out(name: str, out: Path, folder: Path | None = None) -> None:
    """Copy a recording to where its replay writes; a folder that holds its replay already is left
    as it is.

    Raises: BadInput for an unknown recording, or a folder that holds something else.
    """
    source = (folder or FOLDER) / name
    if name not in names(folder):
        raise BadInput(
            "profile",
            f"there is no recording {name!r}",
            f"use one of {', '.join(PREFIX + n for n in names(folder)) or 'none yet'}",
        )
    if (out / "profile.json").exists():
        if json.loads((out / "provenance.json").read_text()).get("recording") != name:
            raise BadInput("out", f"{out.name} holds another run", "give another --out")
        return
    try:
        shutil.copytree(source / "logs", out / "logs", dirs_exist_ok=True)
        for part in PARTS:
            shutil.copyfile(source / part, out / part)
    except OSError as error:
        raise BadInput(
            "out",
            f"{out.name} cannot be written ({error.strerror})",
            "give a writable folder with --out",
        ) from None


def refuse_absent(
    name: str, expected: Mapping[str, int], records: Sequence[runlog.Line], experiment: str
) -> None:
    """Stop where a notebook asks for blocks that a recording does not hold.

    expected: blocks of each experiment when it was recorded.
    Raises: WorkbenchError with the experiment, in words.
    """
    held = sum(isinstance(r, Block) and r.experiment == experiment for r in records)
    if not held or held < expected.get(experiment, 0):
        wanted = f" where {expected[experiment]} were recorded" if experiment in expected else ""
        raise WorkbenchError(
            f"{PREFIX}{name} holds {held or 'no'} block{'s' if held != 1 else ''} of {experiment}"
            f"{wanted},"
            " and nothing is measured in the replay of a recording: leave that notebook out, or"
            " replay its profile on a machine that can serve it."
        )


def stored_verdict(name: str, folder: Path | None = None) -> VerdictFile:
    """The verdict as it was drawn when the run was recorded."""
    return VerdictFile.load((folder or FOLDER) / name / "verdict.json")


def differences(stored: VerdictFile, found: VerdictFile) -> Iterator[str]:
    """Where a verdict is not the stored one, a few words each; sentences are not compared, nor what
    only the newer one has.
    """
    return _differences(stored.to_json(exclude_unset=True), found.to_json())


def _differences(stored: Any, found: Any, where: str = "") -> Iterator[str]:
    if isinstance(stored, Mapping) and isinstance(found, Mapping):
        for key in stored.keys() - _IN_WORDS:
            yield from _differences(stored[key], found.get(key), f"{where}.{key}" if where else key)
    elif isinstance(stored, list) and isinstance(found, list) and len(stored) == len(found):
        for number, (one, other) in enumerate(zip(stored, found)):
            yield from _differences(one, other, f"{where}[{number}]")
    elif not _equal(stored, found):
        yield f"{where} is {found} where {stored} was recorded"


def _equal(stored: Any, found: Any) -> bool:
    numbers = all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in (stored, found)
    )
    return math.isclose(stored, found, rel_tol=1e-6, abs_tol=1e-9) if numbers else stored == found


def _complete(records: Sequence[runlog.Line]) -> dict[str, int]:
    """Blocks by experiment. Raises: BadInput where there are none, or one before the last is
    missing though nothing stopped the run.
    """
    numbers: dict[str, list[int]] = {}
    for record_ in records:
        if isinstance(record_, Block):
            numbers.setdefault(record_.experiment, []).append(record_.block)
    if not numbers:
        raise BadInput(
            "RUN", "it holds no measured block", "finish the run first: workbench replay --resume"
        )

    def repeated(experiment: str) -> bool:
        """A server that a resumed run starts again is warmed up again; nothing else comes twice."""
        blocks = [
            r.block
            for r in records
            if isinstance(r, Block) and r.experiment == experiment and r.role != "warmup"
        ]
        return len(set(blocks)) < len(blocks)

    stopped = {
        r.experiment
        for r in records
        if isinstance(r, Finding)
        and r.name == STOPPED
        or isinstance(r, Failure)
        and r.what == "setting"
    }
    for experiment, found in numbers.items():
        if repeated(experiment) or experiment not in stopped and max(found) >= len(set(found)):
            raise BadInput(
                "RUN",
                f"its blocks of {experiment} are not complete",
                "finish the run first: workbench replay --resume",
            )
    return {experiment: len(found) for experiment, found in numbers.items()}


class _Public:
    """Takes out of any value what is the machine's own: paths, and what looks like a secret."""

    def __init__(self, run: Path, profile: Profile):
        own = (profile.pair.target, profile.pair.draft, run.resolve(), ROOT)
        self._known = {
            str(path): f".../{path.name}" for path in own if not path.is_relative_to(ROOT)
        } | {str(ROOT): "."}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item) for item in value]
        if not isinstance(value, str):
            return value
        for path, name in self._known.items():
            value = value.replace(path, name)
        return server_log.without_paths(value)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
