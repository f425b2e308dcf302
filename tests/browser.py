"""A headless Chromium driven over its debugging pipe: what a page does, and how it looks.

Commands and answers are JSON texts that end with a zero byte, on the browser's descriptors 3 and 4
(https://chromedevtools.github.io/devtools-protocol/, `--remote-debugging-pipe`).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip

_LAUNCH = """
import fcntl, os, sys
theirs_in, theirs_out = (fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3])
os.dup2(theirs_in, 3)
os.dup2(theirs_out, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Gives the pipes the numbers that the browser reads and writes."""


class Browser:
    """A browser with one page; a context manager."""

    def __init__(self, folder: Path, *, width: int = 1366, height: int = 900, dark: bool = False):
        """`folder` is for the browser's own files."""
        assert BROWSER is not None, "no chromium is installed"
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [BROWSER, *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._read = 0, b""
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def open(self, address: str) -> None:
        """Load a page."""
        self._call("Page.navigate", url=address)
        self.wait("document.readyState == 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; promises are awaited."""
        found = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 120) -> None:
        """Wait until an expression is true in the page."""
        ends = time.monotonic() + timeout_s
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < ends, f"{condition} is not so after {timeout_s} s"
            time.sleep(0.05)

    def press(self, key: str, code: int) -> None:
        """Press a key and let it go."""
        for kind in ("rawKeyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write what is seen as a PNG; `whole`: also what is below the window."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        call = {"id": self._number, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            call["sessionId"] = self._session
        os.write(self._out, json.dumps(call).encode() + b"\0")
        ends = time.monotonic() + 120
        while time.monotonic() < ends:
            for message in self._messages():
                self._note(message)
                if message.get("id") == self._number:
                    assert "error" not in message, f"{method}: {message['error']}"
                    return message["result"]
        raise AssertionError(f"{method}: the browser does not answer")

    def _messages(self) -> list[dict[str, Any]]:
        if select.select([self._in], [], [], 1.0)[0]:
            read = os.read(self._in, 1 << 20)
            assert read, "the browser has ended"
            self._read += read
        *whole, self._read = self._read.split(b"\0")
        return [json.loads(text) for text in whole]

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what the page complains about: exceptions, errors in the console, failed loads."""
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and told["type"] == "error":
            self.complaints.append(json.dumps(told["args"]))
        elif message.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.complaints.append(told["entry"]["text"])
