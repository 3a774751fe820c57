"""`python -m tests.web.screenshots [DIRECTORY]`: the pictures of docs/web-page.md.

Two are of the demo as it is served: headless Chromium prints the page as it looks on a screen, and
`pdftocairo` (Debian's poppler-utils) makes SVG of it, so its letters are outlines. Six
more, PNGs, show an answer from a script at three widths and in both colours.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from PIL import Image

from tests.helpers.demo import demo_checkpoint
from tests.helpers.stack import ROOT, running_stack
from tests.web.browser import Browser, running_browser
from tests.web.scripted_api import Script, running_api

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

SIZES = ((320, 640), (800, 700), (1440, 900))
ANSWER = r"""The roots of $ax^2 + bx + c$ are

$$
x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}
$$

if \(a \ne 0\). In **Python**:

```python
def roots(a: float, b: float, c: float) -> tuple[float, float]:
    # The discriminant decides.
    d = b * b - 4 * a * c
    if d < 0:
        raise ValueError(f"no real roots: {d=}")
    return (-b - d**0.5) / (2 * a), (-b + d**0.5) / (2 * a)
```

| discriminant | real roots |
|---|--:|
| positive | 2 |
| zero | 1 |

```mermaid
graph LR
  A[discriminant] -->|negative| B[none]
  A -->|else| C[roots]
```
"""


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


def sizes_pictures(page: Browser, directory: Path) -> None:
    """The page at three widths, in light and dark colours."""
    script = Script(answers=[[{"reasoning_content": "The formula."}, {"content": ANSWER}]])
    with running_api(script) as url:
        page.open(url)
        page.until(lambda: page.text("#model"))
        page.type("#composer", "What are the roots of a quadratic polynomial?\ue007")
        page.until(lambda: page.count("#messages article:last-child .actions") == 1)
        page.until(lambda: page.count(".katex") > 1 and page.count(".code-keyword") > 0)
        page.run(
            "return document.fonts.ready.then(() => (document.querySelector('#messages').scrollTop = 0))"
        )
        for theme in ("light", "dark"):
            page.run("while (document.documentElement.dataset.theme !== arguments[0]) theme.click()", theme)
            for width, height in SIZES:
                page.show_at(width, height)
                image = Image.open(io.BytesIO(page.picture())).convert("RGB")
                few = image.quantize(256, dither=Image.Dither.NONE)  # half of the bytes
                few.save(directory / f"web-page-{width}-{theme}.png", optimize=True)


def main(directory: Path) -> None:
    """All pictures."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_browser(Path(scratch) / "profile") as page,
    ):
        sizes_pictures(page, directory)
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_stack(demo_checkpoint(), Path(scratch), *FLAGS, timeout_s=600) as stack,
        running_browser(Path(scratch) / "profile") as page,
    ):
        chat_picture(page, stack.base_url, directory / "web-page-chat.svg")
        live_picture(page, stack.base_url, directory / "web-page-live.svg", 25)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
