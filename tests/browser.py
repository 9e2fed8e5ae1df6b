"""A headless Chromium, driven over its DevTools protocol through a pipe: no port, no package.

with Browser() as browser:
    browser.open(path, width=390)
    browser.evaluate("document.images.length")
    browser.problems       # what the console and the page itself reported
    browser.requests       # addresses that were asked for
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT = 60  # seconds for any answer


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One Chromium with one page, which `open` shows another file in."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [
            *(find_chromium(), "--headless", "--remote-debugging-pipe", "--no-first-run"),
            *("--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--no-sandbox"),
            f"--user-data-dir={self.profile.name}",
        ]
        to_read, self.to_browser = os.pipe()
        self.from_browser, to_write = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self.received = b""
        self.events: list[dict] = []
        self.last_id = 0
        self.session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.to_browser)
        os.close(self.from_browser)
        self.profile.cleanup()

    def send(self, method: str, **params: Any) -> dict:
        """Send a command and return its result; events that come meanwhile are kept."""
        self.last_id += 1
        session = {"sessionId": self.session} if self.session else {}
        message = {"id": self.last_id, "method": method, "params": params, **session}
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self.receive(deadline)
            if answer.get("id") == self.last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def receive(self, deadline: float) -> dict:
        while b"\0" not in self.received:
            ready, _, _ = select.select([self.from_browser], [], [], deadline - time.monotonic())
            data = os.read(self.from_browser, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("Chromium does not answer")
            self.received += data
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def wait_for(self, method: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self.receive(deadline))

    def screen(self, width: int, dark: bool) -> None:
        """Become a screen of this width, also for the page that is open."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path, width: int, anchor: str = "") -> None:
        """Show a file as a screen of this width does."""
        self.screen(width, dark=False)
        self.events.clear()
        self.send("Page.navigate", url="about:blank")  # so that an anchor alone loads the page too
        self.wait_for("Page.loadEventFired")
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri() + anchor)
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    @property
    def problems(self) -> list[str]:
        """Errors and warnings of the console, and exceptions of scripts."""
        self.evaluate("0")  # what has happened until now has been reported then
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"]["text"])
            elif event.get("method") == "Log.entryAdded":
                found.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled":
                found.append(str(params["args"]))
        return found

    @property
    def requests(self) -> list[str]:
        sent = (e for e in self.events if e.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]
