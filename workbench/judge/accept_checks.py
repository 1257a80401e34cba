"""Whether the accept length says that a pair is broken, or moved between arms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from workbench.experiment.arms import Arm
from workbench.experiment.metrics import RunView
from workbench.experiment.profile_sections import Speculation
from workbench.experiment.runlog import Block, Request
from workbench.judge import accept
from workbench.judge.refusal import Refusal

# Accept length of a draft that guesses at random: another algorithm, or wrong aux layers.
BROKEN_PAIR = (1.00, 1.05)


# Of the accept length: sums in another order move it by less, faults by more, such as ranks that
# share the embedding apart or read another rank's KV.
ACCEPT_TOLERANCE = 0.02


ACCEPT_LEVEL = 0.99


def pair_broken(run: RunView, experiment: str, arm: str) -> str | None:
    if (
        run.acceptance_simulated(experiment)
        or not _speculation(run, arm)
        or _speculation(run, arm).steps == 0
    ):
        return None
    found = accept.measure(requests_of(run.blocks(experiment, arm)))
    low, high = BROKEN_PAIR
    return (
        f"its accept length is {found.length.value:.2f}, so the draft guesses at random and the"
        " pair is broken"
        if found and low <= found.length.value <= high
        else None
    )


def random_prompts(run: RunView, experiment: str, arm: str) -> str | None:
    random = any(b.prompts_from == "random" for b in run.blocks(experiment, arm))
    return (
        "its tokens/s and accept rate rest on random prompts, which no draft was trained to"
        " continue"
        if random and _speculation(run, arm) and not run.acceptance_simulated(experiment)
        else None
    )


def accept_moved(run: RunView, experiment: str) -> list[Refusal]:
    """Arms of equal steps, topk and draft tokens propose the same drafts wherever they run, so they
    share their accept length.
    """
    sharing: dict[tuple, list[str]] = defaultdict(list)
    for arm in run.arms(experiment):
        if spec := _speculation(run, arm):
            sharing[spec.algorithm, spec.steps, spec.topk, spec.draft_tokens].append(arm)
    exact = run.profile.engine == "cpu" and not run.acceptance_simulated(experiment)
    found = []
    for first, *others in sharing.values():
        for arm in others:
            for role in ("measure", "parity"):  # apart, since their answers have other lengths
                ours, theirs = (
                    run.blocks(experiment, arm, role),
                    run.blocks(experiment, first, role),
                )
                if why := exact and _moved_exactly(ours, theirs) or _moved(ours, theirs):
                    found.append(
                        Refusal(
                            "accept_moved", f"{arm} and {first}: {why}.", experiment, (arm, first)
                        )
                    )
                    break
    return found


def _moved_exactly(blocks: list[Block], others: list[Block]) -> str | None:
    """On the CPU engine decoding is greedy, so requests that run alone owe equal counts for equal
    prompts and lengths.

    In a batch they do not: who else is in it may change the order of a sum.
    """
    counts, known = _counts(blocks), _counts(others)
    common = counts.keys() & known.keys()
    differ = sum(len(counts[key] | known[key]) > 1 for key in common)
    return (
        f"the accept counts of {differ} of {len(common)} equal greedy prompts differ, which the"
        " placement of the draft must not change"
        if differ
        else None
    )


def _moved(blocks: list[Block], others: list[Block]) -> str | None:
    ours, theirs = requests_of(blocks), requests_of(others)
    found, known = accept.difference(ours, theirs, ACCEPT_LEVEL), accept.measure(theirs)
    if not found or found.low is None or not known:
        return None
    surely = not found.low <= 0 <= found.high
    interval = f"{ACCEPT_LEVEL:.0%} interval {found.low:+.2f} to {found.high:+.2f}"
    return (
        f"the accept length moved by {found.value:+.2f} ({interval}) on equal prompts"
        if surely and abs(found.value) > ACCEPT_TOLERANCE * known.length.value
        else None
    )


def _counts(blocks: list[Block]) -> dict[tuple[str, int], set[tuple]]:
    found: dict[tuple[str, int], set[tuple]] = defaultdict(set)
    for r in requests_of(b for b in blocks if b.concurrency == 1):
        if r.error is None and r.verify_ct is not None:
            found[r.prompt, r.completion_tokens].add((r.verify_ct, r.correct, r.histogram))
    return found


def requests_of(blocks: Iterable[Block]) -> list[Request]:
    return [r for b in blocks for r in b.requests]


def _speculation(run: RunView, arm: str) -> Speculation | None:
    parsed = Arm.parse(arm)
    return run.profile.speculation.of(parsed) if parsed.speculates else None
