"""Stand-in for triton: modules can define their kernels; launching one raises RuntimeError with its
name.
"""

from workbench.engine.cpu.absent import Absent, stand_in

__version__ = "0.0.0"
# SGLang hooks triton's kernel loading where it finds knobs (srt/utils/triton_load_watch.py:46
# knobs), and goes without where it does not.
__getattr__ = stand_in(__name__, missing=("knobs",))


def jit(function=None, **_):
    """``@triton.jit`` and ``@triton.jit(...)``: a kernel that cannot be launched."""
    return (
        jit
        if function is None
        else Absent(f"the triton kernel {function.__module__}.{function.__qualname__}")
    )


def autotune(*_, **__):
    return lambda kernel: kernel


heuristics = autotune


class Config:
    """A choice for autotune: made where kernels are defined, read only by a launch."""

    def __init__(self, kwargs, **settings):
        self.kwargs, self.settings = kwargs, settings


def cdiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
