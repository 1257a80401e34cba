"""Keeps SGLang's intel_amx attention back end, which has EAGLE on the CPU, where it would fall back to torch_native, which has not."""


def keep_intel_amx(orig, view) -> dict:
    """AROUND hook of sglang/srt/arg_groups/overrides.py:1301 ``_attention_backend_platform_fallbacks``.

    SGLang leaves intel_amx where the compiled sgl_kernel has no AMX; plain torch functions serve it here, so nothing is changed
    (and nothing logged) for it. Everything else is as in the original.
    """
    return {} if view.device == "cpu" and view.attention_backend == "intel_amx" else orig(view)
