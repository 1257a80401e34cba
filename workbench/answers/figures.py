"""Figures of recorded runs in the words of a written page: ratios, cycles, accept lengths, starts
and what their answers are worth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from workbench.answers import memory_check
from workbench.answers.parted_answers import answers, parted
from workbench.answers.profiled_cycles import Profiled
from workbench.experiment import metrics, runlog
from workbench.experiment.metrics import IN_WORDS
from workbench.experiment.profile_sections import ROOT
from workbench.judge.clustering import SURE
from workbench.judge.findings import CorruptedRank, GpuMemory
from workbench.judge.refusal import KINDS
from workbench.judge.verdict_file import (
    ArmEntry,
    ComparedEntry,
    ComparisonEntry,
    IntervalEntry,
    VerdictFile,
    Yardstick,
)
from workbench.predict.machine import Machine
from workbench.run import recording
from workbench.run.lab import Run, reopen

ABSENT = "–"
_MAIN = "draft_tp"  # the experiment of 04_draft_tp
_TIME = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


class Figures:
    """What the recordings in a folder say: each public method is an expression of the sources under
    docs/src.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.verdict: Callable[[str], VerdictFile] = cache(
            lambda name: recording.stored_verdict(name, folder)
        )
        self.run: Callable[[str], Run] = cache(lambda name: reopen(folder / name))

    # -------------------------------------------------------------- comparisons

    def ratio(self, name: str, a: str, b: str, metric: str | None = None) -> str:
        """A ratio with its interval, by the metric that carries the claim where none is named."""
        return _interval(self._comparison(name, a, b, metric))

    def these(self, name: str, a: str, b: str) -> str:
        """The narrower statement about the recording's own servers."""
        return _interval(self._comparison(name, a, b).beside)

    def found(self, name: str, a: str, b: str) -> str:
        """A comparison in words."""
        return _found(self._comparison(name, a, b))

    def ratio_table(self, rows: Iterable[Sequence[str]]) -> str:
        """One row a comparison (recording, a, b, what it is): by which metric, ratio, level, what
        it rests on, what was found, the arm against itself, and whether comparison and run are
        valid.
        """
        told = []
        for name, a, b, about in rows:
            c = self._comparison(name, a, b)
            told.append(
                (
                    f"`{name}`: {about}",
                    f"`{a}` ÷ `{b}`",
                    IN_WORDS[c.metric],
                    _interval(c) if c.valid else ABSENT,
                    f"{100 * c.level:.3g} %",
                    f"{c.starts} / {c.pairs}" if c.pairs else f"{c.starts} a side",
                    _found(c),
                    _interval(c.beside) if c.beside else ABSENT,
                    _interval(c.control) if c.control else ABSENT,
                    f"{_yes(c.valid)} / {_yes(self.verdict(name).valid)}",
                )
            )
        return table(
            (
                "recording",
                "comparison",
                "of",
                "ratio (interval)",
                "level",
                "starts / pairs",
                "found",
                "these servers alone (95 %)",
                "control (95 %)",
                "valid: ratio / run",
            ),
            told,
        )

    def these_alone(self, names: Iterable[str]) -> str:
        """The recordings in which own-1 ÷ shared is decided for their own servers and not for
        others.
        """
        found = [(name, self._comparison(name, "own-1", "shared")) for name in names]
        told = [
            f"`{name}`"
            for name, c in found
            if (c.beside and not c.beside.low <= 1 <= c.beside.high)
            and not (c.valid and not c.low <= 1 <= c.high)
        ]
        return ", ".join(told) or "none"

    def clustered(self, names: Iterable[str]) -> str:
        """The recordings in which the pairs of one start resemble each other, with their
        intraclass correlation (own-1 ÷ shared).
        """
        found = [(name, self._comparison(name, "own-1", "shared").alike) for name in names]
        told = [
            f"`{name}` ({alike.icc:.2f})"
            for name, alike in found
            if alike and alike.p is not None and alike.p < SURE
        ]
        return ", ".join(told) or "none"

    def control(self, name: str) -> str:
        """How far the control's arm is from itself, in percent."""
        return f"{100 * abs(self.verdict(name).control.ratio - 1):.1f} %"

    def _comparison(self, name: str, a: str, b: str, metric: str | None = None) -> ComparisonEntry:
        (one,) = [
            c
            for c in self.verdict(name).comparisons
            if (c.a, c.b, c.experiment) == (a, b, _MAIN)
            and (c.claims if metric is None else c.metric == metric)
        ]
        return one

    # -------------------------------------------------------------- one arm

    def cycle(self, name: str, arm: str) -> str:
        """Milliseconds of an arm's cycle."""
        return f"{self._arm(name, arm).cycle_ms:.2f}"

    def stage(self, name: str, arm: str, *stages: str) -> str:
        """Milliseconds a cycle of some stages together."""
        return f"{sum(self._arm(name, arm).stage_ms[stage] for stage in stages):.2f}"

    def block_cycles(self, names: Sequence[str], arm: str) -> str:
        """The shortest and longest cycle among an arm's blocks, in milliseconds."""
        told = [
            ms
            for name in names
            for block in metrics.RunView(self.run(name).profile, self.run(name).records).blocks(
                _MAIN, arm
            )
            if (ms := metrics.cycle_ms([block]))
        ]
        return f"{min(told):.2f} to {max(told):.2f}"

    def blocks(self, name: str, arm: str) -> int:
        return self._arm(name, arm).blocks

    def accept_length(self, name: str, arm: str, interval: bool = True) -> str:
        length = self._arm(name, arm).accept.length
        told = f"{length.value:.2f}"
        return f"{told} ({length.low:.2f} to {length.high:.2f})" if interval else told

    def collectives(self, name: str, arm: str, stage: str = "draft") -> str:
        return f"{self._arm(name, arm).collectives_per_round[stage]:g}"

    def _arm(self, name: str, arm: str) -> ArmEntry:
        return self.verdict(name).arms[arm]

    # -------------------------------------------------------------- one run

    def sentence(self, name: str) -> str:
        """The verdict in a sentence."""
        return self.verdict(name).sentence

    def setting(self, name: str, path: str) -> Any:
        """A field of the profile, by its dotted path."""
        found: Any = json.loads((self.folder / name / "profile.json").read_text())
        for part in path.split("."):
            found = found[part]
        return found

    def shape(self, path: str, *keys: str) -> int:
        """A number of the config.json of a shape under fixtures/shapes."""
        found: Any = json.loads((ROOT / "fixtures" / "shapes" / path / "config.json").read_text())
        for key in keys:
            found = found[key]
        return found

    def parity(self, name: str) -> dict[str, Any]:
        """How many answers were compared, how many speculating arms gave shared's, and of how many
        shared's differ from none's.
        """
        found = answers(self.folder / name)
        none, shared = found.pop("none"), found.pop("shared")
        return {
            "of": len(shared),
            "arms": len(found) + 1,
            "as_shared": sum(own == shared for own in found.values()) + 1,
            "differ": sum(none[key] != shared[key] for key in none),
            "verdict": self.verdict(name).parity["shared"],
            "itself": self._itself(name),
        }

    def _itself(self, name: str) -> str:
        """In how many answers none differs from itself."""
        (own,) = [
            c for c in self.verdict(name).parity_counts if (c.experiment, c.arm) == (_MAIN, "none")
        ]
        return f"{own.own_mismatched} of {own.own_compared}"

    def rounding(self, names: Sequence[str]) -> dict[str, Any]:
        """Where answers of shared and none part: by how much the float32 target prefers one of the
        two tokens, and the size of its logits, beside a step of bfloat16 there.
        """
        apart, best, step = parted([self.folder / name for name in names])
        return {
            "count": len(apart),
            "apart": f"{min(apart):.3f} to {max(apart):.3f}",
            "logits": f"{min(best):.1f} to {max(best):.1f}",
            "step": step,
        }

    def traced(self, name: str, arm: str, kind: str, *stages: str) -> str:
        """Milliseconds a cycle that the profiler's trace has of one class of kernels."""
        parts = self.run(name).finding(f"trace {arm}", Profiled).parts
        return f"{1e3 * sum(parts[stage].a_round(kind) for stage in stages):.3f}"

    def corrupted(self, name: str, arm: str) -> str:
        """What the server with a corrupted rank was caught by, in its own words."""
        found = self.run(name).finding(arm, CorruptedRank)
        assert found.detected
        return found.sentence

    def starts(self, name: str, drafts: bool | None = None) -> str:
        """Seconds from a server's start to its first answer, of those with a draft, without, or
        all.
        """
        told = [
            record.seconds
            for record in self.run(name).records
            if isinstance(record, runlog.Start) and drafts in (None, record.arms[0] != "none")
        ]
        low, high = f"{min(told):.0f}", f"{max(told):.0f}"
        return low if low == high else f"{low} to {high}"

    def log_gap(self, name: str, log: str, text: str) -> int:
        """Seconds in a server's log before its first line with this text."""
        before = None
        for line in (self.folder / name / "logs" / log).read_text().splitlines():
            at = (m := _TIME.match(line)) and datetime.fromisoformat(m[1])
            if text in line:
                return round((at - before).total_seconds())
            before = at or before
        raise LookupError(f"{log} has no line with {text!r}")

    def latency(self, name: str, kind: str, size: int) -> str:
        """Microseconds of a collective of that many bytes, as measured on the run's machine."""
        found = [
            dict(told.points)[size]
            for told in self.run(name).finding("machine", Machine).latencies
            if told.kind == kind and told.points
        ]
        return f"{1e6 * found[0]:.0f}"

    def apart_hours(self, first: str, later: str) -> str:
        at = [datetime.fromisoformat(self.run(name).provenance["time"]) for name in (first, later)]
        return f"{(at[1] - at[0]).total_seconds() / 3600:.0f}"

    def memory_within(self) -> str:
        """The largest miss of a predicted weight or KV pool on the GPUs, in percent. Every run gave
        back what it took.
        """
        off = []
        for name in self._gpu_runs():
            table = memory_check.table(self.run(name))["off (%)"].dropna().abs()
            off += table.tolist()
            assert table.empty or self.run(name).finding("memory", GpuMemory).given_back
        return f"{max(off):.2g} %"

    def runs_table(self) -> str:
        """One row a recording: when, from which sources, and which planned blocks it lacks."""
        rows = []
        for name in self._gpu_runs():
            facts = self.run(name).provenance
            lacks = [
                f"{count} of `{arm}`" + ("" if experiment == _MAIN else f" ({experiment})")
                for experiment, arms in (facts.get("missing") or {}).items()
                for arm, count in arms.items()
            ]
            sources = facts.get("workbench_sources")
            rows.append(
                (
                    f"`{name}`",
                    facts["time"][:16].replace("T", " "),
                    f"`{sources[:12]}`" if sources else "not kept",
                    ", ".join(lacks) or "none",
                )
            )
        return table(("recording", "measured (UTC)", "workbench sources", "blocks lacking"), rows)

    def _gpu_runs(self) -> list[str]:
        return [name for name in recording.names(self.folder) if name.startswith("h200")]


def _interval(c: ComparedEntry | Yardstick | IntervalEntry) -> str:
    return f"{c.ratio:.3f} ({c.low:.3f} to {c.high:.3f})" if c.low else ABSENT


def _found(c: ComparisonEntry) -> str:
    """A comparison in words."""
    if not c.valid:
        return f"no result ({', '.join(dict.fromkeys(KINDS[r.key].about for r in c.reasons))})"
    if not c.low <= 1 <= c.high:
        return "**faster**" if (c.low > 1) == (c.metric == "tokens_per_s") else "**slower**"
    return f"not distinguishable; {100 * c.resolution:.2g} % would have been seen"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(cells)} |" if index != 1 else "|" + "---|" * len(columns)
        for index, cells in enumerate([columns, (), *rows])
    )
