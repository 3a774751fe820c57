"""Guards the page's modules one by one, in headless Chromium: Markdown, event streams, figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.web.browser import Browser, needs_chromium
from tests.web.scripted_api import PREFIX, Script, running_api

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Browser]:
    """A page of the origin that has the modules."""
    with running_api(Script()) as url:
        browser.open(f"{url}docs")
        yield browser


def call(page: Browser, module: str, body: str, *arguments: Any) -> Any:
    """Returns what `body` returns, with the module as `m`."""
    load = f"import('{PREFIX}/web/{module}.js')"
    return page.run(f"const given = arguments; return {load}.then(async (m) => {{ {body} }})", *arguments)


def rendered(page: Browser, text: str) -> str:
    """Returns a text's HTML as the browser writes it down."""
    body = """const node = document.createElement("div");
    new m.MarkdownView(node).show(given[0]);
    return node.innerHTML;"""
    found: str = call(page, "render", body, text)
    return found


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a\nb", "<p>a<br>b</p>"),
        ("# A #\n## *B*", "<h3>A</h3><h4><em>B</em></h4>"),
        ("**a *b* c** ~~d~~ __e__ snake_case_name 2*3*4", None),
        ("`a*b*` and ``x ` y``", "<p><code>a*b*</code> and <code>x ` y</code></p>"),
        ("1. a\n2. b\n   - c\n   - d\n3. e", None),
        ("- [x] done\n- [ ] open", None),
        (
            "a\n\n---\n\n> b\n> > c",
            "<p>a</p><hr><blockquote><p>b</p><blockquote><p>c</p></blockquote></blockquote>",
        ),
        (r"\*a\* \<b>", "<p>*a* &lt;b&gt;</p>"),
        ("a<br>b &amp; c", "<p>a<br>b &amp;amp; c</p>"),
        ("3. x", '<ol start="3"><li>x</li></ol>'),
        ("*open **marks `stay", "<p>*open **marks `stay</p>"),
        ("", ""),
    ],
)
def test_markdown(page: Browser, text: str, html: str | None) -> None:
    """Each form gives the elements that people expect, and unclosed marks stay text."""
    expected = {
        "**a": "<p><strong>a <em>b</em> c</strong> <s>d</s> <strong>e</strong> "
        "snake_case_name 2<em>3</em>4</p>",
        "1. ": "<ol><li>a</li><li><p>b</p><ul><li>c</li><li>d</li></ul></li><li>e</li></ol>",
        "- [": '<ul><li class="task"><input type="checkbox" disabled="" checked="" aria-label="done">'
        "done</li>"
        '<li class="task"><input type="checkbox" disabled="" aria-label="to do">open</li></ul>',
    }
    assert rendered(page, text) == (expected[text[:3]] if html is None else html)


def test_links(page: Browser) -> None:
    """Only http, https and mailto become links, whatever the spelling; nothing leaks its address."""
    good = rendered(page, "[a](https://x.org/a_(b)) <mailto:me@x.org> see https://x.org/y?z=1.")
    assert good.count("<a ") == 3
    assert 'href="https://x.org/a_(b)"' in good
    assert 'href="https://x.org/y?z=1"' in good
    assert good.count('rel="noopener noreferrer nofollow"') == 3
    for address in (
        "javascript:alert(1)",
        " JAVASCRIPT:alert(1)",
        "java\tscript:alert(1)",
        "data:text/html,x",
    ):
        for text in (f"[a]({address})", f"<{address}>", f"![a]({address})"):
            assert "<a" not in rendered(page, text), text
    for address in ("vbscript:x", "file:///etc/passwd", "/relative", "//host/x", "blob:x", "x"):
        assert "<a" not in rendered(page, f"[a]({address})"), address


def math_of(page: Browser, text: str) -> Any:
    """Returns what is TeX in a text: of each formula its source, and whether it has a line of its own."""
    body = """const found = [];
    const walk = (parts) => parts.forEach((part) => {
      if (part.type === "math") found.push([part.tex, part.isDisplay]);
      else if (part.children) walk(part.children);
    });
    for (const block of m.splitBlocks(given[0])) {
      if (block.type === "math") found.push([block.tex, block.isClosed]);
      else if (block.text) walk(m.parseInline(block.text));
    }
    return found;"""
    return call(page, "markdown", body, text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            r"so $a_1 * b_2$ and \(\frac{1}{2} \\ *x*\)",
            [["a_1 * b_2", False], [r"\frac{1}{2} \\ *x*", False]],
        ),
        ("a\n\\[\n- x\\\\\n= _y_\n\\]\nb", [["- x\\\\\n= _y_", True]]),
        ("$$x$$\n$$\ny\n$$", [["x", True], ["y", True]]),
        ("in $$x$$ line", [["x", True]]),
        (
            "\\begin{align}\na &= b \\\\\nc\n\\end{align}",
            [["\\begin{align}\na &= b \\\\\nc\n\\end{align}", True]],
        ),
        ("$5 and $10, US$3/US$4, $HOME and $PATH, $ x $, \\$a\\$, $1-$2", []),
        ("`$a$` and \\(open and \\[open", []),
        ("$$\nleft open\n\n- text", []),
        ("$$\ngrows", [["$$\ngrows", False]]),
        (r"$\text{\$5}$", [[r"\text{\$5}", False]]),
    ],
)
def test_math_keeps_its_backslashes(page: Browser, text: str, found: list[Any]) -> None:
    """Nothing within TeX's marks is read as Markdown; prices and marks without a partner are text."""
    assert math_of(page, text) == found


