"""A server's environment and command as text, for a shell or a unit file: nothing of the workbench
is needed where they run but its installed plugin, and that for a draft of its own alone.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from workbench.engine.orders import SGLANG, VARIABLE, Orders
from workbench.experiment.arms import Arm
from workbench.experiment.profile import Profile
from workbench.serving import launch_command
from workbench.serving.launch_command import Part

PORT = 30_000  # SGLang's own default
_PLUGINS = "SGLANG_PLUGINS"
_WORKBENCH = "a-server"  # the identity that a measurement gives each of its servers


def shell(profile: Profile, arm: Arm) -> str:
    """Lines for a shell, the parts of several nodes apart."""
    return "\n\n".join(
        "\n".join(
            [
                *(f"# {note}" for note in _notes(profile, arm, part)),
                *(f"export {k}={shlex.quote(v)}" for k, v in _environment(profile, arm, part)),
                _command(part),
            ]
        )
        for part in _parts(profile, arm)
    )


def unit(profile: Profile, arm: Arm) -> str:
    """Lines of the [Service] section of a systemd unit (systemd.exec(5), Environment=)."""
    return "\n\n".join(
        "\n".join(
            [
                *(f"# {note}" for note in _notes(profile, arm, part)),
                *(
                    f"Environment={_quoted(f'{k}={v}')}"
                    for k, v in _environment(profile, arm, part)
                ),
                f"ExecStart={_in_unit(_command(part)).replace('$', '$$')}",
            ]
        )
        for part in _parts(profile, arm)
    )


def needs_plugin(profile: Profile, arm: Arm) -> bool:
    """Whether SGLang by itself would serve something else: only own-N is ours on GPUs. Without a
    tokenizer the plugin keeps a multimodal target from building a processor.
    """
    without = profile.flag("skip-tokenizer-init", False)
    return profile.engine == "cpu" or arm.placement == "own" or bool(without)


def _parts(profile: Profile, arm: Arm) -> tuple[Part, ...]:
    port = int(profile.flag("port", 0)) or PORT
    return launch_command.plan(profile, arm, port=port, server=_WORKBENCH).parts


def _environment(profile: Profile, arm: Arm, part: Part) -> list[tuple[str, str]]:
    """Without the timing of stages, which a measurement alone reads."""
    kept = dict(part.environment)
    if not needs_plugin(profile, arm):
        del kept[VARIABLE], kept[_PLUGINS]
    else:
        orders = Orders.from_json(kept[VARIABLE])
        arms = tuple(replace(placed, timing="off") for placed in orders.arms)
        kept[VARIABLE] = replace(orders, arms=arms).to_json()
    return list(kept.items())


def _command(part: Part) -> str:
    return shlex.join(["python", *part.command[1:]])


def _notes(profile: Profile, arm: Arm, part: Part) -> list[str]:
    where = f" on {part.node.name}" if len(profile.nodes) > 1 else ""
    notes = [f"{arm.name} of {profile.name}{where}, as a measurement serves it."]
    if needs_plugin(profile, arm):
        notes.append(f"Needs SGLang {SGLANG} and this project installed beside it: pip install .")
    else:
        notes.append(f"{arm.name} is what SGLang does by itself: no plugin is needed.")
    if profile.flag("skip-tokenizer-init", False):
        notes.append("It takes token ids alone: leave --skip-tokenizer-init out to serve text.")
    if profile.engine == "cuda" and profile.flag("cuda-graph-max-bs-decode") is None:
        notes.append(
            "CUDA graphs are captured for the measured load alone: raise --cuda-graph-max-bs-decode"
            " for more requests at once."
        )
    return notes


def _quoted(text: str) -> str:
    """A word of a unit file: in double quotes, with its backslashes and quotes escaped."""
    return '"' + _in_unit(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _in_unit(text: str) -> str:
    """A unit file expands % (systemd.unit(5), Specifiers); a command $ too."""
    return text.replace("%", "%%")
