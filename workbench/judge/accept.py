"""Accept metrics, defined once and computed from counts: how many of the draft's tokens the target
took, with intervals.

A round (cycle) verifies one set of drafts; ``correct`` of them are accepted and the target adds one
token of its own, the bonus token. SGLang counts both without the bonus token
(managers/scheduler_components/batch_result_processor.py:832 spec_verify_ct).

- **accept length** = 1 + correct / rounds: tokens a round, bonus token included. So 1.1
accepted drafts are an accept length of 2.1. vLLM's "mean acceptance length" is the same number.
- **accepted drafts** = correct / rounds: the same without the bonus token.
- **accept rate** = correct / proposed, where a round proposes all its draft tokens but the root:
steps of a chain, more in a tree.
- **acceptance at position k** = rounds with at least k correct drafts / rounds. Summed over k it is
the accepted drafts.
- **reported length** = completion tokens / rounds: SGLang's own spec_accept_length
(managers/tokenizer_manager.py:3166 spec_accept_length). It differs from the accept length by the
first token, which the prefill makes, and by accepted tokens cut off at the end; two tools that
disagree on acceptance often differ just so.

Each is a ratio of sums over all requests (weighted by rounds, "token-weighted"), never a mean of
means; the accept length is also given as the plain mean over requests ("request-weighted"). A count
that is missing is unknown: such a request is left out and counted in ``unknown``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from workbench.experiment.runlog import Request


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval; low and high are None where fewer than two units were
    seen.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Accept:
    """Accept metrics of one arm, as defined above. requests: those with counts; unknown: those
    without; units: distinct prompts.

    length, drafts, rate and positions are token-weighted; positions[0] is the first draft token.
    What no request told is None.
    """

    requests: int
    unknown: int
    units: int
    rounds: int
    length: Estimate
    drafts: Estimate
    length_by_request: Estimate
    reported_length: Estimate
    rate: Estimate | None
    positions: tuple[Estimate, ...] | None


def measure(requests: Iterable[Request], level: float = 0.95) -> Accept | None:
    """The accept metrics of some requests of one arm; None when none of them has counts (no
    speculation, or fields missing).

    Intervals: the unit is the request, and requests of the same prompt are one unit, since a greedy
    repeat brings no news. Ratios of sums get the linearised standard error of a ratio estimator
    (Cochran, Sampling Techniques, 3rd ed. 1977, ch. 6) and Student's t over units.
    """
    requests = [r for r in requests if r.error is None]
    known = [r for r in requests if r.verify_ct and r.correct is not None]
    if not known:
        return None
    prompts = [r.prompt for r in known]
    rounds, correct = [r.verify_ct for r in known], [r.correct for r in known]
    drafts = _ratio(prompts, correct, rounds, level)
    proposing = [r for r in known if r.proposed]
    return Accept(
        requests=len(known),
        unknown=len(requests) - len(known),
        units=len(set(prompts)),
        rounds=sum(rounds),
        length=_shifted(drafts),
        drafts=drafts,
        length_by_request=_ratio(
            prompts, [1 + c / v for c, v in zip(correct, rounds)], [1] * len(known), level
        ),
        reported_length=_ratio(prompts, [r.completion_tokens for r in known], rounds, level),
        rate=(
            _clipped(
                _ratio(
                    [r.prompt for r in proposing],
                    [r.correct for r in proposing],
                    [r.proposed for r in proposing],
                    level,
                )
            )
            if proposing
            else None
        ),
        positions=_positions([r for r in known if r.histogram], level),
    )


def difference(a: Iterable[Request], b: Iterable[Request], level: float = 0.95) -> Estimate | None:
    """Accept length of a minus that of b over the prompts both were asked; None when they share
    none with counts.

    Both ratios are linearised prompt by prompt, so that what makes a prompt easy or hard for both
    cancels.
    """
    sums_a, sums_b = _by_prompt(a), _by_prompt(b)
    common = sorted(sums_a.keys() & sums_b.keys())
    if not common:
        return None
    values, residuals = [], []
    for sums in (sums_a, sums_b):
        correct, rounds = np.array([sums[prompt] for prompt in common], dtype=float).T
        values.append(correct.sum() / rounds.sum())
        residuals.append((correct - values[-1] * rounds) / rounds.mean())
    return _estimate(values[0] - values[1], residuals[0] - residuals[1], level)


def _by_prompt(requests: Iterable[Request]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for r in requests:
        if r.error is None and r.verify_ct and r.correct is not None:
            correct, rounds = sums.get(r.prompt, (0, 0))
            sums[r.prompt] = correct + r.correct, rounds + r.verify_ct
    return sums


def _positions(requests: Sequence[Request], level: float) -> tuple[Estimate, ...] | None:
    if not requests:
        return None
    # A request's histogram ends at the most drafts it ever saw correct
    # (managers/schedule_batch.py:1566 update_spec_correct_drafts_histogram).
    counts = np.zeros((len(requests), max(len(r.histogram) for r in requests)), dtype=int)
    for row, request in zip(counts, requests):
        row[: len(request.histogram)] = request.histogram
    at_least = counts[:, ::-1].cumsum(1)[:, ::-1]
    prompts = [r.prompt for r in requests]
    return tuple(
        _clipped(_ratio(prompts, at_least[:, k], at_least[:, 0], level))
        for k in range(1, counts.shape[1])
    )


def _ratio(
    prompts: Sequence[str], above: Sequence[float], below: Sequence[float], level: float
) -> Estimate:
    """Sum of ``above`` over sum of ``below``, with prompts as units."""
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for prompt, y, x in zip(prompts, above, below):
        sums[prompt] += (y, x)
    y, x = np.array(list(sums.values())).T
    ratio = y.sum() / x.sum()
    return _estimate(ratio, (y - ratio * x) / x.mean(), level)


def _estimate(value: float, residuals: np.ndarray, level: float) -> Estimate:
    n = len(residuals)
    if n < 2:
        return Estimate(float(value))
    # The residuals of a ratio estimator sum to 0 by construction: one degree of freedom is spent on
    # the ratio.
    half = special.stdtrit(n - 1, (1 + level) / 2) * math.sqrt(np.sum(residuals**2) / (n - 1) / n)
    return Estimate(float(value), float(value - half), float(value + half))


def _shifted(drafts: Estimate) -> Estimate:
    return Estimate(
        *(None if value is None else 1 + value for value in (drafts.value, drafts.low, drafts.high))
    )


def _clipped(share: Estimate) -> Estimate:
    """A share with its interval kept within 0 and 1."""
    return (
        share
        if share.low is None
        else Estimate(share.value, max(share.low, 0.0), min(share.high, 1.0))
    )
