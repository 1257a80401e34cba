"""A headless Chromium without a network, spoken to by the DevTools protocol over its pipe."""
from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 60
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe")


class Chromium:
    """One browser with one page, owned by a ``with``. Every name lookup fails, so nothing can come from a network.

    events: what the page reported so far (console messages, requests, downloads), as DevTools events.
    Raises: FileNotFoundError when no Chromium is installed (apt-get install chromium), TimeoutError when it does not answer.
    """

    def __enter__(self) -> Chromium:
        binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if binary is None:
            raise FileNotFoundError("Chromium is not installed: apt-get install -y chromium")
        self.events: list[dict] = []
        self._number, self._rest, self._session = 0, b"", None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # The protocol's pipe is file descriptors 3 and 4 of the browser; the shell puts ours there.
        there = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", there, "chromium", binary, *FLAGS, f"--user-data-dir={self._profile.name}"],
            pass_fds=(theirs_in, theirs_out), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(timeout=10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict:
        """The result of one DevTools command; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, event: str, **params: Any) -> dict:
        """The first event of that name whose parameters include these."""
        seen = 0
        while True:
            for found in self.events[seen:]:
                if found.get("method") == event and params.items() <= found["params"].items():
                    return found["params"]
            seen = len(self.events)
            self.events.append(self._next(event))

    def open(self, page: Path, width: int, height: int, scripts: bool = True) -> None:
        """Load a file in a window of width x height CSS pixels, as a phone does when it is narrow; scripts: JavaScript on."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def _next(self, waiting_for: str) -> dict:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self._from, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError(f"Chromium did not answer ({waiting_for}).")
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)
