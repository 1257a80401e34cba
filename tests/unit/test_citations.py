"""What comments and docstrings cite of SGLang's source is there, in the release that is pinned.

A citation is ``path/file.py:LINE symbol``: that line of that file holds the symbol. The path may
leave out leading folders, as long as one file under sglang/srt is meant, or where there is none
under sglang. The symbol stands behind the line, also across a line break.
"""

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from workbench.experiment.profile_sections import ROOT

CITED = re.compile(
    r"(?P<path>[\w/]+\.py):(?P<line>\d+)(?:\s+(?:#\s+)?`{0,2}(?P<symbol>[A-Za-z_][\w.]*))?"
)
# ":506" behind a file named earlier, or "file.py:12, 34": nobody can tell which symbol is meant.
SHORT = re.compile(
    r"(?:(?<=[\s(]):\d{2,4}\b|\.py:\d+(?:,| and| to)\s+(?:#\s+)?:?\d{2,4}\b(?!\.py))"
)
MODULES = sorted((ROOT / "workbench").rglob("*.py"))


@cache
def sglang() -> dict[str, Path]:
    """{path from the folder above the package: file}; SGLang itself is not imported."""
    package = Path(importlib.util.find_spec("sglang").origin).parent
    return {str(path.relative_to(package.parent)): path for path in package.rglob("*.py")}


def meant(path: str, files: Mapping[str, Path]) -> list[str]:
    """The files that a cited path may mean."""
    found = [name for name in files if f"/{name}".endswith(f"/{path}")]
    return [name for name in found if name.startswith("sglang/srt/")] or found


@cache
def lines(path: Path) -> Sequence[str]:
    return path.read_text().splitlines()


def wrong(text: str, files: Mapping[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and fault of each citation in a module that does not hold."""
    for m in CITED.finditer(text):
        cited, at = f"{m['path']}:{m['line']}", text.count("\n", 0, m.start()) + 1
        named = meant(m["path"], files)
        if len(named) != 1:
            yield at, f"{cited} means {' or '.join(named) or 'no file of SGLang'}"
        elif m["symbol"] is None:
            yield at, f"{cited} names no symbol"
        else:
            there, number = lines(files[named[0]]), int(m["line"])
            line = there[number - 1] if 0 < number <= len(there) else ""
            if not re.search(rf"(?<!\w){re.escape(m['symbol'].rstrip('.'))}(?!\w)", line):
                yield at, f"{cited} has no {m['symbol'].rstrip('.')} but {line.strip()!r}"
    for m in SHORT.finditer(text):
        yield text.count("\n", 0, m.start()) + 1, f"{m[0]!r} is cut short: name file and symbol"


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(ROOT / "workbench")))
def test_what_a_module_cites_is_there(module):
    name = module.relative_to(ROOT)
    assert [f"{name}:{at}: {fault}" for at, fault in wrong(module.read_text(), sglang())] == []


def test_there_are_citations_to_check():
    assert sum(len(CITED.findall(module.read_text())) for module in MODULES) > 150


@pytest.fixture()
def files(tmp_path) -> dict[str, Path]:
    made = {}
    for name in (
        "sglang/srt/a/x.py",
        "sglang/srt/b/x.py",
        "sglang/kernels/y.py",
        "sglang/srt/z.py",
    ):
        made[name] = tmp_path / name
        made[name].parent.mkdir(parents=True, exist_ok=True)
        made[name].write_text("import os\ndef run_it(self):\n    self.q.go()\n")
    return made


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("(a/x.py:2 run_it)", ""),
        ("# kernels/y.py:3 self.q.go. And on", ""),
        ("# what z.py:2\n    # run_it does", ""),
        ("Target: sglang/srt/z.py:2 ``run_it``, around", ""),
        ("(a/x.py:1 run_it)", "a/x.py:1 has no run_it but 'import os'"),
        ("(a/x.py:2 run)", "a/x.py:2 has no run but 'def run_it(self):'"),
        ("(a/x.py:9 run_it)", "a/x.py:9 has no run_it but ''"),
        ("(x.py:2 run_it)", "x.py:2 means sglang/srt/a/x.py or sglang/srt/b/x.py"),
        ("(gone.py:2 run_it)", "gone.py:2 means no file of SGLang"),
        ("(z.py:2)", "z.py:2 names no symbol"),
        ("z.py:2 run_it, and so on (:506)", "':506' is cut short: name file and symbol"),
        ("(z.py:2 run_it, z.py:3 self)", ""),
    ],
)
def test_a_wrong_citation_is_named_with_its_place(text, fault, files):
    assert list(wrong(f"\n{text}\n", files)) == ([(2, fault)] if fault else [])
