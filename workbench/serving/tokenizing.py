"""Prompts as token ids, through a model folder's own tokenizer and chat template, in a process of
its own: only there may code of the folder run, and only where it is trusted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.experiment.errors import BadInput
from workbench.experiment.prompt_source import Source

_NO_TEMPLATE, _OWN_CODE = "no chat template", "own code"


def tokenize(
    sources: Sequence[Source],
    folder: Path,
    *,
    trust_remote_code: bool = False,
    chat_template: Path | None = None,
) -> list[list[int]]:
    """Token ids of each prompt: a chat with the template and the mark of an answer's beginning, a
    text as it is.

    Raises: BadInput where the folder has no tokenizer, or none that can be had without its own code
        or for a chat.
    """
    if not folder.is_dir():
        raise BadInput("target", f"{folder} is no folder", "give the folder of the target")
    try:
        template = chat_template.read_text() if chat_template else None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("--chat-template", f"cannot be read ({error})", "name a text file") from None
    asked = {
        "folder": str(folder.resolve()),
        "trust": trust_remote_code,
        "template": template,
        "prompts": [{"messages": s.messages, "text": s.text} for s in sources],
    }
    done = subprocess.run(
        [sys.executable, "-m", "workbench.serving.tokenizing"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    said = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
    if "ids" in said:
        return said["ids"]
    last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    problem = said.get("error", last)
    mend = {
        _NO_TEMPLATE: "give one by --chat-template FILE, or give texts",
        _OWN_CODE: "read that code, then add --trust-remote-code",
    }.get(said.get("kind"), "give a folder whose tokenizer transformers can load")
    raise BadInput("target", f"{folder.name}: {problem}", mend)


def main() -> None:
    """The process: JSON in, JSON out."""
    asked = json.load(sys.stdin)
    print(json.dumps(_answer(asked)))


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    folder, trust = Path(asked["folder"]), asked["trust"]
    kept = folder / "tokenizer_config.json"
    own = kept.is_file() and "auto_map" in kept.read_text()
    if own and not trust and not (folder / "tokenizer.json").exists():
        return {"kind": _OWN_CODE, "error": "its tokenizer is code of its own"}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust, local_files_only=True
        )
    except Exception as error:  # whatever a tokenizer's own code raises
        return {"error": f"its tokenizer cannot be loaded ({str(error).splitlines()[0][:200]})"}
    if asked["template"]:
        tokenizer.chat_template = asked["template"]
    ids = []
    for prompt in asked["prompts"]:
        if not prompt["messages"]:
            ids.append(tokenizer(prompt["text"])["input_ids"])
            continue
        if not getattr(tokenizer, "chat_template", None) and not own:
            return {"kind": _NO_TEMPLATE, "error": "its tokenizer has no chat template"}
        messages = [{"role": role, "content": said} for role, said in prompt["messages"]]
        try:
            found = tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:
            return {"error": f"its chat template refuses a prompt ({str(error)[:200]})"}
        ids.append(list(found))
    return {"ids": ids}


if __name__ == "__main__":
    main()
