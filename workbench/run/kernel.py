"""The kernel that a notebook runs in: this interpreter's own, with a deadline for one that is
stopped.
"""

from __future__ import annotations

import logging
import time

import psutil
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from traitlets import default

log = logging.getLogger(__name__)
# A kernel at work is never stopped, however long it measures: only a signal stops it.
STOPPED_WITHIN_S = 60.0
_LONGEST_LOOK_S = 5.0  # between two looks; a longer one means that this process stood still itself


class OwnSpecs(KernelSpecManager):
    """Knows one kernel, python3, and makes its command from ``sys.executable``.

    Installed kernel specs are not looked at: one of another environment runs another clone's code,
    and a stale one does not start (jupyter_client/kernelspec.py, _get_kernel_spec_by_name).
    """

    @default("kernel_dirs")
    def _no_dirs(self) -> list[str]:
        return []


class OwnKernel(AsyncKernelManager):
    """A kernel of this interpreter. One that stays stopped (SIGSTOP) for ``STOPPED_WITHIN_S``
    seconds is ended, and counts as dead.

    Whoever waits for the kernel asks every few seconds whether it is alive (nbclient/client.py,
    _async_poll_kernel_alive); nothing else is watched.
    """

    stopped_s = 0.0
    _looked: float | None = None

    @default("kernel_spec_manager")
    def _own_specs(self) -> KernelSpecManager:
        return OwnSpecs()

    async def _async_is_alive(self) -> bool:
        """Its client asks this one (jupyter_client/client.py, _async_is_alive)."""
        if not await super()._async_is_alive():
            return False
        now, before = time.monotonic(), self._looked
        if self._stopped():
            self.stopped_s += 0.0 if before is None else min(now - before, _LONGEST_LOOK_S)
            self._looked = now
        else:
            self.stopped_s, self._looked = 0.0, None
        if self.stopped_s < STOPPED_WITHIN_S:
            return True
        log.error(
            "the kernel stood still for %.0f s (a signal stopped it: SIGSTOP) and was ended",
            self.stopped_s,
        )
        await self.provisioner.kill()  # a stopped process takes no other signal
        return False

    is_alive = _async_is_alive

    def _stopped(self) -> bool:
        try:
            return psutil.Process(self.provisioner.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:  # it ended just now, which the next look tells
            return False
