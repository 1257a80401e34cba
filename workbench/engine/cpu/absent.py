"""What import stand-ins are made of: a package's names can be imported and passed around; using one
raises, by its name.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class Absent:
    """Something of a package that is not installed, e.g. ``triton.language.load``; its attributes
    are absent as well.
    """

    def __init__(self, name: str):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Absent:
        return absent(self.__name__, name)

    def __call__(self, *_, **__):
        raise RuntimeError(f"{self.__name__} has no CPU stand-in")

    __getitem__ = __call__  # a kernel is launched by kernel[grid](...)

    def __mro_entries__(self, bases) -> tuple[type, ...]:
        """A class may derive from an absent one; making an instance of it is a use."""
        return (type(self.__name__, (), {"__init__": lambda derived, *_, **__: self()}),)

    def __repr__(self) -> str:
        return f"<absent {self.__name__}>"


class AbsentModule(ModuleType):
    """A submodule of a package that is not installed."""

    def __getattr__(self, name: str) -> Absent:
        return absent(self.__name__, name)


class Submodules:
    """Finds ``package.anything``: torch, transformers and SGLang import a few dozen submodules
    without using them here.
    """

    def __init__(self, package: str, missing: tuple[str, ...]):
        self._prefix, self._missing = f"{package}.", missing

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        ours = (
            name.startswith(self._prefix) and name.removeprefix(self._prefix) not in self._missing
        )
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> AbsentModule:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(package: str, missing: tuple[str, ...] = ()):
    """Make every submodule of a stand-in importable, but for the missing; returns the
    ``__getattr__`` for the package itself.
    """
    sys.meta_path.append(
        Submodules(package, missing)
    )  # last, so that a submodule with a file of its own is that file
    return lambda name: absent(package, name, missing)


def absent(owner: str, name: str, missing: tuple[str, ...] = ()) -> Absent:
    """``owner.name``; for Python's own probes (``__path__``, ``__wrapped__``, ...) and what is
    missing, the AttributeError they expect.
    """
    if name in missing or name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"{owner!r} has no attribute {name!r}")
    return Absent(f"{owner}.{name}")
