"""Are an arm's answers those of no speculation? First each arm against itself, then against none;
only the excess counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from workbench.experiment.runlog import Block

ALPHA = 0.05
Answers = dict[tuple[str, int], list[tuple[int, ...]]]  # by prompt and concurrency, one a run


@dataclass(frozen=True)
class Parity:
    """Answers of one arm against those of ``none``: identical, differs or not checked, and the
    counts behind it.

    mismatched of compared: answers that differ from none's. own_mismatched of own_compared: answers
        that differ between two runs of one arm (this one and none together).
    violations: answers that must be identical and are not.
    """

    arm: str
    result: str
    mismatched: int = 0
    compared: int = 0
    own_mismatched: int = 0
    own_compared: int = 0
    violations: int = 0

    @property
    def sentence(self) -> str:
        if not self.compared and not self.own_compared:
            return f"{self.arm}: answers were not compared."
        return (
            f"{self.arm}: {self.mismatched} of {self.compared} answers differ from none, and"
            f" {self.own_mismatched} of {self.own_compared} differ between two runs of one arm"
            + (f"; {self.violations} must be identical." if self.violations else ".")
        )


def compare(
    arm: str, blocks: Iterable[Block], reference: Iterable[Block], *, exact: bool
) -> Parity:
    """The parity blocks of an arm against those of the arm ``none``.

    exact: greedy tokens are owed to be the same (CPU engine, or SGLang's deterministic mode), and
        then so for requests that run alone; a batch may change the order of a sum and with it a
        token. Elsewhere an arm differs when it does so more often than
        arms differ from themselves, by Fisher's exact test (one-sided, 5 %); mismatches without
        such a control are not judged.
    """
    answers, none = _answers(blocks), _answers(reference)
    common = sorted(answers.keys() & none.keys())
    must_match = [key for key in common if exact and key[1] == 1]
    broken = _mismatched([*answers[key], *none[key]] for key in must_match)
    firsts = {key: (answers[key][0], none[key][0]) for key in common}
    twice = {
        (key, side): runs
        for side, found in enumerate((answers, none))
        for key, runs in found.items()
        if len(runs) > 1
    }
    excess, others = (
        _mismatched(firsts[key] for key in common if key not in must_match),
        len(common) - len(must_match),
    )
    own = [runs for (key, _), runs in twice.items() if key not in must_match]
    if not common or not broken and excess and not own:
        result = "not checked"
    else:
        from scipy import stats  # half a second of a core, which only a judgement needs

        table = [[excess, others - excess], [_mismatched(own), len(own) - _mismatched(own)]]
        result = (
            "differs"
            if broken or excess and stats.fisher_exact(table, "greater").pvalue < ALPHA
            else "identical"
        )
    return Parity(
        arm,
        result,
        _mismatched(firsts.values()),
        len(common),
        _mismatched(twice.values()),
        len(twice),
        broken,
    )


def repeated(arm: str, blocks: Iterable[Block], *, exact: bool) -> Parity:
    """The arm ``none`` between its own runs: identical or not; not checked when it ran once."""
    twice = {key: runs for key, runs in _answers(blocks).items() if len(runs) > 1}
    mismatched = _mismatched(twice.values())
    broken = _mismatched(runs for key, runs in twice.items() if exact and key[1] == 1)
    return Parity(
        arm,
        "not checked" if not twice else "differs" if mismatched else "identical",
        0,
        0,
        mismatched,
        len(twice),
        broken,
    )


def _answers(blocks: Iterable[Block]) -> Answers:
    found: Answers = defaultdict(list)
    for block in blocks:
        for request in block.requests:
            if request.error is None and request.output_ids:
                found[request.prompt, block.concurrency].append(request.output_ids)
    return dict(found)


def _mismatched(runs: Iterable[Iterable[tuple[int, ...]]]) -> int:
    """In how many of the groups not all answers are the same."""
    return sum(len(set(answers)) > 1 for answers in runs)
