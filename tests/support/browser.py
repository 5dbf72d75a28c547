"""A headless browser driven over Chrome's debugging pipe, with nothing installed but the browser."""

import fcntl
import json
import os
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip


def chromium() -> str:
    """The browser's command; the test skips where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("needs a headless browser: chromium is not installed")


class Page:
    """One tab.

    Attributes
    ----------
    complaints : list of str
        Everything the page has logged as an error, and every exception it threw.
    requests : list of str
        Everything it has asked for, the page itself first.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer, self._count, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has gone"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False, fragment: str = "") -> None:
        """Load a file at a window's width, at a fragment of its address, and wait until it has run."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        address = path.resolve().as_uri() + (f"#{fragment}" if fragment else "")
        self.call("Page.navigate", url="about:blank")  # another fragment alone would load nothing
        self.call("Page.navigate", url=address)
        state = ""
        while state != f"complete {address}":
            state = self.run("document.readyState + ' ' + location.href")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def settle(self) -> None:
        """Wait until the page has been drawn, and what watches its sizes has been told."""
        self.run("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(() => drawn(0))))")

    def click(self, x: float, y: float) -> None:
        """A press of the mouse at a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """A key down and up again, on whatever has the focus: "ArrowDown", "Tab", "Enter"."""
        typed = {"Enter": "\r"}.get(key, "")
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown", "keyUp"):
            parameters = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            self.call("Input.dispatchKeyEvent", type=kind, text=typed if kind == "keyDown" else "", **parameters)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        image = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(b64decode(image))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile, closed at the end."""
    command = [chromium(), *SWITCHES, f"--user-data-dir={profile}"]
    read_ours, write_theirs = os.pipe()
    read_theirs, write_ours = os.pipe()

    def pipes() -> None:  # the protocol's descriptors are 3 and 4
        keep = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_theirs, write_theirs)]
        os.dup2(keep[0], 3)
        os.dup2(keep[1], 4)

    process = subprocess.Popen(
        command, preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        page = Page(write_ours, read_ours)
        yield page
        page._session = ""
        page.call("Browser.close")
    finally:
        process.terminate()
        process.wait(timeout=20)
        for descriptor in (read_ours, write_ours, read_theirs, write_theirs):
            os.close(descriptor)
