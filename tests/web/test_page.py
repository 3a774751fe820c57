"""Guards the page in headless Chromium, below a path prefix: chat, live view, keys, and no HTML of models."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.web.browser import Browser, needs_chromium
from tests.web.page_steps import LAST, contents, say
from tests.web.screenshots import HAS_CONVERTER, save_svg
from tests.web.scripted_api import MODEL, PREFIX, Script, running_api

pytestmark = needs_chromium

IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


def test_a_conversation(page: Browser, script: Script) -> None:
    """An answer streams, is rendered, counted and kept; the next request carries the history."""
    script.pause = threading.Event()
    script.answers = [
        contents("A **bold** ", "answer:\n\n```python\nprint(1)\n```\n", "end"),
        contents("two"),
    ]
    page.type("#composer", "Hello\ue007")
    page.until(lambda: page.count(f"{LAST} .code") == 1)  # before the answer has ended
    assert page.count("#stop") == 1
    assert page.text(f"{LAST} strong") == "bold"
    script.pause.set()
    page.until(lambda: page.count(f"{LAST} .actions") == 1)
    assert page.text(f"{LAST} pre") == "print(1)"
    assert "3 tokens" in page.text(f"{LAST} .end")
    assert page.run("return document.querySelector('#status').textContent") == "Answer finished"
    body = script.bodies[0]
    assert (body["stream"], body["model"]) == (True, MODEL)
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    say(page, "More")
    assert [message["role"] for message in script.bodies[1]["messages"]] == ["user", "assistant", "user"]
    page.run("location.reload()")
    page.until(lambda: page.count("#messages article") == 4)
    assert page.text("#conversations .title") == "Hello"
    assert all(path.startswith(PREFIX) for path in script.paths)


def test_regenerate_edit_and_several_conversations(page: Browser, script: Script) -> None:
    """An answer is made again from what it followed; an edited message drops what followed; each is kept."""
    script.answers = [contents("one"), contents("uno"), contents("two"), contents("other")]
    say(page, "First")
    page.click(f"{LAST} [aria-label='Regenerate this answer']")
    page.until(lambda: page.text(f"{LAST} > .markdown") == "uno" and page.count(f"{LAST} .actions") == 1)
    assert script.bodies[1]["messages"] == script.bodies[0]["messages"]
    page.click("[aria-label='Edit this message']")
    page.type(".message.user textarea", " edited")
    page.click(".message.user .actions button")
    page.until(lambda: page.text(f"{LAST} > .markdown") == "two" and page.count(f"{LAST} .actions") == 1)
    assert script.bodies[2]["messages"] == [{"role": "user", "content": "First edited"}]
    page.click("#new-chat")
    assert page.count("#messages article") == 0
    say(page, "Second")
    page.until(lambda: page.count("#conversations li") == 2)
    page.click("#conversations li:last-child .title")
    page.until(lambda: "First edited" in page.text("#messages"))
    page.click("#conversations li [aria-label='Remove First edited']")
    page.until(lambda: page.count("#conversations li") == 1)


def test_stop_ends_the_request(page: Browser, script: Script) -> None:
    """What came stays, the server sees the client leave, and the conversation goes on."""
    script.pause = threading.Event()
    script.answers = [contents("some ", "words"), contents("again")]
    page.type("#composer", "Hello\ue007")
    page.until(lambda: "some" in page.text(LAST))
    page.press("Escape")
    page.until(lambda: "stopped" in page.text(f"{LAST} .end"))
    assert script.left.wait(30)
    script.pause.set()
    say(page, "Go on")
    assert script.bodies[1]["messages"][1] == {"role": "assistant", "content": "some "}


def test_reasoning_is_folded_and_tools_are_shown(page: Browser, script: Script) -> None:
    """Reasoning opens on demand; a call's pieces are one call; what the user gives as result goes back."""
    pieces = [
        {"tool_calls": [{"index": 0, "id": "a1", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
    ]
    script.answers = [[{"reasoning_content": "I should "}, {"reasoning": "look"}, *pieces], contents("Cold.")]
    say(page, "Weather?")
    assert page.count(f"{LAST} .reasoning .markdown") == 0
    page.click(f"{LAST} .reasoning summary")
    page.until(lambda: page.text(f"{LAST} .reasoning .markdown") == "I should look")
    assert page.text(f"{LAST} .call code") == "weather"
    assert '"city": "Oslo"' in page.text(f"{LAST} .call pre")
    page.type(f"{LAST} .results textarea", "-3")
    page.click(f"{LAST} .results button")
    page.until(lambda: page.text(f"{LAST} > .markdown") == "Cold." and page.count(f"{LAST} .actions") == 1)
    call = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert script.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": None, "reasoning_content": "I should look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1", "content": "-3"},
    ]


def test_settings_are_sent_and_kept(page: Browser, script: Script) -> None:
    """Only what was filled in goes into requests; what is no JSON is named and not saved."""
    script.answers = [contents("x")]
    page.click("#open-settings")
    page.type("#set-system", "Be brief")
    page.type("#set-temperature", "0")
    page.type("#set-stop", "END")
    page.type("#set-extra", "{")
    page.click("#save-settings")
    assert "Further fields" in page.text("#settings-error")
    page.type("#set-extra", '"chat_template_kwargs": {"enable_thinking": false}}')
    page.click("#save-settings")
    page.until(lambda: page.count("#settings") == 0)
    say(page, "Hello")
    body = script.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief"}
    known = {"messages", "model", "stream", "stream_options"}
    assert {name: value for name, value in body.items() if name not in known} == {
        "temperature": 0,
        "stop": ["END"],
        "chat_template_kwargs": {"enable_thinking": False},
    }


HOSTILE = """
<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>
<svg onload="window.hacked=3"> <iframe srcdoc="<script>parent.hacked=4</script>"></iframe>
[click](javascript:window.hacked=5) [data](data:text/html,<script>window.hacked=6</script>)
<a href="javascript:window.hacked=7">x</a> ![pixel](https://tracker.example/p.png "t") &lt;b&gt;
| <b>a</b> | `<i>` |
|---|---|
| <style>*{display:none}</style> | [j](JaVaScRiPt:alert(1)) |

> # <u>quoted</u>

```html"><script>window.hacked=8</script>
<script>window.hacked=9</script>
```
"""


def test_nothing_a_model_writes_becomes_html(page: Browser, script: Script) -> None:
    """Tags, handlers and addresses of other schemes are text; images are not loaded; errors are text, too."""
    script.answers = [[{"content": HOSTILE, "reasoning_content": HOSTILE}]]
    say(page, HOSTILE.replace("\n", " "))
    page.click(f"{LAST} .reasoning summary")
    page.until(lambda: page.count(f"{LAST} .reasoning .code") == 1)
    made = page.run(
        "return [...document.querySelectorAll('#messages article *')].map((e) => e.tagName.toLowerCase())"
    )
    assert not {"img", "script", "svg", "iframe", "style", "u", "b", "i"} & set(made)
    assert {"table", "blockquote", "pre"} <= set(made)
    links = page.run("return [...document.querySelectorAll('#messages a')].map((e) => [e.href, e.rel])")
    assert {tuple(link) for link in links} == {
        ("https://tracker.example/p.png", "noopener noreferrer nofollow")
    }
    attributes = "[...document.querySelectorAll('#messages *')].flatMap((e) => e.getAttributeNames())"
    assert not page.run(f"return {attributes}.some((name) => name.startsWith('on') || name === 'style')")
    page.type("#composer", "and an error\ue007")
    page.until(lambda: "<b>is</b>" in page.text(f"{LAST} .error"))
    assert page.run("return window.hacked ?? null") is None
    refused = [entry for entry in page.problems() if "400" not in entry]
    assert refused == []


def test_a_key_is_asked_for(browser: Browser, script: Script) -> None:
    """After 401 a dialog asks; the key is used for everything and lives as long as the tab."""
    script.key = "right"
    script.answers = [contents("hi")]
    with running_api(script) as url:
        browser.open(url)
        browser.until(lambda: browser.count("#key-dialog") == 1)
        browser.type("#key", "wrong\ue007")
        browser.until(lambda: len(script.paths) == 2 and browser.count("#key-dialog") == 1)
        browser.type("#key", "right\ue007")
        browser.until(lambda: browser.text("#model") == MODEL)
        say(browser, "Hello")
        assert browser.run(
            "return [localStorage.length > 0, Object.values(sessionStorage).includes('right')]"
        ) == [
            True,
            True,
        ]
        assert "right" not in browser.run("return JSON.stringify(localStorage)")
        assert [entry for entry in browser.problems() if "401" not in entry] == []


def test_images_are_sent_where_the_model_takes_them(page: Browser, script: Script) -> None:
    """The button is there only then; what is attached is shown, and travels as a data URL."""
    script.answers = [contents("a pixel")]
    page.run(
        """const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
        const files = new DataTransfer();
        files.items.add(new File([bytes], "a.png", {type: "image/png"}));
        const field = document.querySelector("#file");
        field.files = files.files;
        field.dispatchEvent(new Event("change"));""",
        IMAGE,
    )
    page.until(lambda: page.count("#attachments img") == 1)
    assert page.count("#attach") == 1
    say(page, "What is it?")
    assert script.bodies[0]["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
                {"type": "text", "text": "What is it?"},
            ],
        }
    ]
    assert page.run("return document.querySelector('.message.user img').naturalWidth") == 1
    script.vision = False
    page.run("location.reload()")
    page.until(lambda: page.text("#model") == MODEL)
    assert page.count("#attach") == 0


