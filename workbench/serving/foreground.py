"""One server in the foreground, started as a measurement starts it, until it is told to end."""

from __future__ import annotations

import time
from pathlib import Path

from workbench.experiment.arms import Arm
from workbench.experiment.errors import ServerFailed
from workbench.experiment.profile import Profile
from workbench.experiment.profile_sections import ROOT
from workbench.serving import gpu_locks, server, server_log

POLL_S = 0.5


def serve(profile: Profile, arm: Arm, logfile: Path | None = None) -> int:
    """Start a server of ``arm`` and wait for Ctrl-C, or SIGTERM; returns the exit status.

    Raises: ServerFailed where it does not start, does not hold the arm on every rank, or ends by
        itself; BadInput where a run holds its GPUs.
    """
    log = logfile or ROOT / "outputs" / "serve.log"
    print(f"starting {arm.name} of {profile.name}; its log is {log}", flush=True)
    try:
        with (
            gpu_locks.held(profile, log.parent) as locks,
            server.serve(profile, arm, log, locks=locks) as up,
        ):
            if up.unattested:
                raise ServerFailed(f"{arm.name} is not what runs: {up.unattested[0]}")
            print(f"{arm.name} answers at {up.url} after {up.seconds:.0f} s; Ctrl-C ends it")
            print(
                f"curl {up.url}/generate -H 'Content-Type: application/json' -d"
                ' \'{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}\'',
                flush=True,
            )
            while up.alive():
                time.sleep(POLL_S)
            why = server_log.first_failure(log) or "its log tells no reason"
            raise ServerFailed(f"the server ended by itself: {why}")
    except KeyboardInterrupt:
        print("ended, with all of its processes")
        return 0
