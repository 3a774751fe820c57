"""Guards that whatever a client sends to the APIs by Anthropic, Ollama and in items is answered below 500."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.agent_gateway import AgentGateway, agent_gateway
from tests.helpers.fake_engine import MODEL, Script

CASES = 60  # per path
TEXTS = ["", "x", "json", "ü😀", "\ufdd0", "<|end|>", "<tool_call>", "{", '{"a": "\\ud800"}']
ODD: list[Any] = [None, True, -1, 0, 2, 2**31, 2**63, 10**400, 0.5, 1e39, float("nan"), [], {}]
ODD += ["\ud800", "\x00", "[" * 3000, "1" * 5000]
BLOCKS = ["text", "image", "document", "search_result", "thinking", "tool_use", "tool_result", "other"]
PARTS = ["input_text", "output_text", "refusal", "input_image", "input_file", "summary_text", "other"]
ITEMS = [
    *("message", "function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output"),
    *("reasoning", "item_reference", "additional_tools", "other"),
]
ROLES = ["user", "assistant", "system", "developer", "tool"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CHOICES = [
    *("auto", "none", "required", {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}),
    *({"type": "function", "name": "f"}, {"type": "custom", "name": "f"}),
    {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
]
Make = Callable[[], Any]


class Fuzzer:
    """Draws bodies that are mostly valid, from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        # Half of the bodies have nothing wrong on purpose, so that what is behind validation is reached.
        self._odds = self._random.choice([0.0, 0.02, 0.2])

    def wild(self, depth: int = 2) -> Any:
        """Draws any value."""
        kind = self._random.randrange(4 if depth else 2)
        if kind < 2:
            return self._random.choice(ODD if kind else TEXTS)
        if kind == 2:
            return [self.wild(depth - 1) for _ in range(self._random.randrange(3))]
        return {
            str(self._random.choice(TEXTS)): self.wild(depth - 1) for _ in range(self._random.randrange(3))
        }

    def one_of(self, *values: Any) -> Make:
        """Draws one of these."""
        return lambda: self._random.choice(values)

    def text(self) -> Any:
        """Draws some text."""
        return self._random.choice(TEXTS)

    def list_of(self, make: Make) -> Make:
        """Draws up to three."""
        return lambda: [self._made(make) for _ in range(self._random.randrange(1, 4))]

    def _made(self, make: Make) -> Any:
        return self.wild() if self._random.random() < self._odds else make()

    def object(self, needed: dict[str, Make], optional: dict[str, Make]) -> dict[str, Any]:
        """Draws these fields, some of the others, and now and then an unknown one."""
        names = [*needed, *(name for name in optional if self._random.random() < 0.15)]
        value = {name: self._made({**optional, **needed}[name]) for name in names}
        if self._random.random() < self._odds:
            value[self._random.choice(["unknown", "a[b]-c", *names])] = self.wild()
        if names and self._random.random() < self._odds:
            value.pop(self._random.choice(names), None)
        return value

    def source(self) -> dict[str, Any]:
        """Draws the source of an image or a document."""
        kind = {"type": self.one_of("base64", "url", "text", "content")}
        fields = dict.fromkeys(("data", "url", "content", "media_type"), self.text)
        return self.object({**kind, **fields}, {})

    def block(self, depth: int = 1) -> dict[str, Any]:
        """Draws blocks of an Anthropic message, with the fields of every kind."""
        texts = dict.fromkeys(("text", "id", "tool_use_id", "name", "title", "thinking"), self.text)
        inner = self.list_of(lambda: self.block(depth - 1)) if depth else self.text
        return self.object(
            {
                "type": self.one_of(*BLOCKS),
                **texts,
                "source": self.source,
                "input": lambda: {"a": self.wild()},
            },
            {
                "content": inner,
                "is_error": self.one_of(True, False),
                "signature": self.one_of("hidden:eA==", "hidden:/w==", "x"),
                "cache_control": self.wild,
            },
        )

    def part(self) -> dict[str, Any]:
        """Draws the content of an item."""
        image = self.one_of("data:image/png;base64,AA", "http://[", "x")
        return self.object({"type": self.one_of(*PARTS), "text": self.text}, {"image_url": image})

    def item(self) -> dict[str, Any]:
        """Draws items of an input, with the fields of every kind."""
        texts = dict.fromkeys(("call_id", "name", "input"), self.text)
        content = self.one_of(self.text(), [self.part()])
        return self.object(
            {"type": self.one_of(*ITEMS), "role": self.one_of(*ROLES), "content": content, **texts},
            {
                "id": self.text,
                "namespace": self.text,
                "arguments": self.one_of("{}", "{", '{"a": "\\ud800"}', "[]", ""),
                "output": content,
                "summary": self.list_of(self.part),
                "encrypted_content": self.one_of("dGhvdWdodDp4", "/w==", "%"),
                "tools": self.list_of(self.tool),
            },
        )

    def tool(self) -> dict[str, Any]:
        """Draws tools in the shapes of all APIs at once."""
        schema = self.one_of(SCHEMA, {"type": "nothing"}, {"$ref": "#/x"})
        function = {"name": self.one_of("f", "g"), "description": self.text, "parameters": schema}
        return self.object(
            {"type": self.one_of("function", "function", "custom", "namespace", "web_search"), **function},
            {
                "function": lambda: self.object(function, {}),
                "input_schema": schema,
                "format": self.wild,
                "tools": self.list_of(lambda: self.object({"type": self.one_of("function"), **function}, {})),
            },
        )

    def message(self) -> dict[str, Any]:
        """Draws thinking switches, Anthropic's and Ollama's."""
        call = {"function": {"name": "f", "arguments": {"a": self.text()}}}
        return self.object(
            {"role": self.one_of(*ROLES[:3]), "content": self.one_of(self.text(), [self.block()], "x")},
            {
                "images": self.list_of(self.text),
                "tool_calls": self.list_of(lambda: call),
                "thinking": self.text,
            },
        )

    def body(self, path: str) -> dict[str, Any]:
        """Draws a body for this path."""
        form = {"type": "json_schema", "schema": SCHEMA}
        anything: dict[str, Make] = {
            "temperature": self.one_of(0, 0.5),
            "top_p": self.one_of(0, 0.5),
            "stream": self.one_of(True, False),
            "tools": self.list_of(self.tool),
            "tool_choice": self.one_of(*CHOICES),
            "system": self.one_of(self.text(), [{"type": "text", "text": self.text()}]),
            "thinking": self.one_of({"type": "enabled", "budget_tokens": 9}, {"type": "disabled"}),
            "stop_sequences": self.list_of(self.text),
            "metadata": self.one_of({"user_id": self.text()}, {"k": "v"}),
            "output_config": self.one_of(
                {"effort": "low"}, {"format": {"type": "json_schema", "schema": SCHEMA}}
            ),
            "instructions": self.text,
            "previous_response_id": self.text,
            "max_output_tokens": self.one_of(1, 9, 10**6),
            "text": self.one_of({"format": {**form, "name": "a"}}, {}),
            "reasoning": self.one_of({"effort": "low", "summary": "auto"}, {"effort": self.text()}),
            "include": self.list_of(self.one_of("reasoning.encrypted_content", self.text())),
            "store": self.one_of(True, False),
            "options": self.one_of(
                {"num_predict": self.wild(), "stop": self.text()}, {"top_k": 3, "seed": -1}
            ),
            "think": self.one_of(True, False, "low", "none", self.text()),
            "format": self.one_of("", "json", SCHEMA, self.text()),
            "logprobs": self.one_of(True, False),
            "top_logprobs": self.one_of(0, 2, 21),
            "suffix": self.text,
            "raw": self.one_of(True, False),
            "images": self.list_of(self.text),
        }
        needed: dict[str, Make] = {
            "model": self.one_of(MODEL),
            "messages": self.list_of(self.message),
            "max_tokens": self.one_of(1, 9, 10**6),
            "input": self.one_of(self.text(), [self.item() for _ in range(3)]),
            "prompt": self.text,
        }
        own = {
            "/v1/responses": ("model", "input"),
            "/api/generate": ("model", "prompt"),
            "/api/show": ("model",),
        }
        names = own.get(path, ("model", "messages", "max_tokens"))
        return self.object({name: needed[name] for name in names}, anything)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentGateway]:
    """A gateway whose model always thinks and calls, with halves of surrogate pairs."""
    with agent_gateway(tmp_path_factory.mktemp("fuzz")) as running:
        call = '<tool_call>\n{"name": "f", "arguments": {"input": "\\ud800"}}\n</tool_call>'
        running.engine.script = Script(text=f"<think>\nx\n</think>\n\ny{call}")
        yield running


def check(path: str, response: httpx.Response, content: bytes) -> bool:
    """Returns whether it is answered; a refusal has the shape of the API, and no stream fails."""
    assert response.status_code < 500, (response.text, content)
    if response.status_code >= 400:
        error = response.json()["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert isinstance(message, str)
        assert message
        assert (response.json().get("type") == "error") == path.startswith("/v1/messages")
        return False
    if response.headers["content-type"] != "application/json":
        failures = ("event: error", "response.failed", '{"error":')
        assert not any(text in response.text for text in failures), (response.text, content)
    return True


@pytest.mark.parametrize(
    "path",
    ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/api/chat", "/api/generate", "/api/show"],
)
def test_no_field_makes_the_apis_fail(gateway: AgentGateway, path: str) -> None:
    """Any JSON value in any field of any item, block or message; a good part of the bodies is answered."""
    answered = 0
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for seed in range(CASES):
            content = json.dumps(Fuzzer(seed).body(path)).encode()
            answered += check(path, client.post(path, content=content), content)
    assert answered >= CASES // 10, f"only {answered} of {CASES} were good"