def test_images_by_drop_and_paste(page: Browser, script: Script) -> None:
    """Files dropped or pasted are attached if they are images; else a sentence says why not."""
    give = """const [name, type, way] = arguments;
    const files = new DataTransfer();
    files.items.add(new File([Uint8Array.of(1)], name, {type}));
    const event = way === "drop"
      ? new DragEvent("drop", {dataTransfer: files, bubbles: true, cancelable: true})
      : new ClipboardEvent("paste", {clipboardData: files, bubbles: true, cancelable: true});
    document.querySelector(way === "drop" ? "#messages" : "#composer").dispatchEvent(event);
    return event.defaultPrevented"""
    assert page.run(give, "a.png", "image/png", "drop") is True  # or the browser would open it
    page.until(lambda: page.count("#attachments .thumbnail") == 1)
    page.run(give, "b.webp", "image/webp", "paste")
    page.until(lambda: page.count("#attachments .thumbnail") == 2)
    assert page.text("#notice") == ""
    page.run(give, "c.pdf", "application/pdf", "drop")
    assert "PNG, JPEG or WebP" in page.text("#notice")
    script.vision = False
    page.run("location.reload()")
    page.until(lambda: page.text("#model") == MODEL)
    page.run(give, "d.png", "image/png", "paste")
    assert "takes no images" in page.text("#notice")
    assert page.count("#attachments .thumbnail") == 0


