"""The sections of a profile, each field checked: pair, speculation, server, workload, plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from workbench.experiment.arms import Arm
from workbench.experiment.communication import SETTINGS
from workbench.experiment.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pair(Section):
    """The two models, as folders; relative paths are taken from the repository's root.

    trained_layers: the aux layer ids that the draft was trained on, where its own config is not to
        be believed.
    """

    target: Path
    draft: Path
    trained_layers: tuple[int, ...] | None = None

    @field_validator("target", "draft")
    @classmethod
    def _rooted(cls, path: Path) -> Path:
        return path.expanduser() if path.expanduser().is_absolute() else ROOT / path

    @field_serializer("target", "draft")
    def _portable(self, path: Path) -> str:
        return portable(path)


class Speculation(Section):
    """SGLang's --speculative-*: chain when topk is 1 (then draft_tokens is steps + 1), a tree
    otherwise.

    agreement: of the ranks' drafts (engine/agreement.py).
    timing: whether the stages of the cycle are timed; an arm without shows its cost.
    """

    algorithm: str = "EAGLE3"
    steps: int = Field(3, ge=0)
    topk: int = Field(1, ge=1)
    draft_tokens: int = Field(4, ge=1)
    agreement: Literal["broadcast", "check", "off"] = "broadcast"
    timing: Literal["on", "off"] = "on"

    @model_validator(mode="after")
    def _chain(self) -> Speculation:
        if self.topk == 1 and self.draft_tokens != self.steps + 1:
            raise ValueError(
                f"draft_tokens is {self.draft_tokens} but a chain of {self.steps} steps verifies"
                f" {self.steps + 1}"
            )
        return self

    @property
    def candidates(self) -> int:
        """Tokens offered beside the root by this many steps of this topk
        (speculative/eagle_utils.py:110 top_scores).
        """
        return self.topk + max(0, self.steps - 1) * self.topk**2

    @property
    def fills(self) -> bool:
        """Whether the steps offer as many candidates as are verified."""
        return not self.steps or self.draft_tokens - 1 <= self.candidates

    def of(self, arm: Arm) -> Speculation:
        """What the arm is served with: this setting, the arm's own where it names one."""
        known = arm.settings()
        own = {key: value for key, value in arm.departures.items() if not known[key].server}
        if "draft_tokens" not in own and own.get("topk", self.topk) == 1:
            own["draft_tokens"] = own.get("steps", self.steps) + 1
        try:
            return Speculation(**{**self.model_dump(), **own})
        except ValidationError as error:
            raise BadInput(
                "arm", f"{arm.name!r} cannot be served ({first(error)})", "mend its settings"
            ) from None


class Server(Section):
    """How a server is started: SGLang's own flags (without dashes), extra environment, deadlines in
    seconds.

    at_once: how many servers of a plan are started together and stay up, one alone at work, where
        the memory holds them: their starts overlap.
    """

    flags: dict[str, str | int | float | bool] = {}
    environment: dict[str, str] = {}
    ready_within_s: float = Field(240, gt=0)
    token_within_s: float = Field(60, gt=0)
    trust_remote_code: bool = False
    at_once: int = Field(1, ge=1)


class Workload(Section):
    """What is asked of the server. prompts: a JSON file of {"id", "input_ids"} (held-out text of
    the pair) or "random".
    """

    prompts: Path | Literal["random"]
    requests_per_block: int = Field(4, ge=1)
    concurrency: int = Field(1, ge=1)
    max_new_tokens: int = Field(64, ge=1)

    @field_validator("prompts")
    @classmethod
    def _rooted(cls, path: Any) -> Any:
        return path if str(path) == "random" else ROOT / Path(path).expanduser()

    @field_serializer("prompts")
    def _portable(self, path: Any) -> str:
        return portable(path)


class Plan(Section):
    """Which arms are compared and how much is spent.

    starts: server starts, the units of every comparison (a side, where no server holds both arms):
        from 6 on an interval is not much wider than of many.
    pairs: pairs of blocks inside servers in all, shared among the starts, each of which has
        blocks_per_start of every arm or more.
    restart: an arm is reached by a server of its own, even where one server can hold several and
        switch between them.
    parity_prompts, parity_tokens: how many answers of how many tokens are compared token by token.
    on_failure: when a server hangs, dies or does not start: stop the experiment, or go on without
        the arm that failed.
    traces: a few cycles of each arm are profiled after its first start's blocks
        (workbench/answers/torch_trace.py).
    negative_control: afterwards, servers with one rank's draft corrupted on purpose must be caught
        (workbench/answers/negative_control.py).
    resolution: the difference to be resolved (0.02 is 2 %); the verdict says what it costs.
    stop: end the run at the first checkpoint, one after each round of starts from the third on,
        where that difference
        is resolved (without a wished one: where own-N and shared are told apart); the intervals pay
        for the looks.
    budget_s: seconds of starts and blocks after which no further round begins.
    """

    arms: tuple[str, ...] = ("none", "shared", "own-1")
    pairs: int = Field(12, ge=1)
    starts: int = Field(6, ge=1)
    blocks_per_start: int = Field(2, ge=1)
    restart: bool = False
    parity_prompts: int = Field(12, ge=1)
    parity_tokens: int = Field(32, ge=1)
    on_failure: Literal["stop", "go_on"] = "stop"
    traces: bool = False
    negative_control: bool = False
    resolution: float | None = Field(None, gt=0, lt=1)
    stop: bool = False
    budget_s: float | None = Field(None, gt=0)
    seed: int = 0

    @field_validator("arms")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _arms(names)


