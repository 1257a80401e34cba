"""The stacks of a server's processes: read from outside, of a stopped process too, with the reason
where they cannot be read.
"""

import os
import signal
import subprocess
import sys
import time

from workbench.serving import stacks, supervisor

CODE = (
    "import sys, time\ndef waits_for_the_other_rank():\n    print('up', flush=True)\n   "
    " time.sleep(600)\nwaits_for_the_other_rank()"
)


def stand_in(name: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, supervisor.MARKER: name},
    )
    assert process.stdout.readline() == "up\n"
    return process


def test_every_process_with_what_it_waits_in_and_none_of_its_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghij")
    running, stopped = stand_in("hangs"), stand_in("hangs")
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        time.sleep(0.2)
        said = stacks.save("hangs", tmp_path / "000-shared.log")
    finally:
        for process in (running, stopped):
            process.kill()
            process.communicate()
    assert said == "stacks of its 2 processes are in 000-shared.stacks.txt"
    text = (tmp_path / "000-shared.stacks.txt").read_text()
    assert text.count("waits_for_the_other_rank") >= 2 and text.count("=== ") == 2
    assert text.count("(stopped)") == 1 and "hf_abc" not in text


def test_without_py_spy_the_file_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "_py_spy", lambda: None)
    process = stand_in("hangs-too")
    try:
        stacks.save("hangs-too", tmp_path / "x.log")
        assert "py-spy is not installed" in (tmp_path / "x.stacks.txt").read_text()
        assert "cannot be written (No such file or directory)" in stacks.save(
            "hangs-too", tmp_path / "nowhere" / "x.log"
        )
    finally:
        process.kill()
        process.communicate()
