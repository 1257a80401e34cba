"""Where the tiny pair's answers with a draft part from those without, and by how little."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from workbench.experiment import runlog
from workbench.experiment.profile_sections import ROOT

_MAIN = "draft_tp"  # the experiment of 04_draft_tp


def answers(folder: Path) -> dict[str, dict[tuple[str, int], tuple[int, ...]]]:
    """{arm: {(prompt, requests at once): tokens}} of a recording's first parity blocks."""
    found: dict[str, dict] = {}
    for block in runlog.read(folder / "runs.jsonl"):
        if (
            block.kind == "block"
            and (block.experiment, block.role) == (_MAIN, "parity")
            and block.pair == 0
        ):
            found.setdefault(block.arm, {}).update(
                {(r.prompt, block.concurrency): r.output_ids for r in block.requests}
            )
    return found


@cache
def _target():
    """The tiny target in float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        ROOT / "fixtures/tiny/target", dtype=torch.float32
    ).eval()


def parted(folders: Iterable[Path]) -> tuple[list[float], list[float], float]:
    """Where the tiny pair's answers of shared part from none's: how far the two tokens' logits are
    from the largest at most, that largest, and bfloat16's step between 8 and 16.
    """
    import torch

    prompts = {
        p["id"]: p["input_ids"]
        for p in json.loads((ROOT / "fixtures/tiny/heldout.json").read_text())
    }
    apart, best = [], []
    for folder in folders:
        found = answers(folder)
        for key, none in found["none"].items():
            if none == (other := found["shared"][key]):
                continue
            place = next(i for i, (a, b) in enumerate(zip(none, other)) if a != b)
            with torch.inference_mode():
                text = torch.tensor([prompts[key[0]] + list(none[:place])])
                logits = _target()(text).logits[0, -1]
            best.append(logits.max().item())
            apart.append(max(best[-1] - logits[t].item() for t in (none[place], other[place])))
    return apart, best, torch.finfo(torch.bfloat16).eps * 8
