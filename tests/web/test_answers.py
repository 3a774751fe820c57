"""Guards how the page asks and waits: progress, broken connections, focus, presets, tools of MCP servers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.web.browser import Browser, needs_chromium
from tests.web.page_steps import LAST, contents, say
from tests.web.scripted_api import MODEL, Script

pytestmark = needs_chromium

LOAD = {"running": 3, "waiting": 2, "max_running": 64, "preemptions": 0}


def focused(page: Browser) -> Any:
    """Returns the id of the element that has the focus."""
    return page.run("return document.activeElement.id")


def test_progress_is_shown_while_waiting(page: Browser, script: Script) -> None:
    """Before the first token the seconds and the server's load are shown, then tokens; at the end neither."""
    script.live = {"requests": LOAD}
    script.pause = threading.Event()
    script.answers = [contents("only")]
    page.type("#composer", "Hello\ue007")
    page.until(lambda: "Waiting for the first token" in page.text(f"{LAST} .progress"))
    page.until(lambda: "3 requests running and 2 queued" in page.text(f"{LAST} .progress"))
    script.pause.set()
    page.until(lambda: page.count(f"{LAST} .actions") == 1)
    assert page.count(f"{LAST} .progress") == 0


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({"waited": 4.9, "stalled": 4.9}, "Waiting for the first token: 4 s"),
        (
            {"waited": None, "stalled": 0.1, "usage": {"completion_tokens": 7}, "rate": 2.04},
            "7 tokens, 2.0 tokens/s",
        ),
        ({"waited": None, "stalled": 0.1, "usage": {"completion_tokens": 1}}, "1 token"),
        ({"waited": None, "stalled": 0.1}, ""),
        ({"waited": None, "stalled": 9.0, "load": LOAD}, "No new token for 9 s"),
    ],
)
def test_the_sentence_of_progress(page: Browser, known: dict[str, Any], text: str) -> None:
    """It has what is known, and only that."""
    body = """const given = arguments[0];
    const base = document.baseURI.split("#")[0];
    return import(`${base}web/progress.js`).then((m) => m.progressText(given));"""
    found = page.run(body, {"usage": None, "rate": None, "load": None, **known})
    assert found.startswith(text)
    assert (found == "") == (text == "")


def test_a_connection_that_breaks(page: Browser, script: Script) -> None:
    """What came stays and is said to be cut; Continue asks for more of the same message."""
    script.breaks, script.pause = True, threading.Event()
    script.answers = [contents("some ", "words"), contents("more ", "words")]
    page.type("#composer", "Hello\ue007")
    # A connection that breaks may take along what was sent just before.
    page.until(lambda: page.text(f"{LAST} > .markdown") == "some")
    script.pause.set()
    page.until(lambda: "The connection ended before the answer did" in page.text(f"{LAST} .end"))
    script.breaks = False
    page.until(lambda: page.count(f"{LAST} [aria-label='Continue this answer']") == 1)
    page.click(f"{LAST} [aria-label='Continue this answer']")
    page.until(lambda: page.text(f"{LAST} > .markdown") == "some more words")
    page.until(lambda: page.count(f"{LAST} .actions") == 1)
    assert page.count("#messages article") == 2
    body = script.bodies[1]
    assert body["messages"][-1] == {"role": "assistant", "content": "some "}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert page.count(f"{LAST} [aria-label='Continue this answer']") == 0
    assert [entry for entry in page.problems() if "ERR_INCOMPLETE_CHUNKED" not in entry] == []


def test_a_server_that_is_away_comes_back(page: Browser, script: Script) -> None:
    """The page says why nothing can be asked, and by itself when it can."""
    script.is_away = True
    page.run("location.reload()")
    page.until(lambda: "the engine is loading. This page tries again" in page.text("#notice"))
    script.is_away = False
    page.until(lambda: page.text("#model") == MODEL)
    assert page.count("#notice") == 0
    assert [entry for entry in page.problems() if "503" not in entry] == []


def test_the_message_field_has_the_focus(page: Browser, script: Script) -> None:
    """At the start, after a message, after a stop by mouse, in a new conversation, but not after a dialog."""
    page.until(lambda: focused(page) == "composer")
    script.pause = threading.Event()
    script.answers = [contents("one", "two")]
    page.type("#composer", "Hello\ue007")
    page.until(lambda: "one" in page.text(LAST))
    page.click("#stop")
    page.until(lambda: page.count(f"{LAST} .actions") == 1)
    page.until(lambda: focused(page) == "composer")
    script.pause.set()
    page.click("#new-chat")
    assert focused(page) == "composer"
    page.click("#open-settings")
    page.press("Escape")
    assert focused(page) == "open-settings"  # a dialog gives the focus back


