"""A driver of NVIDIA's that is not there: the calls of NVML that workbench.serving.gpus makes, over
GPUs that a test names.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pynvml
import pytest

from workbench.serving import gpus


def install(
    monkeypatch: pytest.MonkeyPatch,
    uuids: Sequence[str],
    free: Sequence[int] = (),
    *,
    name: str = "NVIDIA H200",
    capability: tuple[int, int] = (9, 0),
    linked: bool = True,
) -> list[int]:
    """Let the machine have these GPUs; none for an empty list. Returns the free bytes of each,
    which a test may change.
    """
    left = list(free) or [100 << 30] * len(uuids)
    if not uuids:

        def absent() -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(gpus.pynvml, "nvmlInit", absent)
        return left
    status = pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(uuids),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda index: uuids[index],
        "nvmlDeviceGetName": lambda index: name,
        "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(
            free=left[index], total=143771 << 20
        ),
        "nvmlDeviceGetCudaComputeCapability": lambda index: capability,
        "nvmlDeviceGetP2PStatus": lambda a, b, how: status,
        "nvmlSystemGetDriverVersion": lambda: "580.159.04",
        "nvmlDeviceGetMaxClockInfo": lambda index, which: 1980,
        "nvmlDeviceGetPowerManagementLimit": lambda index: 700_000,
        "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(busId=f"00000000:0{index}:00.0"),
    }
    for call, answer in answers.items():
        monkeypatch.setattr(gpus.pynvml, call, answer)
    return left
