"""A headless Chromium, controlled by the DevTools protocol over two pipes: pages in any width and colour scheme."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.conftest import ROOT

CHROMIUM: Final = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
AXE: Final = ROOT / "node_modules/axe-core/axe.min.js"
_PATIENCE: Final = 60.0  # seconds for an answer
# Pages without a server have neither sandboxes of their own nor a GPU.
_FLAGS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"),
)


def missing() -> str | None:
    """The reason why pages cannot be tested here."""
    if CHROMIUM is None:
        return "there is no chromium on the PATH"
    return None if AXE.is_file() else "axe-core is missing; run: npm ci"


class BrowserFailed(Exception):
    """The browser refused a call, or ended."""


class Browser:
    """One tab of a running browser."""

    def __init__(self, process: "subprocess.Popen[bytes]", to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._number, self._buffer = 0, b""
        self.requests: list[str] = []
        self.messages: list[str] = []  # of the console, such as violations of a policy
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._call(method, self._session, **params)

    def open(self, url: str, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Load a page and wait until it is complete."""
        self.requests, self.messages = [], []
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=url)
        self._wait(lambda: self._loaded)

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, script: str) -> Any:
        """The value of a script's last expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserFailed(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def violations(self) -> list[str]:
        """What axe finds on the page, each with its elements."""
        self.call("Runtime.evaluate", expression=AXE.read_text())
        found = self.evaluate("axe.run(document, {resultTypes: ['violations']}).then(found => found.violations)")
        return [
            f"{rule['id']}: {rule['help']}: {node['html'][:160]} {node['failureSummary'][:200]}"
            for rule in found
            for node in rule["nodes"][:3]
        ]

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(self.evaluate(script))

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answers: list[dict[str, Any]] = []

        def answered() -> bool:
            answers.extend(message for message in self._pending if message.get("id") == number)
            return bool(answers)

        self._pending: list[dict[str, Any]] = []
        self._wait(answered)
        if "error" in answers[0]:
            raise BrowserFailed(f"{method}: {answers[0]['error']}")
        result: dict[str, Any] = answers[0]["result"]
        return result

    def _wait(self, over: Any) -> None:
        end = time.monotonic() + _PATIENCE
        while not over():
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._back, 1 << 20) if ready else b""
            if not data:
                raise BrowserFailed(f"no answer from the browser (exit code {self._process.poll()})")
            *whole, self._buffer = (self._buffer + data).split(b"\0")
            self._pending = [json.loads(message) for message in whole]
            for message in self._pending:
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        match message:
            case {"method": "Page.loadEventFired"}:
                self._loaded = True
            case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}}:
                self.requests.append(url)
            case {"method": "Log.entryAdded", "params": {"entry": {"text": text}}}:
                self.messages.append(text)
            case {"method": "Runtime.exceptionThrown", "params": params}:
                self.messages.append(str(params))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile in a folder; it is ended afterwards."""
    (theirs, to), (back, our_end) = os.pipe(), os.pipe()
    assert CHROMIUM is not None

    def connect() -> None:
        # The protocol is spoken on descriptors 3 and 4.
        first, second = os.dup(theirs), os.dup(our_end)
        os.dup2(first, 3)
        os.dup2(second, 4)

    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=connect,
        start_new_session=True,
    )
    os.close(theirs)
    os.close(our_end)
    try:
        yield Browser(process, to, back)
    finally:
        os.close(to)
        os.close(back)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
