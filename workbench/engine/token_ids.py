"""A server of token ids builds neither a tokenizer nor a processor, and says so."""

from __future__ import annotations

from workbench.engine.hooks import Hook

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
# What a TokenizerManager builds of a model's folder.
_BUILT = ("tokenizer", "processor", "mm_processor")


def hooks() -> list[Hook]:
    """In the launcher, where requests are read.

    SGLang builds the processor of a multimodal target even under --skip-tokenizer-init
    (managers/tokenizer_manager.py:622 get_mm_processor), from code of the model's folder where it
    brings some. Prompts of token ids need none, so that code is not run and need not be trusted.
    """
    return [
        Hook(_MANAGER + "init_tokenizer_and_processor", _build_nothing, ("self",)),
        Hook(_MANAGER + "get_internal_state", _say_what_is_built, ("self",)),
    ]


def _build_nothing(original, self):
    from sglang.srt.runtime_context import get_serving

    if not get_serving().skip_tokenizer_init:
        return original(self)
    for name in (*_BUILT, "async_dynamic_batch_tokenizer"):
        setattr(self, name, None)


async def _say_what_is_built(original, self):
    """Beside what the ranks attest: ``launcher``, the names of what was built in this process."""
    states = await original(self)
    built = [name for name in _BUILT if getattr(self, name, None) is not None]
    for state in states:
        state.get("draft_tp", {})["launcher"] = {"built": built}
    return states
