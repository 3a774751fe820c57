"""Guards that axe finds nothing on the page, in its states, at three widths, in both colours; no overflow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.stack import ROOT
from tests.web.browser import Browser, needs_chromium
from tests.web.page_steps import LAST, contents, say
from tests.web.scripted_api import Script
from tests.web.test_page import live_answer

AXE = ROOT / "build" / "axe" / "axe.min.js"
needs_axe = pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: make axe")
pytestmark = [needs_chromium, needs_axe]

SIZES = ((320, 640), (800, 700), (1440, 900))
_WIDE = " + ".join(f"x_{{{number}}}" for number in range(40))
ANSWER = f"""# Title

A [link](https://x.org), `code`, $x_1$, and a wide formula:

$$
{_WIDE}
$$

```python
def f(a):  # comment
    return "{"x" * 120}"
```

| a | b |
|---|--:|
| 1 | {"wide " * 40} |

- [x] done

> quote

```mermaid
graph LR
  A --> B
```
"""
TOOLS = [{"id": "mcp1_f", "name": "f", "description": "Does something", "input_schema": {}}]


def check(page: Browser, state: str) -> None:
    """Fails with what axe finds, or with a width that is overflown, at each size and in both colours."""
    found: list[Any] = []
    page.run(f"{AXE.read_text()}; window.axe = axe;")
    for theme in ("light", "dark"):
        page.run("while (document.documentElement.dataset.theme !== arguments[0]) theme.click()", theme)
        for width, height in SIZES:
            page.show_at(width, height)
            place = f"{state}, {width} px, {theme}"
            if page.run("return document.documentElement.scrollWidth > innerWidth"):
                found.append((place, "overflow"))
            # The frame that draws diagrams can be entered by nothing.
            violations = page.run(
                """return axe.run(document, { iframes: false }).then(({ violations }) =>
                violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html.slice(0, 200))]))"""
            )
            found += [(place, *violation) for violation in violations]
    page.show_at(1200, 800)
    assert found == []


def conversation(page: Browser, script: Script) -> None:
    """An answer with everything in it, unfolded, and its diagram drawn."""
    script.answers = [[{"reasoning_content": "So *it* goes"}, {"content": ANSWER}]]
    say(page, "Hello")
    page.click(f"{LAST} .reasoning summary")
    page.until(lambda: page.count(f"{LAST} .katex") > 0 and page.count(f"{LAST} .code-keyword") > 0)
    page.run(
        "[...document.querySelectorAll('.code-head button')].find((b) => b.textContent === 'Draw').click()"
    )
    page.until(lambda: page.run("return document.querySelector('.diagram img')?.naturalWidth"))


def waiting(page: Browser, script: Script) -> None:
    """An answer that is awaited."""
    script.pause = threading.Event()
    script.answers = [contents("x", "y")]
    page.type("#composer", "Hello\ue007")
    page.until(lambda: page.text(f"{LAST} > .markdown") == "x")


def failure(page: Browser, script: Script) -> None:
    """An answer that was cut off, and a message that is edited."""
    script.answers = [[{"content": "some "}, {"content": "words"}]]
    script.breaks = True
    say(page, "Hello")
    page.click("[aria-label='Edit this message']")
    page.problems()


def tools(page: Browser, script: Script) -> None:
    """Settings with presets and MCP tools."""
    script.mcp = [
        {"name": "tools.example", "error": None, "tools": TOOLS},
        {"name": "other.example", "error": "cannot be reached", "tools": []},
    ]
    page.click("#open-settings")
    page.until(lambda: page.count("#mcp") == 1)


def results(page: Browser, script: Script) -> None:
    """A call of a tool that awaits its result, in a conversation with a system prompt."""
    tools(page, script)
    page.type("#set-system", "Be brief")
    page.click("#mcp input")
    page.click("#save-settings")
    call = {"index": 0, "id": "a", "function": {"name": "mcp1_f", "arguments": '{"a": 1}'}}
    script.answers = [[{"tool_calls": [call]}]]
    say(page, "Hello")
    page.click(f"{LAST} .results button")
    page.until(lambda: "again" in page.text(f"{LAST} .results button"))


def search(page: Browser, script: Script) -> None:
    """The list with what a search found, and a removal that can be undone."""
    script.answers = [contents("one"), contents("two")]
    say(page, "Hello")
    page.click("#new-chat")
    say(page, "Other")
    page.until(lambda: page.count("#conversations li") == 2)
    page.click("#conversations li:last-child button:last-child")
    page.type("#search", "two")
    page.until(lambda: page.count("#notice button") == 2 and page.count("#conversations small") == 1)
    page.run("document.querySelector('#menu').click()")


def live(page: Browser, script: Script) -> None:
    """The live view while nothing runs."""
    script.live = live_answer(5, 10.0)
    script.live["requests"] |= {"running": 0, "waiting": 0}
    page.click("header nav a[href='#live']")
    page.until(lambda: page.count("#live-view .idle") == 1)


@pytest.mark.parametrize("state", [conversation, waiting, failure, tools, results, search, live])
def test_nothing_keeps_people_out(
    page: Browser, script: Script, state: Callable[[Browser, Script], None]
) -> None:
    """Contrast, names, roles, order and sizes are right wherever the user gets."""
    state(page, script)
    check(page, state.__name__)
    if script.pause is not None:
        script.pause.set()
