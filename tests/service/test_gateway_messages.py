"""Guards what Anthropic's own client and Claude Code see of the gateway, in front of a scripted engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from tests.helpers.agent_gateway import TEMPLATE, THOUGHT, AgentGateway, agent_gateway
from tests.helpers.fake_engine import CONTEXT, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.lazy import lazy
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from tests.helpers.waiting import wait_until

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = lazy("anthropic")

MODEL = "claude-of-tests"  # an alias; of published names the SDK deprecates one after another
HELLO: Any = [{"role": "user", "content": "Tell me of the fox."}]
GREEDY = "The quick brown fox jumps over the lazy dog."


@dataclass
class Setup:
    """Gateway and engine; filled by the fixture."""

    url: str
    engine: FakeEngine

    @property
    def client(self) -> anthropic.Anthropic:
        """Returns a client that shows errors instead of retrying."""
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """Shared by this file; pings come later than any answer of a busy machine."""
    directory = tmp_path_factory.mktemp("messages")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    address = f"unix:{directory}/engine.sock"
    engine = FakeEngine(directory, tokenizer)
    with (
        serving(engine, address),
        running_gateway(gateway_config(address, sse_keepalive_s=4.0)) as url,
    ):
        yield Setup(url, engine)


@pytest.fixture
def setup(running: Setup) -> Setup:
    """Returns the shared servers with a fresh record."""
    running.engine.reset()
    return running


def test_message(setup: Setup) -> None:
    """A whole message by the name that was asked for, here an alias; an id for support is in the header."""
    answer = setup.client.messages.create(
        model=MODEL, max_tokens=100, messages=HELLO, extra_body={"temperature": 0}, system="Be brief."
    )
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": GREEDY}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    sent = setup.engine.seen.requests[0]
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == len(
        sent.tokenized.input_ids
    )
    assert sent.request_id == answer.id
    assert answer._request_id


def test_stream_builds_the_same_message(setup: Setup) -> None:
    """The client's own accumulation of the events is the message that is not streamed."""
    settings: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 100,
        "messages": HELLO,
        "extra_body": {"temperature": 0},
    }
    whole = setup.client.messages.create(**settings)
    with setup.client.messages.stream(**settings) as stream:
        kinds = [event.type for event in stream]
        built = stream.get_final_message()
    assert [block.to_dict() for block in built.content] == [{"type": "text", "text": GREEDY}]
    assert (built.stop_reason, built.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_stop_sequence_and_limit(setup: Setup) -> None:
    """A stop sequence is named; a limit beyond the context is cut to what there is room for."""
    answer = setup.client.messages.create(
        model=MODEL, max_tokens=50, messages=HELLO, extra_body={"temperature": 0}, stop_sequences=["jumps"]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "jumps")
    setup.client.messages.create(
        model=MODEL, max_tokens=32_000, messages=HELLO, extra_body={"temperature": 0}
    )
    sent = setup.engine.seen.requests[-1]
    assert sent.sampling_params.max_tokens == CONTEXT - len(sent.tokenized.input_ids)
    short = setup.client.messages.create(
        model=MODEL, max_tokens=3, messages=HELLO, extra_body={"temperature": 0}
    )
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)


def test_prefill_is_continued(setup: Setup) -> None:
    """The prompt ends with the assistant's words."""
    messages: Any = [*HELLO, {"role": "assistant", "content": "The fox"}]
    setup.client.messages.create(model=MODEL, max_tokens=9, messages=messages)
    ids = list(setup.engine.seen.requests[0].tokenized.input_ids)
    assert setup.engine._tokenizer.decode(ids, skip_special_tokens=False).endswith("assistant\nThe fox")


def test_count_tokens(setup: Setup) -> None:
    """The count is the length of the prompt that the same messages make; the engine is not asked."""
    counted = setup.client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
    assert setup.engine.seen.requests == []
    setup.client.messages.create(model=MODEL, max_tokens=9, messages=HELLO, system="Be brief.")
    assert counted.input_tokens == len(setup.engine.seen.requests[0].tokenized.input_ids)


