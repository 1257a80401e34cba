"""What the preflight predicts of a rank's memory beside what the server held: each arm's weights,
copied embedding and KV pools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from workbench.experiment.arms import Arm
from workbench.experiment.errors import BadInput
from workbench.experiment.runlog import Start
from workbench.predict import memory, model_shape
from workbench.predict.memory import MIB
from workbench.run.lab import Run

TARGET = ("target weights", "target KV pool")
OWN = ("draft weights", "copied embedding", "draft KV pool")
WITHIN = 5.0  # % that a prediction may be off
COLUMNS = ["arm", "part", "predicted (MiB)", "measured (MiB)", "off (%)"]


def measured(run: Run) -> dict[str, dict[str, int]]:
    """{arm: {part: bytes}} as reported by the first server that held the arm, of the rank that
    holds most of each part.

    Of arms that share a placement the first stands for all: their settings take no memory that is
    counted here. The target's KV pool is as large as the server's smallest arm leaves it, so it is
    listed with the arm.
    """
    found: dict[str, dict[str, int]] = {}
    placed: set[tuple[str, int | None]] = set()
    for start in (record for record in run.records if isinstance(record, Start)):
        for name in start.arms:
            arm = Arm.parse(name)
            ranks = [facts for entry in start.attestation if (facts := _held(entry, arm))]
            if ranks and (arm.placement, arm.group) not in placed:
                placed.add((arm.placement, arm.group))
                found[name] = {part: max(facts[part] for facts in ranks) for part in ranks[0]}
    return found


def _held(entry: Mapping[str, Any], arm: Arm) -> dict[str, int]:
    """What one rank reported of an arm; empty in logs of a time when it did not."""
    if "memory" not in entry:
        return {}
    target = entry["memory"]
    facts = {TARGET[0]: target["weights"], TARGET[1]: target["kv"], "rows": target["rows"]}
    placed = next((p for p in entry["placements"] if p["arm"] == arm.name), None)
    if placed is None:
        return {} if arm.speculates else facts
    own = placed["memory"]
    return facts | dict(zip(OWN, (own["weights"], own["copied"], own["kv"])))


def predicted(run: Run) -> dict[str, dict[str, int]]:
    """{arm: {part: bytes}} for every arm that was measured, by the two folders' shapes alone; the
    tokens of the pools are those that the profile asks for, or where it asks for none those that
    there were.

    Raises: BadInput when the pair's folders cannot be read.
    """
    target, draft = (
        model_shape.read(getattr(run.profile.pair, side), f"pair.{side}")
        for side in ("target", "draft")
    )
    page = max(1, int(run.profile.number("page-size", 1)))
    found = {}
    for name, told in measured(run).items():
        need, limit = (
            memory.predict(run.profile, target, draft, Arm.parse(name)),
            run.profile.number("max-total-tokens"),
        )
        rows = told["rows"] if limit is None else int(limit) // page * page + page
        found[name] = {TARGET[0]: need.target, TARGET[1]: rows * need.kv}
        if Arm.parse(name).speculates:
            found[name] |= dict(zip(OWN, (need.draft, need.embedding, rows * need.draft_kv)))
    return found


def table(run: Run) -> pd.DataFrame:
    """One row an arm and part, and for an arm with a draft one for all that it adds to the target;
    off: how far the prediction is from what was measured. Unknown where the pair is not here (a
    recording), empty where memory was not attested.
    """
    try:
        expected = predicted(run)
    except BadInput:
        expected = {}
    rows = []
    for name, told in measured(run).items():
        guess, parts = expected.get(name, {}), [part for part in (*TARGET, *OWN) if part in told]
        rows += [
            (name, part, guess.get(part), told[part])
            for part in parts
            if told[part] or guess.get(part)
        ]
        if OWN[0] in told:
            rows.append(
                (
                    name,
                    "what the draft adds",
                    sum(guess[p] for p in OWN) if guess else None,
                    sum(told[p] for p in OWN),
                )
            )
    frame = pd.DataFrame(rows, columns=COLUMNS[:-1]).astype(
        {column: float for column in COLUMNS[2:4]}
    )
    frame["off (%)"] = 100 * (
        frame["predicted (MiB)"] / frame["measured (MiB)"].where(frame["measured (MiB)"] > 0) - 1
    )
    return frame.assign(**{column: frame[column] / MIB for column in COLUMNS[2:4]})


def sentence(run: Run) -> str:
    """How good the predictions were, in words."""
    rows = table(run).dropna(subset="off (%)")
    if rows.empty:
        return (
            "Memory was not compared: the servers did not report it, or the pair's folders are not"
            " here."
        )
    worst = rows.loc[rows["off (%)"].abs().idxmax()]
    far = abs(worst["off (%)"])
    return (
        f"Each rank's memory was predicted within {far:.2g} % (the {worst['part']} of"
        f" {worst['arm']}: {worst['predicted (MiB)']:.4g} MiB predicted,"
        f" {worst['measured (MiB)']:.4g}"
        f" held){'' if far <= WITHIN else f', which is more than the {WITHIN:g} % allowed for'}."
    )
