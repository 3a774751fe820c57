"""Guards that whatever a client sends is answered below 500: fields of every kind, and bytes of any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.schemas.common import NEUTRAL_VALUES
from gateway.schemas.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.helpers.fake_engine import MODEL, FakeEngine, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import BOS, EOS, byte_level_tokenizer, write_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}{{ m.name }}: {{ m.content | trim }}"
    "{{ m.reasoning_content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{{ mood }}{% for key, value in (vary or {}).items() %}{{ key * 2 }}{{ value + 1 }}{% endfor %}"
)
# What parsers, templates, tokenizers and single precision stumble over.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2**31 - 1, 2**31, 2**63, -(2**63) - 1, 10**400, 10**4299]),
    st.floats(),
    st.sampled_from([1e-300, 5e-324, 1e38, 1e39, -0.0]),
    st.text(st.characters(codec=None), max_size=8),
    st.sampled_from(
        ["\ud800", "\x00", "\ufdd0", "\u2028", "{}", "[" * 3000, '{"a": "\\ud800"}', BOS, EOS, "<"]
    ),
    st.sampled_from(["auto", "none", "user", "assistant", "text", "image_url", "data:image/png;base64,"]),
    st.sampled_from(
        ["http://[", "file:///etc/passwd", "https://\ud83d\x00", "1" * 5000, MODEL, "json_object"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.text(max_size=4), st.sampled_from(["7", "1" * 5000, "\udc00"])), inner),
    ),
    max_leaves=6,
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"])},
    optional={"text": SCALARS, "image_url": st.fixed_dictionaries({"url": SCALARS}), "detail": SCALARS},
)
CALLS = st.fixed_dictionaries(
    {"id": SCALARS, "function": st.fixed_dictionaries({"name": SCALARS, "arguments": SCALARS | VALUES})}
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
        optional={
            "content": st.text(max_size=20) | st.lists(PARTS, max_size=2) | VALUES,
            "tool_calls": st.lists(CALLS, max_size=2) | VALUES,
            **dict.fromkeys(("name", "reasoning_content", "reasoning", "tool_call_id", "more"), VALUES),
        },
    ),
    max_size=3,
)
PROMPTS = st.one_of(
    st.text(max_size=20), st.lists(st.text(max_size=9), max_size=3), st.lists(st.integers(0, 500), max_size=9)
)
# Values of which requests pass, so that what is behind validation is reached as well.
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just(MODEL),
    "messages": MESSAGES,
    "prompt": PROMPTS,
    "tokens": st.lists(st.integers(0, 500), max_size=9),
    "max_tokens": st.integers(0, 9),
    "temperature": st.floats(0, 2),
    "n": st.integers(1, 3),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 500).map(str), st.floats(-100, 100), max_size=3),
    "logprobs": st.booleans() | st.integers(0, 20),
    "top_logprobs": st.integers(0, 20),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["mood", "vary", "self", "range"]), VALUES),
    "stream": st.booleans(),
    "echo": st.booleans(),
}
PATHS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def bodies(schema: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Draws required fields, mostly valid; of the others a few, each valid or of any kind."""
    fields = {name: GOOD.get(name, VALUES) for name in schema.model_fields}
    required = {
        name: fields.pop(name) for name in ("model", "messages", "prompt", "tokens") if name in fields
    }
    if schema is TokenizeRequest:
        fields |= {name: required.pop(name) for name in ("messages", "prompt")}
    usual = st.fixed_dictionaries(required, optional=fields)
    names = st.sampled_from([*schema.model_fields, *sorted(NEUTRAL_VALUES), "unknown", "a[b]-c"])
    wrong = st.dictionaries(names, VALUES, max_size=2)
    return st.builds(lambda body, changes: {**body, **changes}, usual, wrong | st.just({}))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The URL of a gateway whose engine is scripted and whose template reads everything."""
    directory: Path = tmp_path_factory.mktemp("fuzz")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer, TEMPLATE)
    address = f"unix:{directory}/engine.sock"
    engine = FakeEngine(directory, tokenizer)
    with (
        serving(engine, address),
        running_gateway(gateway_config(address)) as url,
        httpx.Client(base_url=url, timeout=60) as connected,
    ):
        yield connected


def check(client: httpx.Client, path: str, content: bytes) -> None:
    """Sends one request: it is answered, or refused in OpenAI's shape; no failure within a stream either."""
    response = client.post(path, content=content)
    assert response.status_code < 500, (response.text, content)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["code"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in response.text, (response.text, content)


@given(data=st.data(), path=st.sampled_from(sorted(PATHS)))
@settings(max_examples=max(60, settings().max_examples))
def test_no_field_makes_the_gateway_fail(client: httpx.Client, data: st.DataObject, path: str) -> None:
    """Any JSON value in any field, alone and together with others."""
    body = data.draw(bodies(PATHS[path]))
    check(client, path, json.dumps(body).encode())


@given(data=st.data(), path=st.sampled_from(sorted(PATHS)))
def test_no_bytes_make_the_gateway_fail(client: httpx.Client, data: st.DataObject, path: str) -> None:
    """Bodies cut, or with bytes exchanged, and bytes that never were JSON."""
    good = json.dumps(data.draw(bodies(PATHS[path])), ensure_ascii=data.draw(st.booleans()))
    content = bytearray(good.encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    check(client, path, data.draw(st.sampled_from([bytes(content), data.draw(st.binary(max_size=20))])))
