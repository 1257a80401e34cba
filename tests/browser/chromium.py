"""A headless Chromium without a network, spoken to by the DevTools protocol over its pipe."""

from __future__ import annotations

import base64
import io
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

from PIL import Image

DEADLINE_S = 60
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
KEYS = {"Enter": 13, "a": 65}
MODIFIERS = {"": 0, "Control": 2, "Shift": 8}


class Chromium:
    """One browser with one page, owned by a ``with``. Every name lookup fails, so nothing can come
    from a network but, with ``local``, from this machine itself.

    events: what the page reported so far (console messages, requests, downloads), as DevTools
    events.
    Raises: FileNotFoundError when no Chromium is installed (apt-get install chromium), TimeoutError
        when it does not answer.
    """

    def __init__(self, local: bool = False):
        self.rules = (
            f"--host-resolver-rules=MAP * ~NOTFOUND{', EXCLUDE 127.0.0.1' if local else ''}"
        )

    def __enter__(self) -> Chromium:
        binary = (
            shutil.which("chromium")
            or shutil.which("chromium-browser")
            or shutil.which("google-chrome")
        )
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
            [
                "bash",
                "-c",
                there,
                "chromium",
                binary,
                *FLAGS,
                self.rules,
                f"--user-data-dir={self._profile.name}",
            ],
            pass_fds=(theirs_in, theirs_out),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            self.call(
                "Emulation.setScrollbarsHidden", hidden=True
            )  # a page is as wide in a picture as on the screen
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
        """The result of one DevTools command; events that come before it are kept. A page that asks
        whether to be left is left.
        """
        mine = self._send(method, params)
        while True:
            answer = self._next(method)
            if answer.get("id") == mine:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._keep(answer)

    def _send(self, method: str, params: dict) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._to, json.dumps(message).encode() + b"\0")
        return self._number

    def _keep(self, event: dict) -> None:
        if event.get("method") == "Page.javascriptDialogOpening":
            self._send("Page.handleJavaScriptDialog", {"accept": True})
        if "method" in event:
            self.events.append(event)

    def wait_for(self, event: str, **params: Any) -> dict:
        """The first event of that name whose parameters include these."""
        seen = 0
        while True:
            for found in self.events[seen:]:
                if found.get("method") == event and params.items() <= found["params"].items():
                    return found["params"]
            seen = len(self.events)
            self._keep(self._next(event))

    def open(self, page: Path | str, width: int, height: int, scripts: bool = True) -> None:
        """Load a file, or an address, in a window of width x height CSS pixels, as a phone does
        when it is narrow; scripts: JavaScript on.
        """
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def until(self, expression: str, seconds: float = DEADLINE_S) -> Any:
        """The value of a JavaScript expression once it is true. Raises: TimeoutError when it does
        not become so.
        """
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"not within {seconds:g} s: {expression}")
            time.sleep(0.2)
        return value

    def click(self, element: str, times: int = 1) -> None:
        """Click with the mouse in the middle of an element, given as a JavaScript expression, after
        it was brought into sight.
        """
        self.until(f"!!({element})")
        x, y = self.evaluate(
            "(e => { e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2]; }})({element})"
        )
        for kind in ("mousePressed", "mouseReleased") * times:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, modifier: str = "") -> None:
        """Press a key of ``KEYS``, with a modifier held."""
        common = {
            "key": key,
            "code": key if len(key) > 1 else f"Key{key.upper()}",
            "windowsVirtualKeyCode": KEYS[key],
            "modifiers": MODIFIERS[modifier],
        }
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **common)
        if key == "Enter":
            self.call("Input.dispatchKeyEvent", type="char", text="\r", **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, element: str, text: str) -> None:
        """Put text into an input in the place of what it holds, and leave it by Enter."""
        self.click(element)
        self.press("a", "Control")
        self.call("Input.insertText", text=text)
        self.press("Enter")

    def picture(
        self, path: Path, element: str | None = None, margin: int = 0, most: int = 2000
    ) -> None:
        """Keep what is seen, or one element of it with a margin, brought into sight, as a PNG of at
        most so many pixels' height.

        Its 256 colours make it small; the octree keeps those of small marks, too.
        """
        clip = {}
        if element:
            self.evaluate(f"({element}).scrollIntoView({{block: 'start'}})")
            x, y, width, height = self.evaluate(
                "(e => { const r = e.getBoundingClientRect(); return [r.x + scrollX, r.y +"
                f" scrollY, r.width, r.height]; }})({element})"
            )
            x, y, width, height = (
                max(0, x - margin),
                max(0, y - margin),
                width + 2 * margin,
                height + 2 * margin,
            )
            clip = {
                "clip": {"x": x, "y": y, "width": width, "height": min(most, height), "scale": 1},
                "captureBeyondViewport": True,
            }
        path.parent.mkdir(parents=True, exist_ok=True)
        seen = Image.open(
            io.BytesIO(base64.b64decode(self.call("Page.captureScreenshot", **clip)["data"]))
        ).convert("RGB")
        seen.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )

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
