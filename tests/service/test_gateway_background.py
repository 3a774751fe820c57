"""Guards background responses, conversations and compaction as the openai client uses them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moebius.network.api_keys import KeyLimits, add_key
from tests.helpers.agent_gateway import GREEDY, THOUGHT, AgentGateway, agent_gateway
from tests.helpers.fake_engine import MODEL, Script
from tests.helpers.waiting import wait_until


def ended(client: openai.OpenAI, response_id: str) -> Any:
    """A background response once it has its end."""
    wait_until(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(response_id)


def test_background(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """A response is queued at once, in progress while it is generated, then as any other."""
    held = threading.Event()
    gateway.says(GREEDY, held=held)
    response = client.responses.create(model=MODEL, input="Tell me.", background=True, temperature=0)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    while (found := client.responses.retrieve(response.id)).status == "queued":
        time.sleep(0.02)
    assert found.status == "in_progress"
    held.set()
    found = ended(client, response.id)
    assert (found.status, found.output_text) == ("completed", GREEDY)
    assert found.usage is not None
    client.responses.create(model=MODEL, input="More.", previous_response_id=response.id)
    assert GREEDY in gateway.prompt()
    assert client.responses.cancel(response.id).status == "completed"


def test_a_stream_is_resumed(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """A client that leaves a background stream reads on behind the last event that it had, also later."""
    gateway.says(f"{THOUGHT}{GREEDY}", delay_s=0.02)
    stream = client.responses.create(model=MODEL, input="x", background=True, stream=True)
    first = [event for _, event in zip(range(5), stream, strict=False)]
    stream.close()
    created: Any = first[0]
    response_id = created.response.id
    assert created.type == "response.created"
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=first[-1].sequence_number))
    assert not gateway.engine.seen.cancelled.is_set()
    assert rest[-1].type == "response.completed"
    numbers = [event.sequence_number for event in [*first, *rest]]
    assert numbers == list(range(len(numbers)))
    again = list(client.responses.retrieve(response_id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in [*first, *rest]]
    assert ended(client, response_id).output_text == GREEDY


def test_cancel(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """Cancelling ends the engine's work; the response keeps the items that were complete."""
    gateway.says(f"{THOUGHT}{GREEDY * 9}", delay_s=0.05)
    response = client.responses.create(model=MODEL, input="x", background=True)
    while client.responses.retrieve(response.id).status == "queued":
        time.sleep(0.02)
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert gateway.engine.seen.cancelled.wait(60)
    assert client.responses.retrieve(response.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"


def test_a_failure_is_the_responses_end(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """A failure of the engine is the response's end, and its stream's."""
    gateway.engine.script = Script(fail_after=3)
    response = client.responses.create(model=MODEL, input="x", background=True)
    failed = ended(client, response.id)
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    events = list(client.responses.retrieve(response.id, stream=True))
    assert events[-1].type == "response.failed"


def test_a_refusal_is_answered_at_once(client: openai.OpenAI) -> None:
    """What is wrong with a request is said when it is sent, not later."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", background=True, store=False)
    assert caught.value.param == "background"
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="x", background=True, max_output_tokens=100_000)


def test_only_background_responses_are_streamed_again(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """Other responses have no stored events; their ids and cursors are checked."""
    response = client.responses.create(model=MODEL, input="x")
    url = f"{gateway.url}/v1/responses/{response.id}"
    assert httpx.get(url, params={"stream": "true"}).json()["error"]["param"] == "stream"
    assert httpx.get(url, params={"starting_after": "x"}).status_code == 400


def test_a_lost_process_fails_its_responses(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response whose process has ended is failed for another gateway that is asked, and its stream ends."""
    monkeypatch.setattr("gateway.apis.response_events._LOST_S", 0.0)
    shared = str(tmp_path_factory.mktemp("shared"))
    with agent_gateway(tmp_path_factory.mktemp("lost"), stored_responses_dir=shared) as gateway:
        gateway.says(GREEDY * 9, delay_s=0.2)
        client = gateway.client()
        response = client.responses.create(model=MODEL, input="x", background=True)
        found = client.responses.retrieve(response.id)
        assert found.error is not None
        assert (found.status, found.error.code) == ("failed", "server_error")
        list(client.responses.retrieve(response.id, stream=True))


def test_two_gateways_share_background_responses(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any gateway of a store streams and cancels what another one generates."""
    shared = str(tmp_path_factory.mktemp("shared"))
    with (
        agent_gateway(tmp_path_factory.mktemp("one"), stored_responses_dir=shared) as one,
        agent_gateway(tmp_path_factory.mktemp("two"), stored_responses_dir=shared) as two,
    ):
        clients = [each.client() for each in (one, two)]
        one.says(GREEDY, delay_s=0.05)
        response = clients[0].responses.create(model=MODEL, input="x", background=True)
        events = list(clients[1].responses.retrieve(response.id, stream=True))
        assert events[-1].type == "response.completed"
        one.says(GREEDY * 9, delay_s=0.2)
        response = clients[0].responses.create(model=MODEL, input="x", background=True)
        assert clients[1].responses.cancel(response.id).status == "cancelled"
        assert one.engine.seen.cancelled.wait(60)


def test_conversations(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """Items and metadata come and go; a response goes on from a conversation and adds to it, once."""
    made = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "I am Ada."}], metadata={"topic": "x"}
    )
    gateway.says("Hello Ada.")
    response = client.responses.create(model=MODEL, input="Who am I?", conversation=made.id)
    assert response.conversation is not None
    assert response.conversation.id == made.id
    assert "I am Ada." in gateway.prompt()
    gateway.says("Ada.")
    background = client.responses.create(
        model=MODEL, input="Sure?", conversation={"id": made.id}, background=True
    )
    ended(client, background.id)
    assert "Hello Ada." in gateway.prompt()
    items = client.conversations.items
    found: list[Any] = list(items.list(made.id, order="asc", limit=2))
    texts = [item.content[0].text for item in found]
    assert texts == ["I am Ada.", "Who am I?", "Hello Ada.", "Sure?", "Ada."]
    added = items.create(made.id, items=[{"type": "message", "role": "user", "content": "Bye."}])
    assert items.retrieve(added.data[0].id, conversation_id=made.id).type == "message"
    assert items.delete(added.data[0].id, conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        items.retrieve(added.data[0].id, conversation_id=made.id)
    assert client.conversations.update(made.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert client.conversations.retrieve(made.id).metadata == {"topic": "y"}
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.responses.create(
            model=MODEL, input="x", conversation=made.id, previous_response_id=response.id
        )
    assert client.conversations.delete(made.id).deleted
    for call in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.responses.create(model=MODEL, input="x", conversation=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    many: Any = [{"type": "message", "role": "user", "content": "x"}] * 21
    with pytest.raises(openai.BadRequestError, match="at most 20"):
        client.conversations.create(items=many)


def test_compaction(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """A conversation becomes its user's messages and a summary, which the model reads in later requests."""
    gateway.says(f"{THOUGHT}Ada asks for foxes.")
    history: Any = [
        {"type": "message", "role": "user", "content": "I am Ada."},
        {"type": "message", "role": "assistant", "content": "Hello Ada, of the long answer."},
    ]
    compacted = client.responses.compact(model=MODEL, input=history, instructions="Brief.")
    assert "of the long answer" in gateway.prompt()
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens > 0
    sent: Any = [item.to_dict(warnings=False) for item in compacted.output]
    gateway.says("Yes.")
    response = client.responses.create(
        model=MODEL, input=[*sent, {"type": "message", "role": "user", "content": "Go on."}]
    )
    prompt = gateway.prompt()
    for text in ("I am Ada.", "Ada asks for foxes.", "Go on."):
        assert text in prompt
    assert "of the long answer" not in prompt
    again = client.responses.compact(model=MODEL, previous_response_id=response.id)
    assert again.output[-1].type == "compaction"
    with pytest.raises(openai.BadRequestError, match="no message"):
        client.responses.compact(model=MODEL)


def test_keys_have_their_own_responses_and_conversations(tmp_path: Path) -> None:
    """A key finds no response or conversation of another by its id: not to read, continue, refer to, cancel,
    change or delete; its own stay as they are."""
    keys = tmp_path / "keys"
    one, two = (add_key(str(keys), name, KeyLimits()) for name in ("one", "two"))
    with agent_gateway(tmp_path, api_key_file=str(keys)) as gateway:
        mine, other = (gateway.client(key) for key in (one, two))
        gateway.says(GREEDY)
        secret: Any = {"type": "message", "role": "user", "content": "secret"}
        talk = mine.conversations.create(items=[secret])
        first = mine.responses.create(model=MODEL, input="Hi", conversation=talk.id)
        later = ended(mine, mine.responses.create(model=MODEL, input="secret", background=True).id)
        reference: Any = [{"type": "item_reference", "id": first.output[0].id}]
        item = mine.conversations.items.list(talk.id).data[0].id
        assert item is not None
        gateway.engine.reset()
        for refused in (
            lambda: other.responses.retrieve(first.id),
            lambda: other.responses.retrieve(later.id, stream=True),
            lambda: other.responses.input_items.list(first.id),
            lambda: other.responses.cancel(later.id),
            lambda: other.responses.delete(first.id),
            lambda: other.responses.create(model=MODEL, input="x", previous_response_id=first.id),
            lambda: other.responses.create(model=MODEL, input=reference),
            lambda: other.responses.create(model=MODEL, input="x", conversation=talk.id),
            lambda: other.conversations.retrieve(talk.id),
            lambda: other.conversations.update(talk.id, metadata={"a": "b"}),
            lambda: other.conversations.items.list(talk.id),
            lambda: other.conversations.items.create(talk.id, items=[secret]),
            lambda: other.conversations.items.delete(item, conversation_id=talk.id),
            lambda: other.conversations.delete(talk.id),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        assert not gateway.engine.seen.requests
        assert len(mine.conversations.items.list(talk.id).data) == 3
        mine.responses.create(model=MODEL, input=reference, previous_response_id=later.id)
        assert "secret" in gateway.prompt()
        assert [event.type for event in mine.responses.retrieve(later.id, stream=True)][-1] == (
            "response.completed"
        )
