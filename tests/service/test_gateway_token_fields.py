"""Guards the fields about tokens: ids, log-probabilities of prompts and of named tokens, cut-off prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.helpers.fake_engine import CONTEXT, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
TEMPLATE = (
    "{% for d in documents or [] %}{{ d.text }};{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|start|>{{ message.role }} {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)
CHAT = {"messages": [{"role": "user", "content": "The fox"}], "max_tokens": 6}
TEXT = {"prompt": "The dog", "max_tokens": 6}


@dataclass
class Served:
    """Filled by the fixture."""

    url: str
    engine: FakeEngine
    tokenizer: Tokenizer

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole answer."""
        response = httpx.post(f"{self.url}/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the objects of a stream."""
        response = httpx.post(f"{self.url}/v1/{path}", json={**body, "stream": True})
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def refusal(self, path: str, body: dict[str, Any]) -> str:
        """Returns the parameter that a 400 names."""
        response = httpx.post(f"{self.url}/v1/{path}", json=body)
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["param"])

    def sent(self) -> Any:
        """Returns the last request that reached the engine."""
        return self.engine.seen.requests[-1]

    def ids(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model with tokens to fill in the middle."""
    directory = tmp_path_factory.mktemp("tokens")
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in FIM])
    write_tokenizer(directory, tokenizer, TEMPLATE)
    address = f"unix:{directory}/engine.sock"
    engine = FakeEngine(directory, tokenizer)
    with serving(engine, address), running_gateway(gateway_config(address)) as url:
        yield Served(url, engine, tokenizer)


@pytest.fixture
def served(running: Served) -> Served:
    """Returns the gateway with a fresh record."""
    running.engine.reset()
    return running


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", TEXT)])
def test_token_ids_of_streams_are_those_of_the_whole(served: Served, path: str, body: dict[str, Any]) -> None:
    """Prompt ids once, output ids in pieces that concatenate; unfinished characters hold none back."""
    served.engine.script = Script(text="über 東京 😀 fox")
    body = {**body, "max_tokens": 60, "return_token_ids": True}
    whole = served.post(path, body)
    ids = [*served.ids("über 東京 😀 fox"), 2]
    holder = whole if path.startswith("chat") else whole["choices"][0]
    assert holder["prompt_token_ids"] == list(served.sent().tokenized.input_ids)
    assert whole["choices"][0]["token_ids"] == ids
    for interval in (1, 3, 1000):
        chunks = served.chunks(path, {**body, "stream_interval": interval})
        holders = chunks if path.startswith("chat") else [chunk["choices"][0] for chunk in chunks]
        assert [h["prompt_token_ids"] for h in holders if "prompt_token_ids" in h] == [
            holder["prompt_token_ids"]
        ]
        assert "prompt_token_ids" in holders[0]
        pieces = [c["token_ids"] for chunk in chunks for c in chunk["choices"] if "token_ids" in c]
        assert [token for piece in pieces for token in piece] == ids
        if interval > 1:
            assert len(pieces[0]) == 1, "the first chunk comes at once"
            assert all(len(piece) == interval for piece in pieces[1:-1])
    plain = served.post(path, {**body, "return_token_ids": None})
    assert plain["choices"][0]["token_ids"] is None
    holder = plain if path.startswith("chat") else plain["choices"][0]
    assert (holder["prompt_token_ids"], holder["prompt_logprobs"]) == (None, None)


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", TEXT)])
def test_prompt_logprobs_have_a_row_per_prompt_token(served: Served, path: str, body: dict[str, Any]) -> None:
    """Null for the first token; of the others itself and the likeliest, by id."""
    whole = served.post(path, {**body, "prompt_logprobs": 2})
    holder = whole if path.startswith("chat") else whole["choices"][0]
    prompt = list(served.sent().tokenized.input_ids)
    rows = holder["prompt_logprobs"]
    assert (len(rows), rows[0]) == (len(prompt), None)
    for token, row in zip(prompt[1:], rows[1:], strict=True):
        assert (len(row), row[str(token)]["rank"]) == (2, 1)
        assert set(row[str(token)]) == {"logprob", "rank", "decoded_token"}
    assert [row[str(t)]["logprob"] for t, row in zip(prompt[1:], rows[1:], strict=True)] == [-0.25] * (
        len(prompt) - 1
    )
    assert served.refusal(path, {**body, "prompt_logprobs": 1, "stream": True}) == "prompt_logprobs"
    assert served.refusal(path, {**body, "prompt_logprobs": -2}) == "prompt_logprobs"


def test_named_tokens_are_scored_and_tokens_named_by_id(served: Served) -> None:
    """`logprob_token_ids` replace the likeliest; `return_tokens_as_token_ids` names every token by its id."""
    served.engine.script = Script(token_ids=[30, 31])
    body = {**CHAT, "logprobs": True, "logprob_token_ids": [7, 9], "return_tokens_as_token_ids": True}
    content = served.post("chat/completions", body)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["token_id:30", "token_id:31"]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in content] == [
        [f"token_id:{sampled}", "token_id:7", "token_id:9"] for sampled in (30, 31)
    ]
    assert (
        served.sent().sampling_params.logprobs,
        list(served.sent().sampling_params.logprob_token_ids),
    ) == (
        0,
        [7, 9],
    )
    text = served.post(
        "completions", {**TEXT, "logprobs": 1, "logprob_token_ids": [7], "return_tokens_as_token_ids": True}
    )["choices"][0]["logprobs"]
    assert text["tokens"] == ["token_id:30", "token_id:31"]
    assert [set(row) for row in text["top_logprobs"]] == [
        {"token_id:7", "token_id:30"},
        {"token_id:7", "token_id:31"},
    ]
    assert served.refusal("chat/completions", {**CHAT, "logprob_token_ids": [1]}) == "logprob_token_ids"
    assert served.refusal("completions", {**TEXT, "logprob_token_ids": [1]}) == "logprob_token_ids"


def test_allowed_ids_and_bad_words_reach_the_engine(served: Served) -> None:
    """Words as they are spelled at a text's beginning and after a space; ids within the vocabulary."""
    served.post("completions", {**TEXT, "allowed_token_ids": [5, 6], "bad_words": ["fox", " fox", "dog"]})
    params = served.sent().sampling_params
    assert list(params.allowed_token_ids) == [5, 6]
    expected = [served.ids(text) for text in ("fox", " fox", "dog", " dog")]
    assert [list(sequence.token_ids) for sequence in params.bad_words] == expected
    for name, value in [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [99_999]),
        ("bad_words", ["x" * 257]),
        ("bad_words", [""]),
        ("bad_words", [f"{number} " * 60 for number in range(256)]),
    ]:
        assert served.refusal("completions", {**TEXT, name: value}).startswith(name)


