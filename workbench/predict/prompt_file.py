"""The file of prompts that a run measures with: what it must be, and how one is made of texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.experiment import plans
from workbench.experiment.checks import Check, passed, refused, warned
from workbench.experiment.errors import BadInput
from workbench.experiment.profile import Profile
from workbench.predict.model_shape import ModelShape

FIELD = "workload.prompts"


def check(profile: Profile, target: ModelShape | None) -> tuple[int, list[Check]]:
    """Tokens of the longest prompt (0 where unknown), and what is wrong with the prompts."""
    path = profile.workload.prompts
    if str(path) == "random":
        return 0, [
            warned(
                FIELD,
                "are random tokens, which say nothing of accept rates",
                "give a file of held-out text",
            )
        ]
    file = Path(path)
    make = f"make it by: workbench prompts SOURCE --target FOLDER --out {file.stem}.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        return 0, [
            refused(FIELD, f"{path} cannot be read ({error.strerror})", f"{make}, or random")
        ]
    except ValueError:
        return 0, [refused(FIELD, f"{file.name} is no JSON", make)]
    fault = next(_faults(data, target), None)
    if fault:
        return 0, [refused(FIELD, f"{file.name}: {fault}", make)]
    lengths = {entry["id"]: len(entry["input_ids"]) for entry in data}
    longest = max(lengths, key=lengths.get)
    served = profile.number("context-length", target.context if target else None)
    needed = lengths[longest] + profile.workload.max_new_tokens
    if served is not None and needed > served:
        left = int(served) - lengths[longest]
        mend = f"lower it to {left}" if left > 0 else f"leave prompt {longest!r} out of {file.name}"
        return 0, [
            refused(
                "workload.max_new_tokens",
                f"make {needed} tokens with the longest prompt, {longest!r} of {file.name}, where"
                f" the target takes {served:.0f}",
                mend,
            )
        ]
    try:
        plans.draft_tp(profile, len(data))
    except BadInput as error:  # fewer than the plan takes
        return 0, [refused(error.field, error.problem, error.mend)]
    return lengths[longest], [
        passed(FIELD, f"{len(data)} of {min(lengths.values())} to {max(lengths.values())} tokens")
    ]


def _faults(data: Any, target: ModelShape | None) -> Iterator[str]:
    """What makes a file no prompts, in words that name the entry."""
    if not isinstance(data, list) or not data:
        yield 'it is no list of {"id", "input_ids"}'
        return
    for number, entry in enumerate(data, 1):
        if not isinstance(entry, dict) or not {"id", "input_ids"} <= entry.keys():
            yield f'entry {number} is no {{"id", "input_ids"}}'
            return
        ids, name = entry["input_ids"], entry["id"]
        if not isinstance(name, (str, int)) or isinstance(name, bool):
            yield f"the id of entry {number} is neither text nor a number"
        elif not isinstance(ids, list) or not ids:
            yield f"prompt {name!r} has no tokens in a list"
        elif wrong := [i for i in ids if type(i) is not int]:
            yield f"prompt {name!r} holds {wrong[0]!r}, which is no token id"
        elif min(ids) < 0:
            yield f"prompt {name!r} holds token {min(ids)}"
        elif target is not None and max(ids) >= target.vocab_size:
            yield (
                f"prompt {name!r} holds token {max(ids)} where the target has {target.vocab_size}:"
                " it is of another tokenizer"
            )
    names = Counter(str(entry["id"]) for entry in data)
    if repeated := next((name for name, count in names.items() if count > 1), None):
        yield f"the id {repeated!r} is there {names[repeated]} times"
    seen: dict[tuple[int, ...], Any] = {}
    for entry in data:
        ids = tuple(entry["input_ids"])
        if ids in seen:
            yield (
                f"prompts {seen[ids]!r} and {entry['id']!r} are the same, so one would be warmed up"
                " with and measured"
            )
            return
        seen[ids] = entry["id"]


def chosen(ids: Sequence[Sequence[int]], longest: int | None = None) -> list[list[int]]:
    """The prompts that have at most ``longest`` tokens, equal ones once."""
    fitting = (tuple(tokens) for tokens in ids if longest is None or len(tokens) <= longest)
    return [list(tokens) for tokens in dict.fromkeys(fitting)]


def write(path: Path, prompts: Sequence[Sequence[int]]) -> None:
    """Write prompts as a run reads them. Raises: BadInput where the file cannot be written."""
    entries = [{"id": f"{n:04}", "input_ids": list(ids)} for n, ids in enumerate(prompts)]
    try:
        path.write_text(json.dumps(entries) + "\n")
    except OSError as error:
        raise BadInput(
            "--out",
            f"{path} cannot be written ({error.strerror})",
            "name a file in a folder of yours",
        ) from None
