"""Conversations and texts as people keep them: chat JSONL, ShareGPT or plain text, read into what a
chat template takes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.experiment.errors import BadInput

# ShareGPT's names of who speaks, and some of its children's.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
}
_TURNS, _MESSAGES, _TEXTS = ("conversations", "conversation"), ("messages",), ("prompt", "text")


@dataclass(frozen=True)
class Source:
    """One prompt before it is tokenized: messages for a chat template, or a text as it is."""

    where: str
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""

    @property
    def content(self) -> str:
        """What two equal prompts have in common."""
        return json.dumps([self.messages, self.text], ensure_ascii=False)

    def share(self, seed: int) -> float:
        """A number from 0 to 1 that depends on the content alone, so that a split of one file holds
        for another that repeats it.
        """
        digest = hashlib.sha256(f"{seed}:{self.content}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64


def read(path: Path) -> list[Source]:
    """The prompts of a file, each up to its last question.

    A line of JSON with ``messages`` is a chat, one with ``conversations`` ShareGPT's, one with
    ``prompt`` or ``text`` a text; a list of such entries is read likewise. Anything else is plain
    text, a prompt a paragraph.
    Raises: BadInput, naming file and line, for what is none of these.
    """
    name = path.name
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _bad(
            name, f"cannot be read ({error.strerror})", "name a file that is there"
        ) from None
    except UnicodeDecodeError as error:
        raise _bad(name, f"is not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    found = [_source(where, entry) for where, entry in _entries(name, text)]
    if not found:
        raise _bad(name, "holds no prompts", "give chat JSONL, ShareGPT or text")
    return found


def without_repeats(sources: Sequence[Source]) -> list[Source]:
    """The first of each content."""
    found: dict[str, Source] = {}
    for source in sources:
        found.setdefault(source.content, source)
    return list(found.values())


def split(
    sources: Sequence[Source], held_out: float, seed: int
) -> tuple[list[Source], list[Source]]:
    """Held-out prompts and the rest, by content: ``held_out`` is the share of the first."""
    kept, rest = [], []
    for source in sources:
        (kept if source.share(seed) < held_out else rest).append(source)
    return kept, rest


def _entries(name: str, text: str) -> Iterator[tuple[str, Any]]:
    """What a file holds and where: JSON objects, or texts."""
    start = text.lstrip()[:1]
    if start == "[":
        try:
            whole = json.loads(text)
        except ValueError as error:
            raise _bad(name, f"is no JSON list ({error})", "mend it") from None
        yield from ((f"{name}, entry {number}", entry) for number, entry in enumerate(whole, 1))
    elif start == "{":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield f"{name}, line {number}", json.loads(line)
                except ValueError:
                    raise _bad(
                        name, f"has no JSON object in line {number}", "write one object a line"
                    ) from None
    else:
        number = 0
        for number, paragraph in enumerate(text.split("\n\n"), 1):
            if paragraph.strip():
                yield f"{name}, paragraph {number}", paragraph.strip()


def _source(where: str, entry: Any) -> Source:
    if isinstance(entry, str):
        return Source(where, text=entry)
    if isinstance(entry, dict):
        if turns := _first(entry, _MESSAGES):
            return Source(where, _up_to_the_question(where, turns, "role", "content"))
        if turns := _first(entry, _TURNS):
            return Source(where, _up_to_the_question(where, turns, "from", "value"))
        if (text := _first(entry, _TEXTS)) and isinstance(text, str):
            return Source(where, text=text)
        if "input_ids" in entry:
            raise _bad(where, "holds token ids already", "give it as workload.prompts")
    raise _bad(
        where,
        "is no chat, no ShareGPT conversation and no text",
        'write {"messages": [{"role": "user", "content": ...}]}',
    )


def _up_to_the_question(where: str, turns: Any, role: str, content: str) -> tuple:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _bad(where, "is no list of turns", f'write {{"{role}": ..., "{content}": ...}} each')
    messages = []
    for turn in turns:
        speaker, said = str(turn.get(role, "")).lower(), turn.get(content)
        if isinstance(said, list):  # parts of a message: the texts of them
            said = "".join(part.get("text", "") for part in said if isinstance(part, dict))
        if speaker not in _ROLES or not isinstance(said, str):
            raise _bad(
                where,
                f"has a turn of {speaker or 'nobody'!r} without {content} in words",
                f"name the speaker {', '.join(dict.fromkeys(_ROLES.values()))}",
            )
        messages.append((_ROLES[speaker], said))
    while messages and messages[-1][0] not in ("user", "tool"):
        messages.pop()
    if not messages:
        raise _bad(where, "asks nothing: there is no turn of the user", "leave it out")
    return tuple(messages)


def _first(entry: dict, names: Sequence[str]) -> Any:
    return next((entry[name] for name in names if entry.get(name)), None)


def _bad(where: str, problem: str, mend: str) -> BadInput:
    return BadInput("prompts", f"{where} {problem}", mend)
