"""Headless Chromium over its debugging pipe: open a page, send keys, read the DOM, collect errors.

Needs Debian's `chromium` (apt-get install chromium fonts-noto-color-emoji) and nothing from PyPI: the protocol is JSON
messages ended by a zero byte, written to descriptor 3 and read from descriptor 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    # A sandboxed frame stays in the page's process, so that one session sees both.
    "--disable-features=IsolateSandboxedIframes",
    "--disable-site-isolation-trials",
)
_KEY_CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, " ": 32, "Enter": 13}


class Browser:
    """One Chromium process with one page."""

    def __init__(self, width: int = 900, height: int = 800) -> None:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        if chromium is None:
            raise RuntimeError("no chromium found; run `apt-get install chromium fonts-noto-color-emoji`")
        self._profile = Path(tempfile.mkdtemp(prefix="chromium-"))
        child_reads, self._commands = os.pipe()
        self._answers, child_writes = os.pipe()
        self._process = subprocess.Popen(
            [chromium, *_FLAGS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}"],
            preexec_fn=lambda: _move_to_3_and_4(child_reads, child_writes),
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_reads)
        os.close(child_writes)
        self._buffer, self._number = b"", 0
        self._size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._session: str | None = None  # of the open page; set by `open`
        self._context: int | None = None  # of the frame in which expressions are evaluated; None is the page itself
        self._contexts: list[int] = []
        self._expired = False  # the time given by `advance` is over
        self.errors: list[str] = []  # exceptions, console errors and warnings of the open page

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        # Helper processes of Chromium may still be writing while they die.
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, html: str) -> None:
        """Load a page given as text into a new tab and wait until its scripts ran."""
        path = self._profile / "page.html"
        path.write_text(html, encoding="utf-8")
        self.visit(path.as_uri())

    def visit(self, url: str) -> None:
        """Load an address into a new tab and wait until its scripts ran."""
        self._session = self._context = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", **self._size)
        self._contexts, self.errors = [], []
        self._call("Page.navigate", url=url)
        ready = f"location.href === {json.dumps(url)} && document.readyState"
        self.wait(lambda: self.evaluate(ready) == "complete")

    def enter_frame(self) -> None:
        """From now on evaluate in the page's only frame."""
        self.wait(lambda: self.evaluate("1") == 1 and len(self._contexts) == 2)
        self._context = self._contexts[1]

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, a promise's once it is kept."""
        where = {} if self._context is None else {"contextId": self._context}
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, **where)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression} failed: {result['exceptionDetails']}")
        return result["result"].get("value")

    def leave_frame(self) -> None:
        """From now on evaluate in the page itself again."""
        self._context = None

    def stop_clock(self) -> None:
        """Timers of the page run only in `advance`, so that nothing moves between two looks."""
        self._call("Emulation.setVirtualTimePolicy", policy="pause")

    def advance(self, milliseconds: int) -> None:
        """Let timers of the page run for a while of its own time, at once."""
        self._expired = False
        self._call("Emulation.setVirtualTimePolicy", policy="advance", budget=milliseconds)
        self.wait(lambda: self.evaluate("1") == 1 and self._expired)

    def press(self, key: str) -> None:
        """Press and release a key, given by its `KeyboardEvent.key`."""
        code = _KEY_CODES.get(key, ord(key[0].upper()))
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def click(self, x: float, y: float) -> None:
        """Click at a point of the window, in CSS pixels."""
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """Write the window as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def wait(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Poll until `condition()` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"the page did not get there within {timeout_s} s; errors so far: {self.errors}")
            time.sleep(0.02)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(timeout_s=30.0)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if answer.get("sessionId") == self._session:
                self._notice(answer.get("method", ""), answer.get("params", {}))

    def _read(self, timeout_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], timeout_s)
            chunk = os.read(self._answers, 1 << 16) if ready else b""
            if not chunk:
                raise AssertionError("chromium does not answer" if not ready else "chromium ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _notice(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.executionContextCreated":
            self._contexts.append(params["context"]["id"])
        elif event == "Runtime.executionContextsCleared":
            self._contexts.clear()
        elif event == "Emulation.virtualTimeBudgetExpired":
            self._expired = True
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str([argument.get("value") for argument in params["args"]]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])


def _move_to_3_and_4(reads: int, writes: int) -> None:
    """In the child: put the two ends where Chromium expects them, by way of high numbers, as they may be 3 or 4."""
    high = [os.dup2(reads, 100), os.dup2(writes, 101)]
    os.dup2(high[0], 3)
    os.dup2(high[1], 4)
