"""One process that has imported SGLang as a CPU server does, for tests that look into such a
process: each piece of code runs in a fork of it, since an import takes ten seconds of a core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.serving import forkserver

# What a fork is told: code, environment and where its output goes. It answers with its status.
LOOP = f"""
import importlib, json, os, sys
from workbench.serving.forkserver import _end_with
for name in {forkserver._IMPORTS}:
    importlib.import_module(name)
for line in sys.stdin:
    told = json.loads(line)
    if not os.fork():
        os.dup2(os.open(told["out"], os.O_WRONLY), 1)
        os.dup2(os.open(told["err"], os.O_WRONLY), 2)
        os.environ.update(told["environment"])
        sys.stdin = open(os.devnull)
        code = compile(told["code"], "<test>", "exec")
        # Not by Python's own end, which takes two seconds to take so many modules apart.
        _end_with(lambda: exec(code, {{"__name__": "__main__"}}) or 0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


class Imported:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def run(self, code: str, environment: Mapping[str, str] | None = None) -> Ran:
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            out.touch()
            err.touch()
            told = {
                "code": code,
                "environment": dict(environment or {}),
                "out": str(out),
                "err": str(err),
            }
            print(json.dumps(told), file=self._process.stdin, flush=True)
            # What SGLang prints while it is imported comes first.
            while not (said := self._process.stdout.readline().strip()).lstrip("-").isdigit():
                assert self._process.poll() is None, "SGLang could not be imported"
            return Ran(int(said), out.read_text(), err.read_text())

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
