"""`python -m tests.web.screenshots URL DIRECTORY`: the pictures of docs/web-page.md, of a running server."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from tests.web.browser import running_browser

QUESTION = "What is the capital of France?"


def _keep_busy(url: str, stop: threading.Event) -> None:
    """Requests for the live view to show."""
    while not stop.is_set():
        body = {"messages": [{"role": "user", "content": f"Tell me of the year {time.time():.0f}."}]}
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        httpx.post(f"{url}/v1/chat/completions", json={**body, "model": model, "max_tokens": 48}, timeout=120)


def main(url: str, directory: Path) -> None:
    """Chat in light colours, the live view in dark ones."""
    with tempfile.TemporaryDirectory() as profile, running_browser(Path(profile)) as page:
        page.resize(1180, 700)
        page.open(f"{url}/")
        page.until(lambda: page.text("#model"))
        page.click("#theme")
        page.type("#composer", QUESTION + "\ue007")
        page.until(lambda: page.count("#messages article:last-child .actions") == 1, 300)
        page.screenshot(directory / "web-page-chat.png")
        page.click("#theme")
        page.resize(1180, 1250)
        page.click("header nav a[href='#live']")
        stop = threading.Event()
        threads = [threading.Thread(target=_keep_busy, args=(url, stop)) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(25)
        page.screenshot(directory / "web-page-live.png")
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
