"""A headless Chromium, which tests talk to over a pipe in the DevTools protocol. Nothing but the browser is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PATIENCE = 60.0

# The browser reads commands from descriptor 3 and writes answers to 4. High numbers first, so that neither copy
# overwrites the source of the other. A program of its own, as functions between fork and exec may hang.
_START = """
import fcntl, os, sys
source, target = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 100) for each in sys.argv[1:3])
os.dup2(source, 3)
os.dup2(target, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A page of the browser. `events` has what the browser reported."""

    def __init__(self, commands: int, answers: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._commands, self._answers, self._rest, self._number = commands, answers, b"", 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        limit = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, limit - time.monotonic()))
            if not ready or not (received := os.read(self._answers, 1 << 20)):
                raise RuntimeError("the browser does not answer")
            self._rest += received
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def show(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size, and wait until its scripts have run."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        limit = time.monotonic() + _PATIENCE
        while not self.evaluate("document.readyState === 'complete' && location.protocol === 'file:'"):
            assert time.monotonic() < limit, "the page does not load"
            time.sleep(0.02)
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression. Its type is one of JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def errors(self) -> list[str]:
        """Return exceptions, console messages and the browser's own complaints about the page."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def screenshot(self, path: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser for the block."""
    command = executable()
    assert command is not None
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
        options += ["--disable-dev-shm-usage", "--remote-debugging-pipe"]
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _START, str(to_read), str(to_write), command, *options],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Browser(commands, answers)
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(answers)