def test_the_message_field_grows(page: Browser) -> None:
    """A long line wraps within what is seen; after sending the field is as low as before."""

    def height() -> int:
        found: int = page.run("return document.querySelector('#composer').offsetHeight")
        return found

    low = height()
    page.type("#composer", "many words " * 40)
    assert low < height() < 400
    page.run("document.querySelector('#composer').value = ''")
    page.type("#composer", " \ue003")
    assert height() == low


@pytest.mark.skipif(not HAS_CONVERTER, reason="needs the Debian package poppler-utils")
def test_pictures_of_the_page(page: Browser, script: Script, tmp_path: Path) -> None:
    """The docs' pictures are of the page as it is seen: its size, letters as outlines, nothing loaded."""
    script.answers = [contents("A **bold** answer")]
    say(page, "Hello")
    save_svg(page, tmp_path / "page.svg")
    picture = (tmp_path / "page.svg").read_text()
    root = ElementTree.fromstring(picture)
    width, height = page.run("return [innerWidth, innerHeight]")
    seen = [float(part) * 96 / 72 for part in root.attrib["viewBox"].split()]
    assert [abs(found - wanted) < 2 for found, wanted in zip(seen, (0, 0, width, height), strict=True)] == [
        True
    ] * 4
    assert picture.count("<use ") > 50  # letters
    assert not re.search(r"(href|url)\W{1,2}https?:", picture)
    assert not re.search(r"[ \"]\d+\.\d{5}", picture)  # hundredths of a point are enough


