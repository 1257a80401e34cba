"""Which share of a GPU's memory SGLang takes for weights and KV pools where nobody tells it.

Restated from SGLang, whose own functions want an import of seconds and a GPU to ask; a test holds
these against them (tests/engine/test_memory_of_sglang.py).
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from workbench.experiment.profile import Profile
from workbench.predict.model_shape import ModelShape
from workbench.serving import launch_command

MIB = 1 << 20
# Prefill tokens in one forward, by the GPU's capacity below so many MiB
# (arg_groups/memory_hook.py:90 gpu_mem).
_CHUNKS = ((20 * 1024, 2048), (60 * 1024, 4096), (160 * 1024, 8192), (float("inf"), 16384))
_MAX_PREFILL_TOKENS = 16384  # server_args' default of --max-prefill-tokens
# Of the KV budget, for embeddings of pictures (srt/environ.py:1598 SGLANG_VLM_CACHE_SIZE_MB).
_PICTURES = "SGLANG_VLM_CACHE_SIZE_MB", 100
# Of the KV budget too, where a GPU carries them (srt/environ.py:1622 SGLANG_MM_FEATURE_CACHE_MB).
_FEATURES = "SGLANG_MM_FEATURE_CACHE_MB", 1024
# A tower without its size, by SGLang's rule and by the defaults of its own classes. The published
# Kimi-K2.5 names its sizes vt_..., which SGLang's class does not read
# (configs/kimi_k25.py:46 hidden_size).
_TOWER = {"num_hidden_layers": 24, "hidden_size": 1024}
_TOWERS = {"KimiK25ForConditionalGeneration": {"num_hidden_layers": 27, "hidden_size": 1152}}


def static_fraction(profile: Profile, target: ModelShape | None, capacity: int) -> float:
    """--mem-fraction-static as the profile gives it, else as SGLang would choose it on GPUs of
    ``capacity`` bytes (arg_groups/memory_hook.py:47 handle_gpu_memory_settings).
    """
    if (given := profile.number("mem-fraction-static")) is not None:
        return given
    total = capacity / MIB
    kept = reserve(profile, target, capacity)
    if total > 60 * 1024:
        kept = max(kept, 10 * 1024)
    if profile.flag("moe-a2a-backend") == "deepep" and not _off(profile, "decode"):
        kept += 2 * 1024
    return round((total - kept) / total, 3) * _for_pictures(target)


def reserve(profile: Profile, target: ModelShape | None, capacity: int) -> float:
    """MiB that SGLang counts for activations, communicators and graphs, before its floor of 10 GiB
    on large GPUs.
    """
    kept = 512 + 1.5 * max(2048, prefill_tokens(profile, capacity)) + profile.tp / 8 * 1024
    return kept + _graphs(profile, target, capacity)


def prefill_tokens(profile: Profile, capacity: int) -> float:
    """--chunked-prefill-size as given or by capacity; with -1, the most that one forward takes."""
    chunk = profile.number("chunked-prefill-size")
    if chunk is None:
        return next(tokens for below, tokens in _CHUNKS if capacity / MIB < below)
    return chunk if chunk > 0 else profile.number("max-prefill-tokens", _MAX_PREFILL_TOKENS)


def withheld(profile: Profile, target: ModelShape | None) -> int:
    """Bytes of the static share that go to no KV pool: what a multimodal target keeps for pictures
    (mem_cache/kv_cache_configurator.py:202 mm_runtime_reservation_gb).
    """
    if target is None or not is_multimodal(target.architecture):
        return 0
    kept = [_PICTURES]
    if profile.flag("mm-feature-transport") in ("cuda_ipc", "cuda_vmm"):
        kept.append(_FEATURES)
    return MIB * sum(int(profile.server.environment.get(name, size)) for name, size in kept)


def is_multimodal(architecture: str) -> bool:
    """Whether SGLang serves this class as one that sees or hears."""
    return architecture in _multimodal()


def _graphs(profile: Profile, target: ModelShape | None, capacity: int) -> float:
    """MiB for CUDA graphs (arg_groups/memory_hook.py:357 reserve_for_graph_mb)."""
    kept = 0.0
    if not _off(profile, "decode"):
        kept += 2 * profile.number("cuda-graph-max-bs-decode", launch_command.most_at_once(profile))
    if not _off(profile, "prefill"):
        if target is not None and target.mla:
            kept += 1.5 * 1024
        else:
            limits = prefill_tokens(profile, capacity), profile.number("max-total-tokens")
            kept += 8 * _prefill_graphs(min(limit for limit in limits if limit is not None))
    return kept


def _prefill_graphs(most: float) -> int:
    """How many sizes of prefill are captured (arg_groups/cuda_graph_hook.py:480
    generate_prefill_cuda_graph_batch_sizes).
    """
    steps = (
        (4, 33, 4),
        (48, 257, 16),
        (288, 513, 32),
        (576, 1025, 64),
        (1280, 4097, 256),
        (4608, int(most) + 1, 512),
    )
    return sum(size <= most for step in steps for size in range(*step))


def _off(profile: Profile, phase: str) -> bool:
    """Whether graphs of a phase are turned off; its own flag wins
    (arg_groups/cuda_graph_hook.py:68 cuda_graph_backend_decode).
    """
    own = profile.flag(f"cuda-graph-backend-{phase}")
    if own is not None:
        return own == "disabled"
    general = ("disable-cuda-graph", f"disable-{phase}-cuda-graph")
    return any(profile.flag(name, False) for name in general)


def _for_pictures(target: ModelShape | None) -> float:
    """What a tower's size leaves of the fraction (arg_groups/memory_hook.py:417
    adjust_mem_fraction_for_vlm).
    """
    if target is None or not is_multimodal(target.architecture) or not target.vision:
        return 1.0
    tower = _TOWERS.get(target.architecture, _TOWER) | target.vision
    layers, hidden = tower["num_hidden_layers"], tower["hidden_size"]
    complexity = layers * hidden**2 / (24 * 1024**2)
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (complexity - 1.0)))


@cache
def _multimodal() -> frozenset[str]:
    """The list in SGLang's source (configs/model_config.py:2391 multimodal_model_archs), read
    without an import; empty where there is no SGLang.
    """
    spec = find_spec("sglang")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        return frozenset()
    tree = ast.parse((Path(folders[0]) / "srt/configs/model_config.py").read_text())
    lists = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return frozenset(
        entry.value
        for entry in lists["multimodal_model_archs"].elts
        if isinstance(entry, ast.Constant)
    )
