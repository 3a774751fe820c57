"""Guards that diagrams are drawn only on demand, in a frame that can do nothing else, and are images."""

from __future__ import annotations

from tests.web.browser import Browser, needs_chromium
from tests.web.page_steps import LAST, contents, say
from tests.web.scripted_api import MODEL, Script

pytestmark = needs_chromium

DIAGRAM = "```mermaid\ngraph LR\n  A[Router] --> B[Expert]\n```\n"
HOSTILE = """```mermaid
graph LR
  A["<img src=x onerror=parent.hacked=1>"] --> B
  click A "javascript:parent.hacked=2"
```
"""


def test_a_diagram_is_drawn_on_demand(page: Browser, script: Script) -> None:
    """The library is loaded when the button is pressed, not before; a second press removes the drawing."""
    script.answers = [contents(DIAGRAM)]
    say(page, "Draw")
    page.until(lambda: page.count(f"{LAST} .code-head .copy") == 2)
    assert page.run("return document.querySelectorAll('iframe').length") == 0
    page.click(f"{LAST} .code-head .copy")
    page.until(lambda: page.count(f"{LAST} .diagram img") == 1)
    width = "return document.querySelector('.diagram img').naturalWidth"
    page.until(lambda: page.run(width) > 100)
    assert page.run("return document.querySelector('.diagram img').alt").startswith("Diagram: graph LR")
    frame = "const f = document.querySelector('iframe'); return [f.contentDocument, f.sandbox.value]"
    assert page.run(frame) == [None, "allow-scripts"]  # nothing of the page is within its reach
    page.click(f"{LAST} .code-head .copy")
    assert page.count(f"{LAST} .diagram") == 0


def test_a_setting_draws_all(page: Browser, script: Script) -> None:
    """Where the user wants it, diagrams are drawn as soon as they are complete; hostile ones do nothing."""
    page.click("#open-settings")
    page.click("#draw-diagrams")
    page.click("#save-settings")
    script.answers = [contents(DIAGRAM, HOSTILE)]
    say(page, "Draw")
    page.until(lambda: page.count(f"{LAST} .diagram img") == 2)
    assert page.run("return window.hacked ?? null") is None
    page.run("location.reload()")
    page.until(lambda: page.text("#model") == MODEL and page.count(f"{LAST} .diagram img") == 2)


def test_what_is_no_diagram_stays_code(page: Browser, script: Script) -> None:
    """The library's reason is shown below the code, which stays."""
    script.answers = [contents("```mermaid\nno diagram at all\n```\n")]
    say(page, "Draw")
    page.click(f"{LAST} .code-head .copy")
    page.until(lambda: "Not drawn" in page.text(f"{LAST} .error"))
    assert page.text(f"{LAST} pre") == "no diagram at all"
