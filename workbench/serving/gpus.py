"""The GPUs of this machine, by the driver's own library (NVML): which a profile's ranks take, what
they have free, how they are linked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

import psutil
import pynvml

from workbench.experiment.communication import Facts
from workbench.experiment.profile import Profile

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver knows it.

    index: NVML's, in the order of PCI addresses.
    free, total: bytes free when it was asked, and of all of it.
    capability: CUDA compute capability.
    """

    index: int
    uuid: str
    name: str
    free: int
    total: int
    capability: tuple[int, int]


def visible(named: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES names, in its order; all of them for None.

    A name is an index, a UUID or the beginning of one. As CUDA does, what follows a name that means
    no GPU is not visible (CUDA C++ Programming Guide, "CUDA Environment Variables"). Empty where
    there is no driver.
    """
    with _driver() as there:
        if not there:
            return ()
        every = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if named is None:
        return tuple(every)
    found: list[Gpu] = []
    for word in named.split(","):
        gpu = _named(word.strip(), every)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return tuple(found)


def ours(profile: Profile) -> tuple[Gpu, ...]:
    """The GPUs that the profile's ranks on this node take, first rank first; none on the CPU
    engine.

    SGLang gives rank r the visible GPU base-gpu-id + r * gpu-id-step
    (managers/data_parallel_controller.py:751 gpu_id_step).
    """
    if profile.engine != "cuda":
        return ()
    first = int(profile.number("base-gpu-id", 0))
    step = max(1, int(profile.number("gpu-id-step", 1)))
    shown = visible(environment(profile).get(VISIBLE))
    return shown[first::step][: profile.ranks_a_node]


def environment(profile: Profile) -> Mapping[str, str]:
    """The variables that a server of this profile is started with."""
    return {**os.environ, **profile.server.environment}


def facts(profile: Profile) -> Facts:
    """What of this machine decides which settings of the communication layer the profile's ranks
    can try.
    """
    if profile.engine == "cpu":
        interfaces = tuple(psutil.net_if_addrs())
        return Facts("cpu", profile.tp, interfaces=interfaces, environment=environment(profile))
    taken = ours(profile)
    return Facts(
        "cuda",
        profile.tp,
        capability=min((gpu.capability for gpu in taken), default=None),
        nvlink=linked(taken, "NVLINK"),
        p2p=linked(taken, "READ"),
        environment=environment(profile),
    )


def linked(taken: Sequence[Gpu], how: str) -> bool | None:
    """Whether every two of these GPUs reach each other; None where the driver does not say, or
    there are no two.

    how: NVLINK (over NVLink) or READ (by any way), as in nvmlGpuP2PCapsIndex_t.
    """
    pairs = list(combinations(taken, 2))
    with _driver() as there:
        if not there or not pairs:
            return None
        try:
            return all(_status(a, b, how) == pynvml.NVML_P2P_STATUS_OK for a, b in pairs)
        except pynvml.NVMLError:
            return None


def described(taken: Sequence[Gpu]) -> list[dict[str, str]]:
    """What a run's provenance says of each GPU, under nvidia-smi's names and in its units."""
    rows = []
    with _driver() as there:
        for gpu in taken if there else ():
            handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20
            clock = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
            power = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
            rows.append(
                {
                    "name": gpu.name,
                    "driver_version": _text(pynvml.nvmlSystemGetDriverVersion()),
                    "memory.total": f"{memory} MiB",
                    "pci.bus_id": _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                    "clocks.max.sm": f"{clock} MHz",
                    "power.limit": f"{power:.2f} W",
                }
            )
    return rows


def topology(taken: Sequence[Gpu]) -> str | None:
    """How every two of these GPUs reach each other, a line a pair; None where there are no two."""
    lines = []
    with _driver() as there:
        for a, b in combinations(taken, 2) if there else ():
            ways = [how for how in ("NVLINK", "READ") if _reaches(a, b, how)]
            lines.append(f"GPU{a.index} GPU{b.index}: {', '.join(ways) or 'through the host'}")
    return "\n".join(lines) or None


@contextmanager
def _driver() -> Iterator[bool]:
    """NVML for as long as it is needed; false where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index,
        _text(pynvml.nvmlDeviceGetUUID(handle)),
        _text(pynvml.nvmlDeviceGetName(handle)),
        memory.free,
        memory.total,
        tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )


def _named(word: str, every: Sequence[Gpu]) -> Gpu | None:
    if word.isdigit():
        return every[int(word)] if int(word) < len(every) else None
    return next((gpu for gpu in every if word and gpu.uuid.startswith(word)), None)


def _status(a: Gpu, b: Gpu, how: str) -> int:
    handles = (pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in (a, b))
    return pynvml.nvmlDeviceGetP2PStatus(*handles, getattr(pynvml, f"NVML_P2P_CAPS_INDEX_{how}"))


def _reaches(a: Gpu, b: Gpu, how: str) -> bool:
    try:
        return _status(a, b, how) == pynvml.NVML_P2P_STATUS_OK
    except pynvml.NVMLError:
        return False


def _text(said: str | bytes) -> str:
    """Older releases of the library answer with bytes."""
    return said.decode() if isinstance(said, bytes) else said