def test_math_is_drawn(page: Browser) -> None:
    """KaTeX draws under the policy, with MathML beside; wrong TeX stays; commands that load do nothing."""
    body = """const node = document.createElement("div");
    document.body.append(node);
    new m.MarkdownView(node).show(given[0]);
    const pause = () => new Promise((next) => setTimeout(next, 20));
    for (let tries = 0; !node.querySelector(".katex") && tries < 3000; tries++) await pause();
    const wrong = [...node.querySelectorAll(".wrong")].map((one) => one.textContent);
    const found = [node.querySelectorAll("math msqrt").length, wrong, node.querySelectorAll("a").length];
    await document.fonts.ready;
    const heights = [...node.querySelectorAll("[style]")].map((one) => getComputedStyle(one).height);
    const styled = heights.some((height) => height !== "auto");
    node.remove();
    return [...found, styled];"""
    found = call(page, "render", body, r"\(\sqrt{x}\) and \(\nothing\) and \(\href{https://x.org}{y}\)")
    assert found[:3] == [1, [r"\nothing"], 0]
    assert found[3] is True
    assert page.problems() == []


def test_code_is_coloured(page: Browser) -> None:
    """The text stays as it is, in spans of the highlighter's classes; unknown languages have none."""
    body = """const node = document.createElement("div");
    new m.MarkdownView(node).show(given[0]);
    const pause = () => new Promise((next) => setTimeout(next, 20));
    for (let tries = 0; !node.querySelector(".code-keyword") && tries < 3000; tries++) await pause();
    const kinds = [...node.querySelectorAll("code *")].map((one) => `${one.localName}.${one.className}`);
    return [[...node.querySelectorAll("code")].map((one) => one.textContent), [...new Set(kinds)].sort()];"""
    text = '```python\ndef f(a):\n    return "<b>"  # c\n```\n\n```whatever\n<b>def</b>\n```'
    texts, kinds = call(page, "render", body, text)
    assert texts == ['def f(a):\n    return "<b>"  # c', "<b>def</b>"]
    assert kinds == [
        "span.code-comment",
        "span.code-keyword",
        "span.code-params",
        "span.code-string",
        "span.code-title",
    ]


def test_growing_text_is_drawn_like_the_whole(page: Browser) -> None:
    """Whatever prefixes were shown before, the end looks the same; what has not changed stays in place."""
    text = "# T\n\nA *b*\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n- x\n- y\n\n  z\n\n```js\nlet a;\n```\n"
    text += "$$\nx\n$$\n\n- a\n\n  b\n\nend `c` [l](https://x.org) \\(y\\)"
    body = """const text = given[0];
    const node = document.createElement("div");
    const view = new m.MarkdownView(node);
    let first = null;
    for (let end = 0; end <= text.length; end++) {
      view.show(text.slice(0, end));
      if (end === 6) first = node.firstElementChild;
    }
    const whole = document.createElement("div");
    new m.MarkdownView(whole).show(text);
    return [node.innerHTML === whole.innerHTML, node.firstElementChild === first, whole.children.length];"""
    assert call(page, "render", body, text) == [True, True, 8]


PATTERNS = [
    "*",
    "**a ",
    "_a",
    "`",
    "[",
    "[](",
    "![a](",
    "> ",
    "- ",
    "1. ",
    "#",
    "# " + " " * 50,
    "|",
    "|-",
    "~~",
    "<",
    "\\",
    "http://",
    "``` ",
    "a|b\n-|-\n",
    "  - x\n",
    "*a **b ",
    "[a](https://x.org/(",
    "- - - ",
    "\t",
    "$",
    "$a ",
    "$$a\n",
    "$$a\n\n",
    "\\[a\n",
    "\\[",
    "\\(a ",
    "\\begin{align}\n",
]