def test_refusals_are_anthropics(setup: Setup) -> None:
    """The client raises its own errors: bad fields, unknown models, too long prompts, unknown paths."""
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        setup.client.messages.create(model=MODEL, max_tokens=0, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as caught:
        setup.client.messages.create(model="gpt-9", max_tokens=9, messages=HELLO)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    long: Any = [{"role": "user", "content": "fox " * 4000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        setup.client.messages.create(model=MODEL, max_tokens=9, messages=long)
    answer = httpx.post(f"{setup.url}/v1/messages/batches", json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    answer = httpx.post(f"{setup.url}/v1/messages", content=b"{")
    assert (answer.status_code, answer.json()["type"]) == (400, "error")


@pytest.mark.parametrize(
    ("code", "status"),
    [(grpc.StatusCode.RESOURCE_EXHAUSTED, 429), (grpc.StatusCode.UNAVAILABLE, 529)],
)
def test_overload(setup: Setup, code: grpc.StatusCode, status: int) -> None:
    """Too many requests and an engine that is away are what Anthropic's clients wait for and try again."""
    setup.engine.script = Script(fail_after=0, fail_code=code)
    body = {"model": MODEL, "max_tokens": 9, "messages": HELLO, "stream": True}
    answer = httpx.post(f"{setup.url}/v1/messages", json=body)
    assert answer.status_code == status
    assert answer.headers["Retry-After"]


def test_failure_in_a_stream(setup: Setup) -> None:
    """A failure after the first content is an error event, which the client raises."""
    setup.engine.script = Script(fail_after=3)
    with (
        pytest.raises(anthropic.APIError, match="scripted"),
        setup.client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream,
    ):
        list(stream)


def test_silence_is_filled_with_pings(setup: Setup) -> None:
    """While nothing comes, ping events do, also before the message begins."""
    held = threading.Event()
    setup.engine.script = Script(held=held, held_from=0, token_ids=[60, 61])
    body = {"model": MODEL, "max_tokens": 9, "messages": HELLO, "stream": True}
    names = []
    with httpx.stream("POST", f"{setup.url}/v1/messages", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            names += [line[7:]] if line.startswith("event: ") else []
            if names:
                held.set()
    assert names[0] == "ping"
    assert names[-1] == "message_stop"


def test_leaving_cancels(setup: Setup) -> None:
    """A client that leaves a stream ends the engine's work."""
    setup.engine.script = Script(held=threading.Event())
    with setup.client.messages.stream(model=MODEL, max_tokens=200, messages=HELLO) as stream:
        next(iter(stream.text_stream))
    assert setup.engine.seen.cancelled.wait(60)


def test_metrics_count_messages(setup: Setup) -> None:
    """A message is counted like a chat."""

    def finished() -> float:
        text = httpx.get(f"{setup.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    before = finished()
    setup.client.messages.create(model=MODEL, max_tokens=9, messages=HELLO)
    wait_until(lambda: finished() == before + 1)


def test_conversations_that_the_server_would_keep_are_refused(setup: Setup) -> None:
    """`thread` would leave out the history: a 400 by whose code the client's tool runner sends all of it."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(anthropic.BadRequestError) as caught:
            setup.client.messages.create(
                model=MODEL, max_tokens=10, messages=HELLO, extra_body={"thread": thread}
            )
        body: Any = caught.value.body
        assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}
    assert setup.engine.seen.requests == []


WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALLS = (
    f"{THOUGHT}Let me look.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentGateway]:
    """A gateway whose model thinks and calls tools."""
    with agent_gateway(tmp_path_factory.mktemp("agent")) as running:
        yield running


def test_agent_loop(agent: AgentGateway) -> None:
    """Thoughts and calls are streamed, and go back with what the tools gave, as Claude Code works."""
    client = anthropic.Anthropic(base_url=agent.url, api_key="none", max_retries=0, timeout=60)
    settings: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 32_000,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "enabled", "budget_tokens": 4000},
        "metadata": {"user_id": "someone"},
        "extra_headers": {"anthropic-beta": "interleaved-thinking-2025-05-14"},
        "extra_body": {"context_management": {"edits": []}},
    }
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    agent.says(CALLS)
    with client.messages.stream(messages=messages, **settings) as stream:
        first = stream.get_final_message()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Zürich"}, {"city": "Rome"}]
    assert first.usage.output_tokens_details is not None
    assert first.usage.output_tokens_details.thinking_tokens > 0
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"Sunny {number}"}
        for number, call in enumerate(calls)
    ]
    messages += [
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": results},
    ]
    agent.says("It is sunny.")
    second = client.messages.create(messages=messages, **settings)
    assert [block.to_dict() for block in second.content] == [{"type": "text", "text": "It is sunny."}]
    prompt = agent.prompt()
    for part in (
        "Be brief.",
        "Weather?",
        "The fox wants\n the",
        '"Zürich"',
        "tool\nSunny 0",
        "tool\nSunny 1",
    ):
        assert part in prompt
    assert "</think>\n\n" not in prompt[-20:]


def test_forced_calls_are_constrained(agent: AgentGateway) -> None:
    """Any tool and one tool reach the engine as grammars; without thinking the prompt closes the thought."""
    client = anthropic.Anthropic(base_url=agent.url, api_key="none", max_retries=0, timeout=60)
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "get_weather"}]
    for choice in choices:
        agent.says(CALLS.partition("\n\n")[2])
        answer = client.messages.create(
            model=MODEL, max_tokens=500, messages=HELLO, tools=[WEATHER], tool_choice=choice
        )
        assert answer.stop_reason == "tool_use"
        assert agent.engine.seen.requests[0].HasField("constraint")
        assert agent.prompt().endswith("</think>\n\n")


def test_instructions_in_the_course_of_a_conversation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where the template takes instructions at the beginning only, later ones are the user's words."""
    directory = tmp_path_factory.mktemp("late")
    messages = [*HELLO, {"role": "assistant", "content": "Yes?"}, {"role": "system", "content": "Be kind."}]
    body = {"model": MODEL, "max_tokens": 9, "system": "Brief.", "messages": [*messages, *HELLO]}
    refusing = TEMPLATE.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('only at the beginning') }}{% endif %}",
    )
    for template, role in ((TEMPLATE, "system"), (refusing, "user")):
        with agent_gateway(directory, template=template) as running:
            answer = httpx.post(f"{running.url}/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            assert f"<|start|>{role}\nBe kind.<|end|>" in running.prompt()
            counted = httpx.post(f"{running.url}/v1/messages/count_tokens", json=body).json()["input_tokens"]
            assert counted == len(running.engine.seen.requests[-1].tokenized.input_ids)
