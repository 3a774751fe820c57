"""`python -m tests.web.screenshots [DIRECTORY]`: the pictures of docs/web-page.md, of the served demo.

Headless Chromium prints the page as it looks on a screen, and `pdftocairo` (Debian's poppler-utils) makes SVG
of it: what is seen is the page itself, and its letters are outlines, so that no font is needed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from tests.helpers.demo import demo_checkpoint
from tests.helpers.stack import ROOT, running_stack
from tests.web.browser import Browser, running_browser

QUESTION = "What is the capital of France?"
CONVERTER = "pdftocairo"
HAS_CONVERTER = shutil.which(CONVERTER) is not None
_DEFAULTS = (
    "stroke:none;",
    "fill-rule:nonzero;",
    "fill-opacity:1;",
    "stroke-opacity:1;",
    ' clip-rule="nonzero"',
)
# None of those in an embedded image, which stand between letters.
_NUMBER = re.compile(r"(?<![\w+/])-?\d+\.\d{3,}(?!(?!p[tx])[\w+/])")
FLAGS = ("--expert-servers", "2", "--gpu-experts", "4", "--expert-recorder", "stat")


def save_svg(page: Browser, path: Path) -> None:
    """What is in view, as SVG."""
    with tempfile.TemporaryDirectory() as directory:
        printed = Path(directory) / "page.pdf"
        page.print_pdf(printed)
        subprocess.run([CONVERTER, "-svg", "-f", "1", "-l", "1", printed, path], check=True)
    path.write_text(slimmed(path.read_text()))


def slimmed(svg: str) -> str:
    """Returns the same picture in fewer bytes: hundredths of a point, and nothing said that is the default
    anyhow.
    """
    for default in _DEFAULTS:
        svg = svg.replace(default, "")
    return _NUMBER.sub(_rounded, svg)


def _rounded(number: re.Match[str]) -> str:
    value = float(number[0])
    # Scales and opacities are below one.
    return f"{value:.{2 if abs(value) >= 1 else 4}f}".rstrip("0").rstrip(".")


def chat_picture(page: Browser, url: str, path: Path) -> None:
    """A question and its answer, in light colours."""
    page.resize(1180, 700)
    page.open(f"{url}/")
    page.until(lambda: page.text("#model"))
    page.click("#theme")
    page.click("#open-settings")
    page.type("#set-temperature", "0")
    page.type("#set-max_tokens", "150")
    page.click("#save-settings")
    page.type("#composer", QUESTION + "\ue007")
    page.until(lambda: page.count("#messages article:last-child .actions") == 1, 600)
    save_svg(page, path)


def live_picture(page: Browser, url: str, path: Path, seconds: float) -> None:
    """The live view in dark colours, a number of seconds after requests began."""
    stop = threading.Event()
    threads = [threading.Thread(target=_keep_busy, args=(url, stop)) for _ in range(3)]
    page.resize(1180, 1250)
    page.open(f"{url}/#live")
    page.until(lambda: page.count("#live-view tbody tr") > 1)
    while page.run("return document.documentElement.dataset.theme") != "dark":
        page.click("#theme")
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    page.until(lambda: "GB/s" in page.text("#live-view tbody tr"), 120)
    save_svg(page, path)
    stop.set()
    for thread in threads:
        thread.join()


def _keep_busy(url: str, stop: threading.Event) -> None:
    """Requests for the live view to show."""
    while not stop.is_set():
        messages = [{"role": "user", "content": f"Tell me of the year {time.time():.0f}."}]
        body = {"messages": messages, "max_tokens": 48}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


def main(directory: Path) -> None:
    """Both pictures."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_stack(demo_checkpoint(), Path(scratch), *FLAGS, timeout_s=600) as stack,
        running_browser(Path(scratch) / "profile") as page,
    ):
        chat_picture(page, stack.base_url, directory / "web-page-chat.svg")
        live_picture(page, stack.base_url, directory / "web-page-live.svg", 25)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
