"""Drive a headless Chromium over its DevTools protocol, on a pair of pipes: no library needed."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, which Chromium's sandbox refuses
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
PATIENCE_S = 60.0


def find() -> str | None:
    """Return the path of a Chromium; None without one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(Exception):
    """The browser refused a command, died, or did not answer."""


class Browser:
    """One Chromium with one page.

    Attributes:
        events: what the browser has reported since the page was opened: (method, parameters).
    """

    def __init__(self, binary: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        arguments = [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = _start(arguments, to_read, to_write)
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        self.wait(lambda: bool(self._pages()), "the browser's first page")
        answer = self.call("Target.attachToTarget", targetId=self._pages()[0], flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        # Without it a page in a window that nobody looks at gets no focus events.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def _pages(self) -> list[str]:
        found = self.call("Target.getTargets")["targetInfos"]
        return [target["targetId"] for target in found if target["type"] == "page"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        body: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            body["sessionId"] = self._session
        os.write(self._write, json.dumps(body).encode() + b"\0")
        while True:
            message = self._receive(method)
            if message.get("id") == self._number:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            if "method" in message:
                self.events.append((message["method"], message["params"]))

    def _receive(self, waiting_for: str) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise BrowserError(f"{waiting_for}: no answer within {PATIENCE_S:g} s")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise BrowserError(f"{waiting_for}: the browser has ended")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Ask again until the condition holds; return what it said."""
        until = time.monotonic() + PATIENCE_S
        while not (answer := condition()):
            if time.monotonic() > until:
                raise BrowserError(f"{what}: not within {PATIENCE_S:g} s")
            time.sleep(0.02)
        return answer

    def open(self, file: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show a file in a window of this size in CSS pixels; a narrow one is a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        self.wait(
            lambda: (
                self.js("document.readyState") == "complete"
                and self.js("location.href").startswith(file.as_uri())
            ),
            file.name,
        )

    def js(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Scroll an element into view and click it with the mouse."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view; return its middle in the window."""
        x, y = self.js(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f"return [b.x + b.width / 2, b.y + b.height / 2]; }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        return x, y

    def key(self, name: str) -> None:
        """Press and release a key, such as "Tab" or "ArrowRight"."""
        code = {"Tab": 9, "ArrowRight": 39, "Escape": 27, "Enter": 13}[name]
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
            )

    def screenshot(self) -> bytes:
        """Return the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def pdf(self) -> bytes:
        """Return the page as it prints."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def close(self) -> None:
        """End the browser and all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._write)
        os.close(self._read)


def _start(arguments: list[str], to_read: int, to_write: int) -> int:
    """Start a program in a session of its own, with these pipes as its descriptors 3 and 4."""
    # Copies above 9, so that neither is where the other has to go.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_read, to_write)]
    quiet = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    actions = [(os.POSIX_SPAWN_DUP2, quiet, fd) for fd in (0, 1, 2)]
    actions += [(os.POSIX_SPAWN_DUP2, fd, place) for fd, place in zip(high, (3, 4), strict=True)]
    try:
        return os.posix_spawn(
            arguments[0], arguments, os.environ, file_actions=actions, setsid=True
        )
    finally:
        for fd in (*high, quiet):
            os.close(fd)
