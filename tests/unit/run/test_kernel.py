"""Notebooks run in the replay's own interpreter, whatever kernel specs are installed, and a stopped
kernel has a deadline.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from workbench import replay
from workbench.run import kernel

# What a spec of another environment, a stale one and a broken one look like.
SPECS = {
    "another environment": {"argv": ["/bin/sh", "-c", "exit 9"], "display_name": "Python 3"},
    "stale": {"argv": ["/nowhere/bin/python", "-m", "ipykernel_launcher"], "display_name": "x"},
    "broken": "{",
    "another language": {"argv": ["/bin/false"], "display_name": "R", "language": "R"},
}


def ran(tmp_path: Path, monkeypatch, source: str) -> tuple[bool, Path]:
    """Execute a notebook of one cell as a replay does; whether it went well, and its output."""

    class Lab:
        folder = tmp_path

    (tmp_path / "notebooks").mkdir(exist_ok=True)
    nbformat.write(
        new_notebook(cells=[new_code_cell(source)], metadata={"language_info": {"name": "python"}}),
        tmp_path / "notebooks" / "n.ipynb",
    )
    monkeypatch.setattr(replay, "ROOT", tmp_path)
    out = tmp_path / "out.ipynb"
    return replay._execute(replay.Notebook("n"), Lab, out), out


def said(out: Path) -> str:
    cells = nbformat.read(out, as_version=4).cells
    return "".join(o.get("text", "") for c in cells for o in c.get("outputs", ()))


@pytest.mark.parametrize("where", ["JUPYTER_PATH", "JUPYTER_DATA_DIR"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_notebook_runs_in_the_replays_own_interpreter(where, spec, tmp_path, monkeypatch):
    folder = tmp_path / "specs" / "kernels" / "python3"
    folder.mkdir(parents=True)
    text = spec if isinstance(spec, str) else json.dumps({"language": "python", **spec})
    (folder / "kernel.json").write_text(text)
    monkeypatch.setenv(where, str(tmp_path / "specs"))
    went, out = ran(tmp_path, monkeypatch, "import sys; print(sys.executable)")
    assert went and said(out).strip() == sys.executable


def test_no_installed_kernel_is_known(tmp_path, monkeypatch):
    folder = tmp_path / "kernels" / "other"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(SPECS["another environment"]))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    specs = kernel.OwnSpecs().get_all_specs()
    assert list(specs) == ["python3"] and specs["python3"]["spec"]["argv"][0] == sys.executable


def stop_when_up(up: Path, again_after_s: float | None = None) -> threading.Thread:
    """Stop the kernel, whose pid the notebook writes to a file, and perhaps let it go on."""

    def work() -> None:
        while not (up.exists() and up.read_text()):
            time.sleep(0.05)
        pid = int(up.read_text())
        os.kill(pid, signal.SIGSTOP)
        if again_after_s is not None:
            time.sleep(again_after_s)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


SLEEPS = "import os, time; open({up!r}, 'w').write(str(os.getpid())); time.sleep({s}); print('end')"


def test_a_stopped_kernel_is_ended_and_one_sentence_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kernel, "STOPPED_WITHIN_S", 3.0)
    up = tmp_path / "pid"
    stop_when_up(up)
    with caplog.at_level(logging.ERROR, "workbench"):
        went, _ = ran(tmp_path, monkeypatch, SLEEPS.format(up=str(up), s=600))
    errors = [r.getMessage() for r in caplog.records if r.name.startswith("workbench")]
    assert not went and len([e for e in errors if "stood still" in e]) == 1
    assert "--resume goes on from there" in errors[-1]
    assert not psutil.pid_exists(int(up.read_text()))


def test_a_long_cell_and_a_short_stop_are_no_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "STOPPED_WITHIN_S", 4.0)
    up = tmp_path / "pid"
    stop_when_up(up, again_after_s=1.5)
    went, out = ran(tmp_path, monkeypatch, SLEEPS.format(up=str(up), s=6))
    assert went and "end" in said(out)