def test_a_phone_and_a_keyboard(page: Browser, script: Script) -> None:
    """Narrow windows do not scroll sideways and have the list behind a button; every control has a name."""
    script.answers = [contents("word " * 200 + "\n\n```\n" + "x" * 400 + "\n```\n")]
    page.resize(380, 700)
    say(page, "Hello")
    for width in (380, 320):
        page.show_at(width, 700)
        assert page.run("return [document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert page.count("#sidebar") == 0
    page.click("#menu")
    page.until(lambda: page.count("#sidebar") == 1)
    page.press("Escape")
    assert page.count("#sidebar") == 0
    assert page.run("return document.activeElement.id") == "menu"
    page.press("Enter")
    page.until(lambda: page.count("#sidebar") == 1)
    page.click("#new-chat")
    assert page.count("#sidebar") == 0
    assert page.run("return document.activeElement.id") == "composer"
    nameless = page.run(
        """return [...document.querySelectorAll("button, input, textarea, a")].filter((e) =>
        e.checkVisibility() && !(e.ariaLabel || e.labels?.length || e.innerText || e.title))
        .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    page.run("document.querySelector('.skip').focus()")
    page.press("Enter")
    assert page.run("return location.hash") == "#composer"


def test_dark_and_light(page: Browser) -> None:
    """The button goes through system, light and dark; the choice outlives the page."""

    def colour() -> Any:
        return page.run("return getComputedStyle(document.body).backgroundColor")

    page.click("#theme")
    light = colour()
    page.click("#theme")
    dark = colour()
    assert light != dark
    page.run("location.reload()")
    page.until(lambda: page.text("#model") == MODEL)
    assert colour() == dark


def live_answer(rows: int, seconds: float) -> dict[str, Any]:
    """Returns the figures in which a server has computed for a while."""
    server = {
        "index": 0,
        "is_up": True,
        "instance": "1",
        "busy_seconds": seconds,
        "weight_bytes": int(seconds * 4e9),
    }
    server |= {
        "calibrated_bytes_per_second": 5e9,
        "packed_bytes": 10**9,
        "weight_format": "int8",
        "isa": "avx2",
    }
    layers = [
        {"layer": 1, "gpu_experts": [0, 1], "cpu_rows": [0, 0, rows, 3], "chosen": None},
        {"layer": 2, "gpu_experts": [], "cpu_rows": None, "chosen": None},
    ]
    experts = {"num_experts": 4, "top_k": 2, "recorder_is_on": False, "streamed": None, "layers": layers}
    down = {"index": 1, "is_up": False}
    return {
        "tokens_per_second": 12.5,
        "prompt_tokens_per_second": 0.0,
        "time_to_first_token": {"count": 3, "p50_s": 0.25, "p95_s": 1.5},
        "requests": {"running": 2, "waiting": 1, "max_running": 64, "preemptions": 0},
        "kv_cache": {"used_tokens": 50, "cached_tokens": 10, "total_tokens": 200, "prefix_hit_rate": 0.5},
        "experts": {**experts, "servers": [{**server, "num_threads": 2, "numa_node": 0}, down]},
    }


def test_the_live_view(page: Browser, script: Script) -> None:
    """Rates come from two answers; what is unknown is said to be; a hidden page asks nothing."""
    script.live = live_answer(5, 10.0)
    assert not any("live" in path for path in script.paths)
    page.click("header nav a[href='#live']")
    page.until(lambda: "12.5" in page.text(".figures"))
    figures = page.text(".figures")
    for part in ("250 ms median", "1.50 s", "2 running, 1 queued", "25 %", "50 of 200 tokens"):
        assert part in figures, part
    assert "roofline: not measured" in figures  # of the server that is down
    experts = page.text("#live-view section")
    assert "does not answer" in experts
    assert "how hot experts on the GPU are is not measured" in experts
    assert "2 (5), 3 (3)" in experts
    colours = page.run(
        """const canvas = document.querySelector("canvas");
        const pixel = (expert, row) => [...canvas.getContext("2d").getImageData(
          ((expert + 0.5) * canvas.width) / 4, ((row + 0.5) * canvas.height) / 2, 1, 1).data].join();
        return [pixel(0, 0), pixel(2, 0), pixel(3, 0), pixel(0, 1)];"""
    )
    assert len(set(colours)) == 4, colours  # on the GPU, hot, warm, unknown
    drawn = page.run(
        """const canvas = document.querySelector("canvas");
        const [x, y] = [canvas.width - 9, canvas.height - 3];
        const corner = () => canvas.getContext("2d").getImageData(x, y, 1, 1).data[0];
        return ["light", "dark"].map((name) => {
          while (document.documentElement.dataset.theme !== name) document.querySelector("#theme").click();
          return corner();
        });"""
    )
    assert drawn[0] > 150 > drawn[1]  # at once in the other colours
    script.live = live_answer(105, 10.4)
    page.until(lambda: "4.00 GB/s" in page.text("#live-view tbody tr"))  # while computing
    assert "80 %" in page.text("#live-view tbody tr")
    page.until(lambda: "2 (100)" in page.text("#live-view section"))
    assert page.count("#replica") == 0
    assert page.count("#live-view .idle") == 0
    script.live["requests"] = {**script.live["requests"], "running": 0, "waiting": 0}
    script.live["steps"] = {"count": 1234, "seconds": 5.0}
    page.until(lambda: "1,234 forward passes" in page.text("#live-view .idle"))
    script.live["replicas"] = 2
    page.until(lambda: page.count("#replica") == 1)
    page.type("#replica", "2")
    page.until(lambda: any("replica=1" in query for query in script.queries))
    page.click("header nav a[href='#chat']")
    page.until(lambda: page.count("#messages") == 1)
    seen = len(script.paths)
    page.run("return new Promise((resolve) => setTimeout(resolve, 1500))")
    assert len(script.paths) <= seen + 1  # one may have been under way


def test_the_description_works_offline(page: Browser) -> None:
    """`/docs` shows every operation of openapi.json, with the fields of bodies."""
    page.click("header nav a[href='docs']")
    page.until(lambda: page.count(".operation") >= 3)
    assert "/v1/chat/completions" in page.text("#docs-view")
    page.click(".operation summary", last=True)
    page.until(lambda: "curl http://127.0.0.1" in page.text("#docs-view"))
