"""A headless Chromium driven through chromedriver by the W3C WebDriver protocol, which is JSON over HTTP."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.ports import free_port

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = ", ".join(
    name for name, found in (("chromium", CHROMIUM), ("chromium-driver", DRIVER)) if found is None
)
needs_chromium = pytest.mark.skipif(bool(MISSING), reason=f"needs the Debian packages {MISSING}")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, by the standard
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # a page that needs another host fails
)
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004"}


class Browser:
    """One session; a test waits with `until`, never for a fixed time."""

    def __init__(self, base: str, session: str, client: httpx.Client) -> None:
        self._base = f"{base}/session/{session}"
        self._client = client

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._client.request(method, f"{self._base}/{path}", json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, f"{path}: {value}"
        return value

    def open(self, url: str) -> None:
        """Loads a page."""
        self._call("POST", "url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Returns the value of a script's `return`; promises are awaited."""
        return self._call("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """Returns the text that is shown of the first element; empty: there is none."""
        found: str = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        return found

    def count(self, selector: str) -> int:
        """Returns the number of elements that are shown."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).length"
        )
        found: int = self.run(script, selector)
        return found

    def click(self, selector: str, last: bool = False) -> None:
        """A click as a user's, on an element that has to be in view and enabled."""
        self._call("POST", f"element/{self._element(selector, last)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Types into an element."""
        self._call("POST", f"element/{self._element(selector)}/value", {"text": text})

    def press(self, key: str) -> None:
        """A key, wherever the focus is."""
        value = KEYS.get(key, key)
        actions = [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        body = {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}
        self._call("POST", "actions", body)

    def resize(self, width: int, height: int) -> None:
        """The window's size in pixels."""
        self._command("Emulation.clearDeviceMetricsOverride", {})
        self._call("POST", "window/rect", {"width": width, "height": height})

    def show_at(self, width: int, height: int) -> None:
        """The page's own size in pixels, which may be below that of the smallest window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", size)

    def picture(self) -> bytes:
        """Returns what is in view, as PNG."""
        return base64.b64decode(self._call("GET", "screenshot"))

    def print_pdf(self, path: Path) -> None:
        """One page of what is in view, in the colours of the screen."""
        self._command("Emulation.setEmulatedMedia", {"media": "screen"})
        width, height = self.run("return [innerWidth, innerHeight]")
        options = {"printBackground": True, "pageRanges": "1", "preferCSSPageSize": False}
        margins = {f"margin{side}": 0 for side in ("Top", "Bottom", "Left", "Right")}
        size = {"paperWidth": width / 96, "paperHeight": height / 96}  # inches
        printed = self._command("Page.printToPDF", {**options, **margins, **size})
        path.write_bytes(base64.b64decode(printed["data"]))

    def _command(self, name: str, parameters: dict[str, Any]) -> Any:
        """A command of Chromium's own protocol."""
        return self._call("POST", "goog/cdp/execute", {"cmd": name, "params": parameters})

    def problems(self) -> list[str]:
        """Returns the errors that the browser logged since the last call: failed loads, refused scripts,
        exceptions.
        """
        entries = self._call("POST", "se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def until(self, condition: Callable[[], Any], timeout_s: float = 60) -> Any:
        """Waits for a truthy value and returns it."""
        end = time.monotonic() + timeout_s
        while not (found := condition()):
            time.sleep(0.05)
            if time.monotonic() < end:
                continue
            page = self.text("body")[:2000]
            raise AssertionError(f"timed out; page: {page!r}; {self.problems()}")
        return found

    def _element(self, selector: str, last: bool = False) -> str:
        found = self._call("POST", "elements", {"using": "css selector", "value": selector})
        assert found, f"no element {selector}"
        name: str = found[-1 if last else 0][_ELEMENT]
        return name


@contextlib.contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile."""
    assert DRIVER is not None
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(timeout=120) as client:
            end = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{base}/status").status_code == 200:
                        break
                assert time.monotonic() < end, "chromedriver did not start"
                time.sleep(0.05)
            options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = client.post(f"{base}/session", json={"capabilities": {"alwaysMatch": wanted}})
            assert answer.status_code == 200, answer.text
            session = answer.json()["value"]["sessionId"]
            try:
                yield Browser(base, session, client)
            finally:
                client.delete(f"{base}/session/{session}")
    finally:
        driver.terminate()
        driver.wait(30)