def test_the_likeliest_of_more_outputs_are_given(served: Served) -> None:
    """`best_of` outputs are made; the answer has the `n` of the highest mean log-probability, best first."""
    served.engine.script = Script(logprobs=(-3.0, -1.0, -2.0))
    body = {**TEXT, "prompt": ["The", "A"], "best_of": 3, "n": 2, "seed": 5, "return_token_ids": True}
    answer = served.post("completions", body)
    everything = served.post("completions", {**body, "n": 3})["choices"]
    ids = [choice["token_ids"] for choice in answer["choices"]]
    made = [choice["token_ids"] for choice in everything]
    assert ids == [made[1], made[2], made[4], made[5]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == sum(map(len, made))
    assert served.refusal("completions", {**TEXT, "best_of": 1, "n": 2}) == "best_of"
    assert served.refusal("completions", {**TEXT, "best_of": 2, "stream": True}) == "best_of"
    assert served.post("completions", {**TEXT, "best_of": 1})["choices"][0]["index"] == 0


def test_a_suffix_is_written_as_the_model_was_trained(served: Served) -> None:
    """Prefix and suffix between the model's tokens; what users type of those is text where they say so."""
    served.post("completions", {**TEXT, "prompt": "def f(", "suffix": "): pass"})
    added = [served.tokenizer.token_to_id(text) for text in FIM]
    expected = [added[0], *served.ids("def f("), added[1], *served.ids("): pass"), added[2]]
    assert list(served.sent().tokenized.input_ids) == expected
    typed = {"prompt": FIM[1], "suffix": "x", "parse_special": False}
    served.post("completions", {**TEXT, **typed})
    assert list(served.sent().tokenized.input_ids).count(added[1]) == 1
    echoed = served.post("completions", {**TEXT, "prompt": "def", "suffix": ")", "echo": True})
    assert echoed["choices"][0]["text"].startswith("def")
    assert served.refusal("completions", {**TEXT, "prompt": [1, 2], "suffix": "x"}) == "suffix"
    assert served.refusal("chat/completions", {**CHAT, "suffix": "x"}) == "suffix"


def test_chat_echoes_the_message_that_goes_on(served: Served) -> None:
    """The final message of the assistant is the text's beginning, in streams too; another's is not."""
    served.engine.script = Script(text=" fox")
    goes_on = {
        "messages": [*CHAT["messages"], {"role": "assistant", "content": "The quick"}],  # type: ignore[misc]
        "continue_final_message": True,
        "max_tokens": 20,
        "echo": True,
    }
    assert served.post("chat/completions", goes_on)["choices"][0]["message"]["content"] == "The quick fox"
    pieces = [c["choices"][0]["delta"].get("content", "") for c in served.chunks("chat/completions", goes_on)]
    assert "".join(pieces) == "The quick fox"
    answer = served.post("chat/completions", {**CHAT, "max_tokens": 20, "echo": True, "logprobs": True})
    assert answer["choices"][0]["message"]["content"] == " fox"


def test_prompts_are_cut_off_where_that_is_asked_for(served: Served) -> None:
    """Prompts lose their left end unless `truncation_side` says otherwise; -1 cuts off what does not fit."""
    text = "fox dog hill " * 200
    ids = served.ids(text)
    assert served.refusal("completions", {**TEXT, "prompt": text}) == "prompt"
    for sent in (text, ids):
        body = {**TEXT, "prompt": sent, "truncate_prompt_tokens": 10}
        served.post("completions", body)
        assert list(served.sent().tokenized.input_ids) == ids[-10:]
        served.post("completions", {**body, "truncation_side": "right"})
        assert list(served.sent().tokenized.input_ids) == ids[:10]
    served.post("completions", {**TEXT, "prompt": text, "truncate_prompt_tokens": -1, "max_tokens": 1})
    assert list(served.sent().tokenized.input_ids) == ids[-(CONTEXT - 1) :]
    assert served.refusal("completions", {**TEXT, "truncate_prompt_tokens": 0}) == "prompt"


def test_documents_and_special_tokens_of_chat_reach_the_prompt(served: Served) -> None:
    """The template writes documents; control tokens typed in them are text."""
    served.post("chat/completions", {**CHAT, "documents": [{"text": "hill<|end|>"}]})
    ids = list(served.sent().tokenized.input_ids)
    assert served.tokenizer.decode(ids, skip_special_tokens=False).startswith("hill<|end|>;<|start|>user")
    assert ids.count(2) == 1


def test_without_detokenising_there_are_ids_and_no_text(served: Served) -> None:
    """The text is empty and the ids are all there; a stop string, which needs text, is refused."""
    served.engine.script = Script(token_ids=[30, 31, 2])
    body = {**TEXT, "detokenize": False, "return_token_ids": True}
    choice = served.post("completions", body)["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [30, 31, 2], "stop")
    assert served.refusal("completions", {**body, "stop": "x"}) == "stop"


def test_conversations_are_tokenised_as_chat_prompts_are(served: Served) -> None:
    """The ids of /tokenize are those the engine gets, with tools, documents and a message that goes on."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    history = [*CHAT["messages"], {"role": "assistant", "content": "The"}]  # type: ignore[misc]
    for more in (
        {},
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": "none"},
        {"messages": history, "continue_final_message": True},
        {"documents": [{"text": "x"}], "add_generation_prompt": False},
    ):
        body = {"messages": CHAT["messages"], **more}
        served.post("chat/completions", {**body, "max_tokens": 1})
        counted = served.post("tokenize", body)
        assert counted["tokens"] == list(served.sent().tokenized.input_ids), more
        assert counted["count"] == len(counted["tokens"])
    assert served.refusal("tokenize", {"messages": CHAT["messages"], "tools": [{"type": "function"}]})


def test_an_echo_shows_special_tokens_where_its_offsets_say(served: Served) -> None:
    """An echo also shows a prompt that came as ids; texts and offsets agree on what a special token
    is long.
    """
    served.engine.script = Script(text=" fox")
    body = {**TEXT, "prompt": [1, 1, *served.ids("The")], "echo": True, "logprobs": 0, "max_tokens": 1}
    choice = served.post("completions", body)["choices"][0]
    start = "<|start|><|start|>The"
    assert choice["text"].startswith(start)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:3] == [0, 9, 18]
    assert offsets[len(body["prompt"])] == len(start)  # type: ignore[arg-type]
