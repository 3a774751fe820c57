"""Guards what the page keeps: conversations are searched, exported and imported; a full storage is said."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.web.browser import Browser, needs_chromium
from tests.web.page_steps import LAST, contents, say
from tests.web.scripted_api import MODEL, Script

pytestmark = needs_chromium

# Keeps what the page would give the user as files.
CATCH_FILES = """window.saved = [];
URL.createObjectURL = (blob) => { blob.text().then((text) => window.saved.push(text)); return "#"; };
HTMLAnchorElement.prototype.click = function () { window.savedName = this.download; };"""


def saved_file(page: Browser, button: str) -> tuple[str, str]:
    """Returns the name and the text of the file that a button saves."""
    page.run(CATCH_FILES)
    page.click(button)
    text = page.until(lambda: page.run("return window.saved.at(-1) ?? null"))
    return page.run("return window.savedName"), text


def give_file(page: Browser, text: str) -> str:
    """Chooses a file for import, and returns what the page says of it."""
    page.run("document.querySelector('#notice').textContent = ''")
    page.run(
        """const files = new DataTransfer();
        files.items.add(new File([arguments[0]], "given.json", {type: "application/json"}));
        const field = document.querySelector("#import-file");
        field.files = files.files;
        field.dispatchEvent(new Event("change"));""",
        text,
    )
    found: str = page.until(lambda: page.text("#notice span"))
    return found


def test_history_is_searched(page: Browser, script: Script) -> None:
    """All words, in any case, in any message; the message that has one is shown; nothing found is said."""
    script.answers = [contents("The **Eiffel** tower"), contents("Lava and ash"), contents("x" * 3000)]
    say(page, "Paris sights")
    page.click("#new-chat")
    say(page, "Volcanoes")
    say(page, "more")
    page.type("#search", "TOWER eiff")
    page.until(lambda: page.count("#conversations li") == 1)
    assert "The **Eiffel** tower" in page.text("#conversations small")
    page.press("Enter")
    page.until(lambda: page.count("#messages .found") == 1)
    assert "Eiffel" in page.text("#messages .found")
    page.type("#search", " lava")
    page.until(lambda: page.count("#none-found") == 1)
    assert page.count("#conversations li") == 0
    page.run("const f = document.querySelector('#search'); f.value = ''; f.dispatchEvent(new Event('input'))")
    assert page.count("#conversations li") == 2


def test_conversations_travel_as_a_file(page: Browser, script: Script) -> None:
    """What was exported and removed comes back whole; what is here is not doubled; Markdown can be read."""
    call = {"tool_calls": [{"index": 0, "id": "a1", "function": {"name": "f", "arguments": "{}"}}]}
    script.answers = [[{"reasoning_content": "so"}, {"content": "one"}], [call]]
    say(page, "First")
    say(page, "Second")
    name, text = saved_file(page, "#export")
    assert name.startswith("moebius-conversations-")
    assert name.endswith(".json")
    _, readable = saved_file(page, "#export-text")
    assert readable.startswith("# First\n\n## You\n\nFirst\n\n## Assistant\n\none\n")
    assert "`f`" in readable
    assert give_file(page, text) == "Imported 0 of 1 conversations; 1 were here already."
    page.click("#conversations [aria-label='Remove First']")
    page.until(lambda: page.count("#conversations li") == 0)
    assert give_file(page, text) == "Imported 1 of 1 conversations."
    page.click("#conversations .title")
    page.until(lambda: page.count("#messages article") == 4)
    script.answers = [contents("three")]
    page.type("#composer", "Third\ue007")
    page.until(lambda: len(script.bodies) == 3)
    roles = [message["role"] for message in script.bodies[2]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert script.bodies[2]["messages"][1]["reasoning_content"] == "so"
    page.until(lambda: page.count(f"{LAST} .actions") == 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "given.json: This file is not JSON."),
        ('[{"title": "x"}]', 'given.json: This JSON is not of this page: it has no "format"'),
        ('{"format": "moebius-conversations", "version": 9}', "version 9; this page reads version 1"),
        ('{"format": "moebius-conversations", "version": 1}', 'no list "conversations"'),
    ],
)
def test_files_of_others_are_refused(page: Browser, text: str, said: str) -> None:
    """A sentence says what the file is instead, and nothing is taken from it."""
    assert said in give_file(page, text)
    assert page.count("#conversations li") == 0


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "system", "content": "x"}, "'role' of message 1 is none of user, assistant, tool"),
        ({"role": "user", "content": 5}, "'content' of message 1 is no text"),
        ({"role": "user", "content": "", "images": ["https://x.org/a.png"]}, "'images' of message 1"),
    ],
)
def test_damaged_conversations_are_refused(page: Browser, message: dict[str, Any], said: str) -> None:
    """The conversation and the message at fault are named."""
    damaged = {"id": "a", "messages": [message]}
    file = {"format": "moebius-conversations", "version": 1, "conversations": [damaged]}
    found = give_file(page, json.dumps(file))
    assert "Conversation 1 of this file" in found
    assert said in found


def test_files_cannot_choose_for_the_user(page: Browser, script: Script) -> None:
    """An import takes only settings that the page has, and no choice of tools of MCP servers."""
    script.answers = [contents("x")]
    settings = {"system": "Be brief", "numbers": {"temperature": 0.5, "messages": [], "top_p": "1"}}
    one = {"id": "a", "title": "t", "messages": [], "settings": {**settings, "mcp": ["mcp1_f"], "stop": 3}}
    file = {"format": "moebius-conversations", "version": 1, "conversations": [one]}
    assert give_file(page, json.dumps(file)) == "Imported 1 of 1 conversations."
    page.click("#conversations .title")
    say(page, "Hello")
    body = script.bodies[0]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["temperature"] == 0.5
    assert not {"top_p", "stop", "tools"} & body.keys()
    assert not any("mcp" in path for path in script.paths)


def test_a_removal_can_be_undone(page: Browser, script: Script) -> None:
    """The conversation comes back with its messages."""
    script.answers = [contents("one")]
    say(page, "First")
    page.until(lambda: page.count("#conversations li") == 1)
    page.click("#conversations [aria-label='Remove First']")
    page.until(lambda: page.count("#conversations li") == 0)
    page.click("#notice button")
    page.until(lambda: page.count("#conversations li") == 1)
    page.click("#conversations .title")
    page.until(lambda: page.count("#messages article") == 2)
    assert page.count("#notice") == 0


def test_a_full_storage_is_said(page: Browser, script: Script) -> None:
    """The conversation goes on and stays listed as long as the page, which says so."""
    page.run(
        """const full = () => { throw new DOMException("full", "QuotaExceededError"); };
        IDBObjectStore.prototype.put = full;
        Storage.prototype.setItem = full;"""
    )
    script.answers = [contents("one"), contents("two")]
    say(page, "First")
    page.until(lambda: "storage is full" in page.text("#notice"))
    page.click("#new-chat")
    say(page, "Second")
    page.until(lambda: page.count("#conversations li") == 2)
    page.click("#conversations li:last-child .title")
    page.until(lambda: page.text(f"{LAST} > .markdown") == "one")
    page.click("#open-settings")
    page.type("#preset-name", "p")
    page.click("#save-preset")
    assert "not kept" in page.text("#settings-error")
    page.click("#cancel-settings")


def test_a_page_that_is_closed_while_an_answer_comes(page: Browser, script: Script) -> None:
    """The question is kept at once, and the answer, which cannot come any more, can be made again."""
    script.pause = threading.Event()
    script.answers = [contents("some ", "words")]
    page.type("#composer", "Hello\ue007")
    page.until(lambda: "some" in page.text(LAST))
    page.until(lambda: page.count("#conversations li") == 1)
    page.run("location.reload()")
    page.until(lambda: page.text("#model") == MODEL and page.count("#messages article") == 2)
    assert "the page was closed" in page.text(f"{LAST} .end")
    assert page.count(f"{LAST} [aria-label='Regenerate this answer']") == 1
    script.pause.set()
