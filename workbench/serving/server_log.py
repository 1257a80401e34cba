"""A server's log: its last lines, and the log without what is private (its faults: faults.py)."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Begins a line of SGLang's: the time, and the rank where it is one's.
STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: (?P<rank>[A-Z]+\d+(?: [A-Z]+\d+)*))?\] ?")
HIDDEN = "<hidden>"
# of the line in which a server's supervisor says how it ended (workbench/serving/supervisor.py)
SUPERVISOR = "keeper: "
_SECRET_NAME = (  # max_total_tokens and TOKENIZERS_PARALLELISM are none
    r"(?:token(?!s|iz)|key|secret|password)"
)
_PATH = re.compile(
    r"(?<![\w./~-])~?/(?:[\w.@+-]+/)+[\w.@+-]*"
)  # absolute, of two parts or more; no URL, no route of one part
_ROOMS = ("fixtures", "notebooks", "workbench", "outputs", "tests")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# A line for every request, every import and every weight file says nothing about a run that its
# records do not.
_NOISE = re.compile(
    r"^INFO: +[\d.]+:\d+ - |^(Prefill|Decode) batch, |^Ignore import error|^Cache flushed"
    r" successfully|"
    r"^Multi-thread loading shards|UserWarning: |^  warnings\.warn\("
)
_SECRET = re.compile(rf"(?i)({_SECRET_NAME}[a-z_]*['\"]?\s*[:=]\s*)(['\"]?)[^'\",\s]{{6,}}\2")


def tail(path: Path, lines: int = 20, width: int = 300) -> tuple[str, ...]:
    """The last lines of a server's own words in its log, each cut to ``width`` characters; empty
    when there is none.
    """
    if not path.exists():
        return ()
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 200_000))
        text = file.read().decode(errors="replace")
    said = [line for line in text.splitlines() if line and not line.startswith(SUPERVISOR)]
    return tuple(clean(line)[:width] for line in said[-lines:])


def answering(path: Path) -> bool:
    """Whether a server's log says that it takes requests, which Uvicorn does once the ranks have
    loaded (uvicorn/server.py, _log_started_message).
    """
    return path.exists() and "Uvicorn running on" in path.read_text(errors="replace")


def clean(line: str) -> str:
    """A line without this machine's home and working folders and without anything that looks like a
    secret.
    """
    for private, public in ((os.getcwd(), "."), (str(Path.home()), "~")):
        line = line.replace(private, public) if len(private) > 1 else line
    return _SECRET.sub(rf"\1{HIDDEN}", line)


def is_secret(name: str) -> bool:
    """Whether a variable of that name may hold what nobody else should read."""
    return bool(re.search(f"(?i){_SECRET_NAME}", name))


def without_paths(text: str) -> str:
    """The text with every absolute path cut to what is not this machine's: from the package or the
    repository's folder on, else its last part.
    """
    return _PATH.sub(lambda found: _public_part(found[0]), text)


def _public_part(path: str) -> str:
    parts = path.rstrip("/").split("/")
    for place, part in enumerate(parts[:-1]):
        if part in ("site-packages", "dist-packages"):
            return "/".join(parts[place + 1 :])
        if part in _ROOMS:
            return "./" + "/".join(parts[place:])
    return ".../" + parts[-1]


def trimmed(path: Path, first: int = 150, last: int = 60, width: int = 400) -> str:
    """A server's log for keeping: cleaned, without colours and lines that repeat, its first and
    last lines, each cut to ``width``.
    """
    lines = [
        _COLOUR.sub("", line.rsplit("\r", 1)[-1])
        for line in path.read_text(errors="replace").split("\n")
    ]
    told = [
        clean(line) for line in lines if line.strip() and not _NOISE.search(STAMP.sub("", line))
    ]
    dropped = len(told) - first - last
    kept = (
        told
        if dropped <= 0
        else [*told[:first], f"[{dropped} lines are left out here]", *told[-last:]]
    )
    return "".join(f"{line[:width]}\n" for line in kept)
