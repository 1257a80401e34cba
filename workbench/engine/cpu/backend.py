"""Keeps SGLang's intel_amx attention back end, which has EAGLE on the CPU, where it would fall back to torch_native, which has not."""


def keep_intel_amx(orig, view) -> dict:
    """AROUND hook of sglang/srt/arg_groups/overrides.py:1301 ``_attention_backend_platform_fallbacks``.

    SGLang leaves intel_amx where the compiled sgl_kernel lacks AMX; plain torch functions serve it here, so that one
    rewriting is dropped. What the original decides for other devices stays.
    """
    changes = orig(view)
    if view.device == "cpu" and view.attention_backend == "intel_amx":
        return {name: value for name, value in changes.items() if name != "attention_backend"}
    return changes
