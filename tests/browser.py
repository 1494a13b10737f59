"""A headless Chromium driven over its DevTools pipe: real clicks and keys, every request noted."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
_SECONDS = 60
_CONTROLS = {"button", "link", "combobox", "searchbox", "checkbox", "image", "table", "region"}
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
_KEYS |= {"ArrowDown": 40}


class Browser:
    """One page. Use it in a `with`.

    Attributes:
        requests: Every address the page asked for.
        complaints: Console warnings and errors, uncaught exceptions, violated policies.
    """

    def __init__(self, *, has_scripts: bool = True) -> None:
        """Start with a page that may run scripts or not."""
        assert CHROMIUM is not None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._has_scripts = has_scripts
        self._folder = tempfile.mkdtemp(prefix="spmd-verify-browser-")
        self._buffer, self._count, self._session = b"", 0, ""
        self._start()
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        found = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self._ask("Emulation.setScriptExecutionDisabled", value=not has_scripts)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for end in (self._in, self._out):
            os.close(end)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, path: Path, fragment: str = "") -> None:
        """Open a file from disk and wait until it is loaded."""
        # A new fragment alone would load nothing: something else comes first.
        for address in ("about:blank", path.resolve().as_uri() + fragment):
            self._loaded = False
            self._ask("Page.navigate", url=address)
            while not self._loaded:
                self._read()
        self.settle()

    def settle(self) -> None:
        """Wait until the page has drawn what an event changed."""
        if self._has_scripts:
            self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def run(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self._ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Click with the mouse into the middle of an element."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._ask(
                "Input.dispatchMouseEvent",
                type=kind,
                x=place[0],
                y=place[1],
                button="left",
                clickCount=1,
            )
        self.settle()

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            code = _KEYS[key]
            self._ask(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )
        self.settle()

    def type(self, text: str) -> None:
        """Write where the focus is."""
        self._ask("Input.insertText", text=text)
        self.settle()

    def look(self, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the window and the preferred colour scheme."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", features=features)

    def unnamed(self) -> list[str]:
        """Return the roles of controls that a screen reader could only call by their kind."""
        nodes = self._ask("Accessibility.getFullAXTree")["nodes"]
        return [
            node["role"]["value"]
            for node in nodes
            if node.get("role", {}).get("value") in _CONTROLS and not node["name"].get("value")
        ]

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        found = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _start(self) -> None:
        """Start the browser; it reads commands from descriptor 3 and answers on 4."""
        theirs_in, self._in = os.pipe()
        self._out, theirs_out = os.pipe()

        def place() -> None:
            command, answer = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(command, 3)
            os.dup2(answer, 4)

        self._process = subprocess.Popen(
            [
                str(CHROMIUM),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--remote-debugging-pipe",
                f"--user-data-dir={self._folder}",
            ],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def _ask(self, method: str, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        """Return the next message, its event noted."""
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            is_ready, _, _ = select.select([self._out], [], [], max(0.0, end - time.monotonic()))
            assert is_ready, "the browser does not answer"
            received = os.read(self._out, 1 << 20)
            assert received, "the browser ended"
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, found: dict[str, Any]) -> None:
        """Remember what an event says."""
        if method == "Network.requestWillBeSent":
            if found["request"]["url"] != "about:blank":
                self.requests.append(found["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(found["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(str(found["entry"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(found["args"]))
