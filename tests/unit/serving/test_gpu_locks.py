"""Two workbenches of one machine do not share a GPU by accident; simulated GPUs, real locks and processes."""
from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from workbench import locks, preflight, profile
from workbench.errors import BadInput
from workbench.profile import ROOT

GPUS = [("GPU-a", "0"), ("GPU-b", "1"), ("GPU-c", "2"), ("GPU-d", "3")]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of four GPUs, as nvidia-smi would say it."""
    def smi(command, **_):
        shown = next((word.removeprefix("--id=").split(",") for word in command if word.startswith("--id=")), [i for _, i in GPUS])
        return SimpleNamespace(stdout="".join(f"{uuid}, {index}\n" for uuid, index in GPUS if index in shown))

    monkeypatch.setattr(locks.subprocess, "run", smi)
    monkeypatch.setattr(locks, "FOLDER", tmp_path)
    monkeypatch.setattr(locks, "GIVES_WAY_WITHIN_S", 10)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def asks(tp: int, visible: str | None = None, **flags) -> profile.Profile:
    cuda = profile.load("cpu-tiny", {"tp": tp}).model_copy(update={"engine": "cuda"})
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return cuda.model_copy(update={"server": cuda.server.model_copy(update={"environment": environment, "flags": flags})})


def held_elsewhere(folder, hold: str = "print('held', flush=True); time.sleep(600)") -> subprocess.Popen:
    """Another process that holds GPU-b for its run."""
    code = ("import sys, time, subprocess; from pathlib import Path; from workbench import locks\n"
            f"with locks._lock(Path({str(folder / 'draft-tp-workbench-GPU-b.lock')!r}), Path('/runs/theirs'), None) as file:\n    {hold}")
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert other.stdout.readline() == "held\n"
    return other


def test_which_gpus_a_profile_takes(machine):
    assert locks.gpus(asks(2)) == {"GPU-a": "0", "GPU-b": "1"}
    assert locks.gpus(asks(2, "2,3")) == {"GPU-c": "2", "GPU-d": "3"}
    assert locks.gpus(asks(2, **{"base-gpu-id": 1, "gpu-id-step": 2})) == {"GPU-b": "1", "GPU-d": "3"}
    assert locks.gpus(profile.load("cpu-tiny")) == {}                       # runs of the CPU engine may share the machine


def test_a_gpu_of_another_run_is_refused_by_its_name_before_anything_is_started(machine):
    other = held_elsewhere(machine)
    try:
        words = rf"GPU 1 is in use by the run in /runs/theirs \(process {other.pid}\); wait for it, or name other GPUs"
        with pytest.raises(BadInput, match=words), locks.held(asks(2), machine / "ours"):
            pass
        found = list(preflight.unlocked(asks(2)))
        assert [(c.status, c.name) for c in found] == [("refused", "tp")] and "/runs/theirs" in found[0].detail
        with locks.held(asks(2, "2,3"), machine / "ours"):                  # others are free
            pass
    finally:
        other.kill()
        other.communicate()


def test_a_refusal_lets_go_of_what_it_had_taken(machine):
    other = held_elsewhere(machine)
    with pytest.raises(BadInput), locks.held(asks(2), machine / "ours"):
        pass
    other.kill()
    other.communicate()
    with locks.held(asks(2), machine / "ours") as files:
        assert len(files) == 2 and locks.holders(asks(2)).keys() == {"0", "1"}
    assert locks.holders(asks(2)) == {} == {c.name: c for c in preflight.unlocked(asks(2))}


def test_the_lock_of_a_run_that_was_killed_lives_as_long_as_its_keeper(machine):
    """The keeper inherits it, and a run that finds the holder dead waits for that keeper."""
    other = held_elsewhere(machine, "subprocess.Popen(['sleep', '2'], pass_fds=[file]); print('held', flush=True); time.sleep(600)")
    other.kill()
    other.wait()
    assert locks.holders(asks(2)) == {}                 # about to be free: no reason to refuse
    with open(locks._file("GPU-b")) as file, pytest.raises(BlockingIOError):
        locks.fcntl.flock(file, locks.fcntl.LOCK_EX | locks.fcntl.LOCK_NB)
    with locks.held(asks(2), machine / "ours"):
        assert "ours" in locks._file("GPU-b").read_text()
    other.stdout.close()
