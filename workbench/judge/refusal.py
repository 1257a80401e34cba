"""A refusal: one reason why there is no result; and the one table of their kinds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workbench.experiment.arms import Arm


@dataclass(frozen=True)
class Kind:
    """One kind of refusal, by the key that verdict.json holds.

    about: what it says, in words.
    metric: the only one that it spoils; None for every one.
    not_the_arm: what was measured is not known to be the arm, so the arm has no numbers.
    """

    key: str
    about: str
    metric: str | None = None
    not_the_arm: bool = False


# fixtures/refusals holds one small run log for each.
KINDS = {
    kind.key: kind
    for kind in (
        Kind("failed", "the arm was to be measured and was not", not_the_arm=True),
        Kind("ranks_disagreed", "ranks verified different drafts"),
        Kind("not_attested", "not every rank reported this placement", not_the_arm=True),
        Kind("wrong_arm", "the server ran another arm", not_the_arm=True),
        Kind("other_server", "another server answered", not_the_arm=True),
        Kind("request_errors", "requests ended in an error"),
        Kind("truncated_answers", "answers broke off"),
        Kind("cached_tokens", "measured requests had cached tokens, or do not say"),
        Kind("warmup_measured", "prompts that warmed up the server were measured"),
        Kind("pair_broken", "the draft guesses at random"),
        # A cycle's time does not rest on what is accepted.
        Kind("random_prompts", "no draft was trained for the prompts", metric="tokens_per_s"),
        Kind("accept_moved", "arms that draft alike differ in accept length"),
        Kind("wiring", "the pair is not served as it was trained"),
        Kind("negative_control", "a rank corrupted on purpose was not noticed"),
        Kind("parity", "answers that must be identical are not"),
        Kind("no_control", "no arm was measured against itself"),
        Kind("control", "an arm differs from itself by more than chance"),
        Kind("too_few_starts", "too few server starts"),
        Kind("not_interleaved", "the blocks of a pair do not alternate"),
        Kind("unequal_prompts", "the blocks of a pair had different prompts"),
        Kind("nothing_compared", "no two arms were measured in one experiment"),
    )
}


@dataclass(frozen=True)
class Refusal:
    """One reason why there is no result.

    key: of ``KINDS``.
    arms: whose results it spoils; none named: the whole experiment's.
    Raises: ValueError for a key of no kind.
    """

    key: str
    sentence: str
    experiment: str
    arms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.key not in KINDS:
            raise ValueError(f"{self.key} is no kind of refusal: add it to refusal.KINDS")

    def concerns(self, experiment: str, arms: Iterable[str], metric: str) -> bool:
        """Whether a comparison of these arms is spoiled; a spoiled replica spoils the experiment's
        control and so all of it.
        """
        only = KINDS[self.key].metric
        if self.experiment != experiment or only not in (None, metric):
            return False
        return not self.arms or any(arm in arms or Arm.parse(arm).replica for arm in self.arms)
