"""Which folders of import stand-ins a CPU server needs in front of its PYTHONPATH."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

_STAND_INS = Path(__file__).resolve().parent / "stand_ins"


def python_path() -> list[str]:
    """Folders to prepend, in order.

    sgl_kernel's always: a compiled one, where installed, has the CUDA functions only.
    rfc3987_syntax's always: it leaves out what takes long to import and serves nothing. triton's
    and torchvision's only where this Python has no real one (looked up beside the stand-ins, so a
    path that has them in front already changes nothing).
    """
    elsewhere = [entry for entry in sys.path if _STAND_INS not in Path(entry).resolve().parents]
    missing = [
        name for name in ("triton", "torchvision") if PathFinder.find_spec(name, elsewhere) is None
    ]
    return [str(_STAND_INS / name) for name in ("sgl_kernel", "rfc3987_syntax", *missing)]
