"""Named settings of the communication layer: each a few environment variables and flags of SGLang,
with where it can be tried at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from workbench.engine.orders import SHARED_MEMORY


@dataclass(frozen=True)
class Facts:
    """What of a machine decides which settings it can try.

    capability: CUDA compute capability of the least capable GPU of the ranks, None without GPUs.
    nvlink: every two of them are linked by it.
    p2p: every two of them can read each other's memory; both None where not known.
    interfaces: of the network.
    environment: of whoever starts servers, the profile's variables included.
    """

    engine: str
    ranks: int
    capability: tuple[int, int] | None = None
    nvlink: bool | None = None
    p2p: bool | None = None
    interfaces: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


Rule = Callable[[Facts], str]  # why a setting cannot be tried on a machine; empty where it can


@dataclass(frozen=True)
class Setting:
    """One named setting. engine: cpu or cuda; about: what it changes and where that is written;
    flags: of SGLang's server, without dashes; rules: what must hold.

    expects: communicators of the target's group (engine/attest.py) that must be there (True) or not
        (False): SGLang goes on by NCCL where one cannot be set up, and only logs it
        (distributed/parallel_state.py:514 logger.warning).
    """

    name: str
    engine: str
    about: str
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, bool | int | str] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    expects: Mapping[str, bool] = field(default_factory=dict)

    def why_not(self, facts: Facts) -> str:
        """Why it cannot be tried on a machine; empty where it can."""
        if facts.engine != self.engine:
            return f"it is for the {self.engine} engine"
        return next(filter(None, (rule(facts) for rule in (_several, *self.rules))), "")


def _several(facts: Facts) -> str:
    return "" if facts.ranks > 1 else "one rank talks to nobody"


def _interface(name: str) -> Rule:
    return lambda facts: "" if name in facts.interfaces else f"there is no network interface {name}"


def _ranks(*numbers: int) -> Rule:
    return lambda facts: (
        ""
        if facts.ranks in numbers
        else f"it serves {', '.join(map(str, numbers))} ranks, not {facts.ranks}"
    )


def _capability(*majors: int) -> Rule:
    def rule(facts: Facts) -> str:
        if facts.capability is None or facts.capability[0] in majors:
            return ""
        return (
            f"it serves GPUs of compute capability {', '.join(map(str, majors))}, not"
            f" {facts.capability[0]}.{facts.capability[1]}"
        )

    return rule


def _unset(variable: str, off: str) -> Rule:
    """What somebody turned off on this machine stays off: SGLang's flags would overwrite the
    variable (entrypoints/engine.py:1909 NCCL_NVLS_ENABLE).
    """
    return lambda facts: (
        f"{variable}={off} turns it off on this machine"
        if facts.environment.get(variable) == off
        else ""
    )


def _nvlink(facts: Facts) -> str:
    return "the GPUs are not all linked by NVLink" if facts.nvlink is False else ""


def _no_nvlink(facts: Facts) -> str:
    return "the GPUs are linked by NVLink" if facts.nvlink else ""


def _p2p(facts: Facts) -> str:
    return "the GPUs cannot read each other's memory" if facts.p2p is False else ""


def _custom(facts: Facts) -> str:
    """SGLang's custom all-reduce: for two ranks, or all linked by NVLink
    (device_communicators/custom_all_reduce_utils.py:492 full_nvlink).
    """
    return (
        "SGLang has no custom all-reduce for more than two GPUs without NVLink"
        if facts.nvlink is False and facts.ranks > 2
        else _p2p(facts)
    )


def _nccl(name: str, about: str, environment: Mapping[str, str], *rules: Rule) -> Setting:
    """A setting of NCCL. Small messages go past NCCL while SGLang's own all-reduce is on, so that
    is off.
    """
    return Setting(
        f"nccl-{name}",
        "cuda",
        f"{about} SGLang's own all-reduce is off, so that every collective is NCCL's.",
        environment,
        {"disable-custom-all-reduce": True},
        rules,
        {"custom": False},
    )


def _gloo(name: str, about: str, environment: Mapping[str, str], *rules: Rule) -> Setting:
    """A setting of Gloo, which ranks of one machine go past by memory they share
    (engine/cpu/shared.py), so that is off.
    """
    return Setting(
        f"gloo-{name}",
        "cpu",
        f"{about} Shared memory is off, so that every collective is Gloo's.",
        {SHARED_MEMORY: "off", **environment},
        {},
        rules,
        {"shared_memory": False},
    )


_MULTICAST = _unset("NCCL_NVLS_ENABLE", "0"), _unset("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
SETTINGS: dict[str, Setting] = {
    s.name: s
    for s in (
        _gloo("plain", "Gloo chooses everything itself.", {}),
        # Gloo takes one device from each name in its variable, each with a thread of its own, and
        # its contexts take turns (torch's ProcessGroupGloo). Without the variable it uses the
        # interface that the host's own name
        # resolves to.
        _gloo(
            "lo",
            "Gloo talks over the loopback interface (GLOO_SOCKET_IFNAME).",
            {"GLOO_SOCKET_IFNAME": "lo"},
            _interface("lo"),
        ),
        _gloo(
            "lo-x2",
            "Gloo talks over two devices of the loopback interface in turn, each with a thread of"
            " its own.",
            {"GLOO_SOCKET_IFNAME": "lo,lo"},
            _interface("lo"),
        ),
        # NCCL's variables: docs.nvidia.com/deeplearning/nccl/user-guide, "Environment Variables".
        # LL128 is left out: forced where the hardware does not order its stores it corrupts data,
        # and NCCL takes it by itself where it is safe.
        _nccl("plain", "NCCL chooses everything itself.", {}),
        _nccl("ring", "All-reduce by rings (NCCL_ALGO).", {"NCCL_ALGO": "allreduce:ring"}),
        _nccl(
            "tree",
            "All-reduce by trees, fewer hops for small messages (NCCL_ALGO).",
            {"NCCL_ALGO": "allreduce:tree"},
        ),
        _nccl("ll", "The low-latency protocol for every size (NCCL_PROTO).", {"NCCL_PROTO": "LL"}),
        _nccl(
            "simple",
            "The bandwidth protocol for every size (NCCL_PROTO).",
            {"NCCL_PROTO": "Simple"},
        ),
        _nccl(
            "channels-1",
            "One channel: one block of threads a collective (NCCL_MAX_CTAS).",
            {"NCCL_MAX_CTAS": "1"},
        ),
        _nccl("channels-4", "At most four channels (NCCL_MAX_CTAS).", {"NCCL_MAX_CTAS": "4"}),
        _nccl("channels-16", "At least sixteen channels (NCCL_MIN_CTAS).", {"NCCL_MIN_CTAS": "16"}),
        _nccl(
            "p2p-off",
            "No direct access between GPUs: all goes through the host's memory (NCCL_P2P_DISABLE).",
            {"NCCL_P2P_DISABLE": "1"},
        ),
        _nccl(
            "p2p-sys",
            "Direct access between GPUs even across sockets (NCCL_P2P_LEVEL=SYS).",
            {"NCCL_P2P_LEVEL": "SYS"},
            _no_nvlink,
            _p2p,
        ),
        _nccl(
            "buffer-1m",
            "Buffers of 1 MiB a channel instead of 4 (NCCL_BUFFSIZE).",
            {"NCCL_BUFFSIZE": str(1 << 20)},
        ),
        _nccl(
            "buffer-16m",
            "Buffers of 16 MiB a channel instead of 4 (NCCL_BUFFSIZE).",
            {"NCCL_BUFFSIZE": str(16 << 20)},
        ),
        Setting(
            "custom-v1",
            "cuda",
            "SGLang's older all-reduce kernel instead of the one compiled on the spot "
            "(device_communicators/custom_all_reduce.py:387 SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2).",
            {"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"},
            {},
            (_ranks(2, 4, 6, 8), _custom),
            {"custom": True},
        ),
        Setting(
            "pcie-ipc",
            "cuda",
            "FlashInfer's all-reduce for hosts without NVLink, bf16 alone; a draft on a group of"
            " its own does not get it (device_communicators/pcie_ipc_ar.py:98 eligible_group).",
            {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"},
            {},
            (_ranks(2, 4, 8), _no_nvlink, _p2p),
            {"pcie_ipc": True},
        ),
        Setting(
            "mscclpp",
            "cuda",
            "MSCCL++ for small all-reduces and all-gathers"
            " (device_communicators/pymscclpp.py:324 _SUPPORTED_WORLD_SIZES).",
            {},
            {"enable-mscclpp": True},
            (_ranks(4, 8), _nvlink),
            {"mscclpp": True},
        ),
        Setting(
            "torch-symm-mem",
            "cuda",
            "All-reduce by torch's symmetric memory"
            " (device_communicators/torch_symm_mem.py:34 TorchSymmMemCommunicator).",
            {},
            {"enable-torch-symm-mem": True},
            (_capability(9, 10), _ranks(4, 6, 8), _nvlink, *_MULTICAST),
            {"torch_symm_mem": True},
        ),
        Setting(
            "nccl-nvls",
            "cuda",
            "NCCL reduces inside the NVLink switch (--enable-nccl-nvls).",
            {},
            {"enable-nccl-nvls": True, "disable-custom-all-reduce": True},
            (_capability(9, 10), _nvlink, *_MULTICAST),
            {"custom": False},
        ),
        Setting(
            "nccl-symm-mem",
            "cuda",
            "NCCL's symmetric memory, which also turns the NVLink switch's reductions on"
            " (--enable-symm-mem).",
            {},
            {"enable-symm-mem": True},
            (_capability(9, 10), _nvlink, *_MULTICAST),
            {"nccl": True},
        ),
    )
}


def choose(facts: Facts, names: Sequence[str] = ()) -> tuple[tuple[str, ...], dict[str, str]]:
    """Of the named settings (all of the machine's engine where none is named): those to be tried,
    and {setting: why it cannot be tried here}.
    """
    chosen = names or [name for name, setting in SETTINGS.items() if setting.engine == facts.engine]
    skipped = {name: why for name in chosen if (why := SETTINGS[name].why_not(facts))}
    return tuple(name for name in chosen if name not in skipped), skipped
