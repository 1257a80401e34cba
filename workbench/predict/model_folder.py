"""Whether a model's folder holds what is needed, and runs no code of strangers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from workbench.experiment.checks import Check, refused, warned
from workbench.experiment.errors import BadInput
from workbench.experiment.profile import Profile
from workbench.predict.model_shape import ModelShape, read


def tried(rule: Callable[[], Iterable[Check]]) -> list[Check]:
    found = []
    try:
        found.extend(rule())
    except BadInput as error:
        found.append(refused(error.field, error.problem, error.mend))
    return found


def model(profile: Profile, which: str) -> tuple[ModelShape | None, list[Check]]:
    field, folder = f"pair.{which}", getattr(profile.pair, which)
    try:
        shape = read(folder, field)
    except BadInput as error:
        return None, [refused(error.field, error.problem, error.mend)]
    return shape, list(weights(profile, shape)) + list(remote_code(profile, shape))


def weights(profile: Profile, shape: ModelShape) -> Iterator[Check]:
    """Weights are there unless dummies are asked for, and in a format that runs no code of
    strangers when it is opened.
    """
    named = str(profile.flag("load-format", "auto"))
    if shape.field == "pair.draft":
        named = str(profile.flag("speculative-draft-load-format", None) or named)
    if named == "dummy" or shape.tensors:
        return
    others = sorted(
        p.name
        for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf")
        for p in shape.folder.glob(pattern)
    )
    if others and named == "auto":
        yield refused(
            shape.field,
            f"holds {others[0]} and no safetensors, and opening it can run code",
            "convert it to safetensors, or name its format in server.flags.load-format",
        )
    elif not others:
        yield refused(
            shape.field,
            "has no *.safetensors",
            "take a complete model folder, or set server.flags.load-format to dummy",
        )
    else:
        yield warned(
            shape.field,
            f"is loaded as {named}, whose weights cannot be checked beforehand",
            "convert it to safetensors",
        )


def remote_code(profile: Profile, shape: ModelShape) -> Iterator[Check]:
    """Code that a folder brings is needed where neither SGLang nor transformers knows its model or
    tokenizer.
    """
    if profile.server.trust_remote_code:
        return
    config = json.loads((shape.folder / "config.json").read_text())
    tokenizer = shape.folder / "tokenizer_config.json"
    own_tokenizer = (
        tokenizer.is_file()
        and "auto_map" in tokenizer.read_text()
        and not (shape.folder / "tokenizer.json").exists()
    )
    asks = []
    if "auto_map" in config and not _known_model_type(str(config.get("model_type"))):
        asks.append("its configuration class")
    if (
        own_tokenizer
        and shape.field == "pair.target"
        and not profile.flag("skip-tokenizer-init", False)
    ):
        asks.append("its tokenizer")
    if asks:
        yield refused(
            "server.trust_remote_code",
            f"is off, and {shape.field} brings code for {' and '.join(asks)}",
            "read that code, then set it",
        )


@cache
def _known_model_type(name: str) -> bool:
    """Whether SGLang or transformers has a configuration class of this model_type, by their source:
    importing them takes seconds.
    """
    quoted = re.compile(rf"""["']{re.escape(name)}["']""")
    for package, under in (("transformers", "models/auto"), ("sglang", "srt/configs")):
        spec = find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            if any(quoted.search(path.read_text()) for path in (Path(root) / under).glob("*.py")):
                return True
    return False
