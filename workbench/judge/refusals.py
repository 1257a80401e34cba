"""Why a result is refused: each check reads the run log and gives a stable key and the reason in
words; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.metrics import RunView
from workbench.experiment.runlog import Block
from workbench.judge.accept_checks import accept_moved, pair_broken, random_prompts, requests_of
from workbench.judge.findings import Wiring, corrupted_ranks
from workbench.judge.refusal import Refusal


def find(run: RunView) -> list[Refusal]:
    """Every reason that lies in the records themselves; those that lie in a comparison (too few
    pairs, the control) are found there.
    """
    found: list[Refusal] = []
    for experiment in run.experiments:
        for arm in run.arms(experiment):
            reasons = ((key, check(run, experiment, arm)) for key, check in CHECKS.items())
            found += [
                Refusal(key, f"{arm}: {why}.", experiment, (arm,)) for key, why in reasons if why
            ]
        found += accept_moved(run, experiment) + _wiring(run, experiment)
    return found + _uncaught(run)


def _uncaught(run: RunView) -> list[Refusal]:
    """A corrupted rank that nobody noticed: then nothing says that the other servers' ranks drafted
    alike.
    """
    missed = [c for c in corrupted_ranks(run.records).values() if not c.detected]
    return [
        Refusal("negative_control", c.sentence, experiment)
        for c in missed
        for experiment in run.experiments
    ]


def _failed(run: RunView, experiment: str, arm: str) -> str | None:
    failures = [
        f
        for f in run.failures
        if (f.experiment, f.arm) == (experiment, arm)
        and f.what not in ("disagreed", "setting", "stopped")
    ]
    return (
        f"it was to be measured and was not ({failures[-1].what}:"
        f" {failures[-1].reason.rstrip('.')})"
        if failures and not _counted(run, experiment, arm)
        else None
    )


def _ranks_disagreed(run: RunView, experiment: str, arm: str) -> str | None:
    failure = next(
        (
            f
            for f in run.failures
            if (f.experiment, f.arm, f.what) == (experiment, arm, "disagreed")
        ),
        None,
    )
    return (
        f"its ranks disagreed ({failure.reason.rstrip('.')}), so they did not verify the same"
        " drafts"
        if failure
        else None
    )


def _not_attested(run: RunView, experiment: str, arm: str) -> str | None:
    blocks = _counted(run, experiment, arm)
    starts = [run.starts.get(b.start) for b in blocks]
    without = sum(
        not (b.attested and start and len(start.attestation) >= run.profile.tp)
        for b, start in zip(blocks, starts)
    )
    return (
        f"in {without} of {len(blocks)} blocks not every rank attested that this arm was in force"
        if without
        else None
    )


def _wrong_arm(run: RunView, experiment: str, arm: str) -> str | None:
    for block in _counted(run, experiment, arm):
        start, said = run.starts.get(block.start), block.arm_in_force
        if said is not None and _configuration(said) != _configuration(arm):
            return f"block {block.block} was run while the server said that {said} was in force"
        if start and _configuration(arm) not in map(_configuration, start.arms):
            return (
                f"block {block.block} was run on a server that was started with"
                f" {', '.join(start.arms)}"
            )
    return None


def _other_server(run: RunView, experiment: str, arm: str) -> str | None:
    others = [
        b
        for b in _counted(run, experiment, arm)
        if b.start in run.starts and b.server != run.starts[b.start].server
    ]
    return (
        f"another server than the one that was started answered in block {others[0].block}"
        if others
        else None
    )


def _request_errors(run: RunView, experiment: str, arm: str) -> str | None:
    requests = requests_of(_counted(run, experiment, arm))
    errors = [r.error for r in requests if r.error is not None]
    return (
        f"{len(errors)} of {len(requests)} requests ended in an error, the first with {errors[0]!r}"
        if errors
        else None
    )


def _truncated_answers(run: RunView, experiment: str, arm: str) -> str | None:
    wanted = {
        "measure": run.profile.workload.max_new_tokens,
        "parity": 1,
    }  # answers that are only compared may be shorter
    requests = [
        (r, wanted[b.role])
        for b in _counted(run, experiment, arm)
        for r in b.requests
        if r.error is None
    ]
    cut = [
        r
        for r, most in requests
        if r.finish not in ("stop", "length") or r.finish == "length" and r.completion_tokens < most
    ]
    return (
        f"{len(cut)} of {len(requests)} answers broke off before their end, one after"
        f" {cut[0].completion_tokens} tokens"
        if cut
        else None
    )


def _cached_tokens(run: RunView, experiment: str, arm: str) -> str | None:
    requests = [r for r in requests_of(run.blocks(experiment, arm)) if r.error is None]
    cached = [r.cached_tokens for r in requests if r.cached_tokens]
    unknown = sum(r.cached_tokens is None for r in requests)
    if cached:
        return (
            f"{len(cached)} of {len(requests)} measured requests had cached tokens (up to"
            f" {max(cached)}); turn the prefix cache off or flush it"
        )
    return (
        f"{unknown} of {len(requests)} measured requests do not say how many of their tokens were"
        " cached"
        if unknown
        else None
    )


def _warmup_measured(run: RunView, experiment: str, arm: str) -> str | None:
    warm = {(b.start, r.prompt) for b in run.blocks(experiment, role="warmup") for r in b.requests}
    again = {
        r.prompt
        for b in run.blocks(experiment, arm)
        for r in b.requests
        if (b.start, r.prompt) in warm
    }
    return f"{len(again)} of its measured prompts had warmed up the same server" if again else None


def _counted(run: RunView, experiment: str, arm: str) -> list[Block]:
    return run.blocks(experiment, arm) + run.blocks(experiment, arm, "parity")


def _configuration(name: str) -> Arm | None:
    try:
        return Arm.parse(name).configuration
    except BadInput:
        return None


def _wiring(run: RunView, experiment: str) -> list[Refusal]:
    """The offline reference found that the pair is not served as it was trained
    (workbench.answers.wiring): a fast wrong draft is no result.
    """
    found = run.finding(experiment, "wiring", Wiring)
    if found is None or found.ok is not False:
        return []
    drafting = tuple(arm for arm in run.arms(experiment) if Arm.parse(arm).speculates)
    return [Refusal("wiring", found.sentence, experiment, drafting)]


# In the order in which they are told. Each gives its reason, without the arm's name and the full
# stop, or None.
CHECKS: dict[str, Callable[[RunView, str, str], str | None]] = {
    "failed": _failed,
    "ranks_disagreed": _ranks_disagreed,
    "not_attested": _not_attested,
    "wrong_arm": _wrong_arm,
    "other_server": _other_server,
    "request_errors": _request_errors,
    "truncated_answers": _truncated_answers,
    "cached_tokens": _cached_tokens,
    "warmup_measured": _warmup_measured,
    "pair_broken": pair_broken,
    "random_prompts": random_prompts,
}
