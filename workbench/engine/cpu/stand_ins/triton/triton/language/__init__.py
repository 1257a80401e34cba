"""Stand-in for triton.language: its names occur in kernels' bodies and annotations, which are never
run.
"""

from functools import partial

from workbench.engine.cpu.absent import absent

__getattr__ = partial(absent, __name__)


class constexpr:
    """A compile-time constant; SGLang makes some when its modules are imported."""

    def __init__(self, value):
        self.value = value
