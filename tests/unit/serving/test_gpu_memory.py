"""A run on GPUs says whether its memory was given back."""

from types import SimpleNamespace

import pytest
from simulated_runs import profile

from workbench.experiment import runlog
from workbench.run import measuring


@pytest.mark.parametrize(
    "readings, back",
    [
        ([[100 << 30] * 2, [90 << 30, 100 << 30], [100 << 30] * 2], True),
        ([[100 << 30] * 2] + [[90 << 30, 100 << 30]] * 99, False),
    ],
)
def test_memory_that_is_not_given_back_is_said(readings, back, tmp_path, monkeypatch):
    left = iter(readings)
    monkeypatch.setattr(
        measuring.gpus, "ours", lambda _: [SimpleNamespace(free=free) for free in next(left)]
    )
    monkeypatch.setattr(measuring, "GIVEN_BACK_WITHIN_S", 2)
    with (
        runlog.RunLog(tmp_path / "runs.jsonl") as file,
        pytest.raises(ZeroDivisionError),
        measuring.gpus_given_back(profile().model_copy(update={"engine": "cuda"}), file),
    ):
        raise ZeroDivisionError
    (found,) = runlog.read(tmp_path / "runs.jsonl")
    assert found.value["given_back"] is back and found.value["free_before"] == readings[0]
