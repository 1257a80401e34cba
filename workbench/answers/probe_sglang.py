"""Run as a process of its own by workbench.answers.probe: imports the installed SGLang and prints
what it finds as one JSON line.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    logging.disable(logging.WARNING)
    import sglang
    from sglang.srt import environ
    from sglang.srt.configs.draft_parallel import DraftTPExecution
    from sglang.srt.managers.scheduler_components import internal_state
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative import draft_parallel, eagle_worker_v2, spec_utils

    root = Path(sglang.__file__).parent

    def where(thing: object) -> str:
        file = Path(inspect.getsourcefile(thing)).relative_to(root.parent)
        return f"{file}:{inspect.getsourcelines(thing)[1]}"

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    places = [
        {
            "kind": "argument",
            "name": max(action.option_strings, key=len),
            "about": " ".join((action.help or "").split())[:200],
        }
        for action in parser._actions
        if action.option_strings and action.option_strings[0] != "-h"
    ]
    places += [
        {"kind": "environment", "name": name, "about": type(getattr(environ.envs, name)).__name__}
        for name in sorted(vars(type(environ.envs)))
        if name.startswith("SGLANG_")
    ]
    # Keys of /set_internal_state: the only settings that change while a server runs.
    handlers = inspect.getsource(internal_state.SchedulerInternalStateController._update_handlers)
    places += [
        {
            "kind": "run-time call",
            "name": name,
            "about": "key of /set_internal_state",
            "where": where(internal_state.SchedulerInternalStateController._update_handlers),
        }
        for name in re.findall(r'"(\w+)": _UpdateHandler', handlers)
    ]
    for file in sorted((root / "srt" / "models").glob("*.py")):
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            if "draft_parallel_spec" in line or re.search(r"draft_t(ensor_)?p", line):
                places.append(
                    {
                        "kind": "model code",
                        "name": line.strip()[:80],
                        "about": "declares which layout it follows, not a size",
                        "where": f"{file.relative_to(root.parent)}:{number}",
                    }
                )
    sources = {
        "which group a draft gets": draft_parallel.resolve_draft_parallel_layout,
        "where the draft enters it": spec_utils.draft_tp_context,
        "the draft worker asks for it once": eagle_worker_v2.EagleDraftWorker.__init__,
    }
    print(
        json.dumps(
            {
                "version": version("sglang"),
                "places": places,
                "executions": [e.value for e in DraftTPExecution],
                "source": {
                    name: {"where": where(thing), "text": inspect.getsource(thing)}
                    for name, thing in sources.items()
                },
            }
        )
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # Python's own end takes seconds over so many modules