def test_markdown_takes_time_in_proportion(page: Browser) -> None:
    """Eight times the text takes nearer to eight times as long than to 64 times, for any mark repeated."""
    body = """const slow = [];
    for (const pattern of given[0]) {
      const once = (size) => {
        const text = pattern.repeat(Math.ceil(size / pattern.length));
        const begin = performance.now();
        for (const block of m.splitBlocks(text)) if (block.text) m.parseInline(block.text);
        return performance.now() - begin;
      };
      // The best of some: the machine may be busy.
      const best = (size, times) => Math.min(...Array.from({ length: times }, () => once(size)));
      const [short, long] = [best(25000, 5), best(200000, 2)];
      if (long > 400 && long > 32 * short) slow.push([pattern, short, long]);
    }
    return slow;"""
    assert call(page, "markdown", body, PATTERNS) == []


def test_events_are_read_whatever_way_bytes_are_cut(page: Browser) -> None:
    """Line ends of all kinds, comments, several lines of data, characters cut in half."""
    stream = ": hello\n\ndata: one\r\n\r\ndata:two\ndata: lines\n\nid: 5\ndata: ü東😀\n\n"
    stream += "data: [DONE]\n\ndata: unfinished"
    body = """const bytes = new TextEncoder().encode(given[0]);
    const found = new Set();
    for (let size = 1; size <= bytes.length; size++) {
      const stream = new ReadableStream({
        start(control) {
          for (let at = 0; at < bytes.length; at += size) control.enqueue(bytes.slice(at, at + size));
          control.close();
        },
      });
      const events = [];
      for await (const data of m.eventData(stream)) events.push(data);
      found.add(JSON.stringify(events));
    }
    return [...found].map(JSON.parse);"""
    assert call(page, "api", body, stream) == [["one", "two\nlines", "ü東😀", "[DONE]"]]


def layer(
    cpu: list[int] | None, chosen: list[int] | None = None, gpu: tuple[int, ...] = ()
) -> dict[str, Any]:
    """One layer of three experts in an answer of /v1/live."""
    return {"layer": 0, "gpu_experts": list(gpu), "cpu_rows": cpu, "chosen": chosen}


def test_heat(page: Browser) -> None:
    """Heat is what was added since; a count that fell begins again; what is not counted is unknown."""

    def heat(now: dict[str, Any], before: dict[str, Any]) -> Any:
        body = """const found = m.heatOf(...given[0]);
        return {...found, layers: found.layers.map(({onGpu, ...rest}) => rest)};"""
        return call(page, "heat", body, [{"num_experts": 3, "layers": [now]}, {"layers": [before]}])

    found = heat(layer([9, 0, 4]), layer([5, 0, 4]))
    assert found == {
        "isStale": False,
        "hasNew": True,
        "layers": [{"heat": [4, 0, 0], "cpuRows": 4, "elsewhere": None, "hottest": [[0, 4]]}],
    }
    fell = heat(layer([1, 0, 0]), layer([5, 0, 4]))
    assert (fell["isStale"], fell["hasNew"], fell["layers"][0]["heat"]) == (True, False, [1, 0, 0])
    resident = heat(layer([9, 0, 4], gpu=(1,)), layer([5, 0, 4], gpu=(1,)))
    assert resident["layers"][0]["heat"] == [4, None, 0]
    counted = heat(layer([9, 0, 4], [9, 7, 4], (1,)), layer([5, 0, 4], [5, 2, 4], (1,)))
    assert (counted["layers"][0]["heat"], counted["layers"][0]["elsewhere"]) == ([4, 5, 0], 5)
    unknown = heat(layer(None), layer(None))
    assert unknown["layers"][0] == {"heat": [None] * 3, "cpuRows": None, "elsewhere": None, "hottest": []}


def test_rates_of_servers(page: Browser) -> None:
    """Bytes over time and over busy time; nothing for a server that was restarted or is down."""
    server = {"index": 0, "is_up": True, "instance": "a", "calibrated_bytes_per_second": 20.0}

    def rates(before: dict[str, Any], now: dict[str, Any]) -> Any:
        answers = [{"time": at, "experts": {"servers": [one]}} for at, one in ((10, before), (12, now))]
        return call(page, "live", "return m.serverRates(...given[0])", answers)

    old = {**server, "weight_bytes": 100, "busy_seconds": 5.0}
    new = {**server, "weight_bytes": 120, "busy_seconds": 6.0}
    assert rates(old, new) == [{"perSecond": 10, "busyShare": 0.5, "whileBusy": 20, "ofLimit": 1}]
    assert rates(old, {**new, "instance": "b"}) == [None]
    assert rates(old, {"index": 0, "is_up": False}) == [None]
    idle = {"perSecond": 0, "busyShare": 0, "whileBusy": None, "ofLimit": None}
    assert rates(old, old) == [idle]
    assert rates(old, {**new, "calibrated_bytes_per_second": None})[0]["ofLimit"] is None
