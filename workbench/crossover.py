"""Crossover: up to which number of requests at once one setting is faster than another, from their ratios at several loads."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.stats import Interval


@dataclass(frozen=True)
class Crossover:
    """Of the ratio a / b over loads. faster, slower, undecided: the loads where the interval is above 1, below 1, or holds it.

    at: where the ratio's line crosses 1, straight between two loads on the scale of their logarithms; every crossing, of which a line
    through noise may have several. The intervals say which are sure: a crossing is where ``faster`` and ``slower`` are on both sides.
    """

    faster: tuple[int, ...]
    slower: tuple[int, ...]
    undecided: tuple[int, ...]
    at: tuple[float, ...]

    @property
    def sure(self) -> bool:
        """Whether it is faster at some load and slower at another."""
        return bool(self.faster and self.slower)


def find(ratios: Mapping[int, Interval]) -> Crossover:
    """ratios: {requests at once: ratio with its interval}."""
    loads = sorted(ratios)
    crossings = []
    for low, high in zip(loads, loads[1:]):
        a, b = math.log(ratios[low].ratio), math.log(ratios[high].ratio)
        if a * b < 0 or b == 0 != a:
            crossings.append(low * (high / low) ** (a / (a - b)))
    decided = {load: ratios[load].decided for load in loads}
    return Crossover(tuple(n for n in loads if decided[n] and ratios[n].ratio > 1), tuple(n for n in loads if decided[n] and ratios[n].ratio < 1),
                     tuple(n for n in loads if not decided[n]), tuple(crossings))


def sentence(a: str, b: str, ratios: Mapping[int, Interval]) -> str:
    """The crossover in words; "" where nothing was compared."""
    if not ratios:
        return ""
    found = find(ratios)
    parts = [f"{word} at {_loads(loads)}" for word, loads in (("faster", found.faster), ("slower", found.slower),
                                                            ("not told apart", found.undecided)) if loads]
    where = f"; its ratio crosses 1 near {', '.join(f'{n:.2g}' for n in found.at)} at once" if found.sure and found.at else ""
    return f"{a} against {b}: {', '.join(parts)}{where}."


def _loads(loads: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, loads))} request{'s' if loads != (1,) else ''} at once"
