"""Two workbenches of one machine do not share a GPU by accident; simulated GPUs, real locks and
processes.
"""

from __future__ import annotations

import subprocess
import sys

import fake_gpus
import pytest

from workbench.experiment import profile
from workbench.experiment.errors import BadInput
from workbench.experiment.profile_sections import ROOT
from workbench.predict import preflight
from workbench.serving import gpu_locks, gpus

GPUS = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of four GPUs."""
    fake_gpus.install(monkeypatch, GPUS)
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_locks, "GIVES_WAY_WITHIN_S", 10)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def asks(tp: int, visible: str | None = None, **flags) -> profile.Profile:
    cuda = profile.load("cpu-tiny", {"tp": tp}).model_copy(update={"engine": "cuda"})
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return cuda.model_copy(
        update={
            "server": cuda.server.model_copy(update={"environment": environment, "flags": flags})
        }
    )


def held_elsewhere(
    folder, hold: str = "print('held', flush=True); time.sleep(600)"
) -> subprocess.Popen:
    """Another process that holds GPU-b for its run."""
    code = (
        "import sys, time, subprocess; from pathlib import Path; from workbench.serving import"
        f" gpu_locks\nwith gpu_locks._lock(Path({str(folder / 'draft-tp-workbench-GPU-b.lock')!r}),"
        f" Path('/runs/theirs'), None) as file:\n    {hold}"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert other.stdout.readline() == "held\n"
    return other


def taken(profile: profile.Profile) -> list[str]:
    return [gpu.uuid for gpu in gpus.ours(profile)]


def test_which_gpus_a_profile_takes(machine):
    assert taken(asks(2)) == ["GPU-a", "GPU-b"]
    assert taken(asks(2, "2,3")) == ["GPU-c", "GPU-d"]
    assert taken(asks(2, "3,1")) == ["GPU-d", "GPU-b"]  # in the order in which they are named
    assert taken(asks(2, "GPU-c,GPU-a")) == ["GPU-c", "GPU-a"]
    assert taken(asks(2, "GPU-d,GPU-b,GPU-a", **{"base-gpu-id": 1})) == ["GPU-b", "GPU-a"]
    assert (
        taken(asks(2, "1,9,2")) == ["GPU-b"] and taken(asks(2, "")) == taken(asks(2, "-1,0")) == []
    )  # as CUDA reads it
    assert taken(asks(2, **{"base-gpu-id": 1, "gpu-id-step": 2})) == ["GPU-b", "GPU-d"]
    assert taken(profile.load("cpu-tiny")) == []  # runs of the CPU engine may share the machine


def test_a_gpu_of_another_run_is_refused_by_its_name_before_anything_is_started(machine):
    other = held_elsewhere(machine)
    try:
        words = (
            rf"GPU 1 is in use by the run in /runs/theirs \(process {other.pid}\); wait for it, or"
            r" name other GPUs"
        )
        with pytest.raises(BadInput, match=words), gpu_locks.held(asks(2), machine / "ours"):
            pass
        found = list(preflight.unlocked(asks(2)))
        assert [(c.status, c.name) for c in found] == [
            ("refused", "tp")
        ] and "/runs/theirs" in found[0].detail
        with gpu_locks.held(asks(2, "2,3"), machine / "ours"):  # others are free
            pass
    finally:
        other.kill()
        other.communicate()


def test_a_refusal_lets_go_of_what_it_had_taken(machine):
    other = held_elsewhere(machine)
    with pytest.raises(BadInput), gpu_locks.held(asks(2), machine / "ours"):
        pass
    other.kill()
    other.communicate()
    with gpu_locks.held(asks(2), machine / "ours") as files:
        assert len(files) == 2 and gpu_locks.holders(asks(2)).keys() == {0, 1}
    assert gpu_locks.holders(asks(2)) == {} == {c.name: c for c in preflight.unlocked(asks(2))}


def test_the_lock_of_a_run_that_was_killed_lives_as_long_as_its_keeper(machine):
    """The keeper inherits it, and a run that finds the holder dead waits for that keeper."""
    other = held_elsewhere(
        machine,
        "subprocess.Popen(['sleep', '2'], pass_fds=[file]); print('held', flush=True);"
        " time.sleep(600)",
    )
    other.kill()
    other.wait()
    assert gpu_locks.holders(asks(2)) == {}  # about to be free: no reason to refuse
    with open(gpu_locks._file("GPU-b")) as file, pytest.raises(BlockingIOError):
        gpu_locks.fcntl.flock(file, gpu_locks.fcntl.LOCK_EX | gpu_locks.fcntl.LOCK_NB)
    with gpu_locks.held(asks(2), machine / "ours"):
        assert "ours" in gpu_locks._file("GPU-b").read_text()
    other.stdout.close()