class Reported(Section):
    """What somebody measured on the profile's machine before, one request at a time: a claim to
    check, never a result.

    baseline, speculative: tokens/s without and with speculation.
    accept_length: tokens a cycle, bonus token included.
    steps: draft steps a cycle.
    memory_bandwidth: bytes/s of one GPU, and collective_s: seconds of one small collective there
        (low, high), by which the cycle is explained.
    source: who measured, in words.
    """

    baseline: float = Field(gt=0)
    speculative: float = Field(gt=0)
    accept_length: float = Field(ge=1)
    steps: int = Field(ge=1)
    memory_bandwidth: float = Field(gt=0)
    collective_s: tuple[float, float]
    source: str

    def inputs(self) -> tuple[dict[str, float], ...]:
        """The machine's inputs at the low and at the high latency (predict/by_hand.py)."""
        return tuple(
            {"memory_bandwidth": self.memory_bandwidth, "collective_latency": seconds}
            for seconds in self.collective_s
        )

    def rate(self, arm: str) -> float | None:
        """Tokens/s of an arm; None for one that was not measured."""
        return {"none": self.baseline, "shared": self.speculative}.get(arm)

    def cycle_ms(self, arm: str) -> float | None:
        """Milliseconds of an arm's cycle; None for one that was not measured."""
        tokens = {"none": 1.0, "shared": self.accept_length}.get(arm)
        return None if tokens is None else 1e3 * tokens / self.rate(arm)


class Sweep(Section):
    """What 05_steps and 06_collectives try beside the profile's own setting.

    step_counts, topks, tree_tokens: every combination for every placement of the plan (a chain of n
        steps verifies n + 1 tokens, a tree each of tree_tokens).
    search_pairs: pairs of blocks of the search's first rung, doubled at every later one.
    loads: requests at once at which the best settings are compared.
    against_none: with no speculation too, across server starts.
    settings: of the communication layer (workbench.experiment.communication), all of the engine's
        where none is named.
    settings_arms: tried with each (shared and the first own-N of the plan where none is named).
    """

    step_counts: tuple[int, ...] = (1, 2, 3, 4, 5)
    topks: tuple[int, ...] = (1,)
    tree_tokens: tuple[int, ...] = (8,)
    search_pairs: int = Field(2, ge=1)
    loads: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    against_none: bool = True
    settings: tuple[str, ...] = ()
    settings_arms: tuple[str, ...] = ()

    @field_validator("step_counts", "topks", "tree_tokens", "loads")
    @classmethod
    def _counts(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if not values or min(values) < 1 or len(set(values)) < len(values):
            raise ValueError(f"{list(values)} are no different numbers from 1 on")
        return values

    @field_validator("settings_arms")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _arms(names)

    @field_validator("settings")
    @classmethod
    def _named(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in SETTINGS:
                raise ValueError(
                    f"{name!r} is no setting of the communication layer (there are"
                    f" {', '.join(SETTINGS)})"
                )
        return names


class Node(Section):
    """One machine of a server that spreads over several. address: of the first one, as the others
    reach it.

    reach: the command that runs a shell command on this node, e.g. ``[ssh, gpu2]``; empty for the
        machine that the workbench runs on.
    """

    name: str = Field(min_length=1)
    address: str = "127.0.0.1"
    reach: tuple[str, ...] = ()


def plain_number(field: str, value: Any) -> float:
    """A value as a number.

    Raises: BadInput, naming the field, when it is not one.
    """
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise BadInput(field, f"is {value!r}", "give a plain number")
    return found


def _arms(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        Arm.parse(name)
    return names


def portable(path: Path | str) -> str:
    """A path as it is written down: from the repository's root where it lies inside."""
    path = Path(path)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return (
        problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ").rstrip(".")
        if problem["type"] != "extra_forbidden"
        else "no such field"
    )