def test_presets(page: Browser, script: Script) -> None:
    """A name keeps prompt and sampling; chosen in another conversation it fills the fields there."""
    page.click("#open-settings")
    page.type("#set-system", "Be brief")
    page.type("#set-temperature", "0.5")
    page.type("#preset-name", "short")
    page.click("#save-preset")
    assert page.run("return document.querySelector('#preset').value") == "short"
    page.run(
        "document.querySelector('#set-system').value = document.querySelector('#set-temperature').value = ''"
    )
    page.click("#save-settings")
    script.answers = [contents("x"), contents("y")]
    say(page, "Hello")
    assert "temperature" not in script.bodies[0]
    page.run("location.reload()")
    page.until(lambda: page.text("#model") == MODEL)
    page.click("#new-chat")
    page.click("#open-settings")
    page.type("#preset", "short")
    page.until(lambda: page.run("return document.querySelector('#set-system').value") == "Be brief")
    page.click("#save-settings")
    page.until(lambda: page.count("#messages .system") == 1)
    say(page, "Hello")
    assert script.bodies[1]["messages"][0] == {"role": "system", "content": "Be brief"}
    assert script.bodies[1]["temperature"] == 0.5
    page.click("#open-settings")
    page.type("#preset", "short")
    page.click("#remove-preset")
    assert page.run("return document.querySelectorAll('#preset option').length") == 1
    page.click("#cancel-settings")


def test_images_in_a_conversation_of_another_model(page: Browser, script: Script) -> None:
    """A model without vision is not sent them; the sentence says what to do."""
    script.vision = False
    page.run("location.reload()")
    page.until(lambda: page.text("#model") == MODEL)
    page.run(
        """const message = {role: "user", content: "see", images: ["data:image/png;base64,AAAA"]};
        const conversations = [{id: "a", title: "see", messages: [message]}];
        const file = {format: "moebius-conversations", version: 1, conversations};
        const files = new DataTransfer();
        files.items.add(new File([JSON.stringify(file)], "given.json"));
        const field = document.querySelector("#import-file");
        field.files = files.files;
        field.dispatchEvent(new Event("change"));"""
    )
    page.until(lambda: page.count("#conversations li") == 1)
    page.click("#conversations .title")
    page.type("#composer", "and?\ue007")
    page.until(lambda: "takes no images" in page.text("#notice"))
    assert script.bodies == []


MCP: list[dict[str, Any]] = [
    {
        "name": "tools.example/mcp",
        "error": None,
        "tools": [
            {
                "id": "mcp1_weather",
                "name": "weather",
                "description": "Today",
                "input_schema": {"type": "object"},
            }
        ],
    },
    {"name": "other.example", "error": "other.example cannot be reached", "tools": []},
]


def test_mcp_tools(page: Browser, script: Script) -> None:
    """Tools are sent only where they are chosen; a call runs when its button is pressed, and is shown."""
    script.mcp = MCP
    call = {"index": 0, "id": "a1", "function": {"name": "mcp1_weather", "arguments": '{"city": "Oslo"}'}}
    script.answers = [contents("x"), [{"tool_calls": [call]}], contents("Cold.")]
    say(page, "Without")
    assert "tools" not in script.bodies[0]
    page.click("#open-settings")
    page.until(lambda: page.count("#mcp") == 1)
    assert "cannot be reached" in page.text("#mcp")
    page.click("#mcp input")
    page.click("#save-settings")
    page.run("location.reload()")  # the choice is the conversation's
    page.until(lambda: page.text("#model") == MODEL and page.count("#messages article") == 2)
    say(page, "With")
    function = {"name": "mcp1_weather", "description": "Today", "parameters": {"type": "object"}}
    assert script.bodies[1]["tools"] == [{"type": "function", "function": function}]
    assert script.mcp_calls == []
    page.run("location.reload()")
    page.until(lambda: page.text(f"{LAST} .results button") == "Run on tools.example/mcp")
    page.click(f"{LAST} .results button")
    page.until(
        lambda: (
            page.run("return document.querySelector('.results textarea').value") == "result of mcp1_weather"
        )
    )
    assert script.mcp_calls == [{"tool": "mcp1_weather", "arguments": {"city": "Oslo"}}]
    assert len(script.bodies) == 2
    page.press("Enter")  # the focus is on the button that sends
    page.until(lambda: page.text(f"{LAST} > .markdown") == "Cold." and page.count(f"{LAST} .actions") == 1)
    assert script.bodies[2]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "a1",
        "content": "result of mcp1_weather",
    }
    script.mcp = []
    page.run("location.reload()")
    page.until(lambda: page.text("#model") == MODEL)
    page.type("#composer", "Again\ue007")
    page.until(lambda: "No MCP server has mcp1_weather now" in page.text("#notice"))
