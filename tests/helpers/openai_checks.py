"""What an openai client relies on, as functions of a base URL, for the fake engine and the real stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "Tell me of the fox and the dog."}]
PROMPT = "The quick brown fox"


def client_for(base_url: str, api_key: str = "none") -> openai.OpenAI:
    """Returns a client that shows errors instead of retrying; `base_url` is the server's root,
    without /v1.
    """
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=60)


def check_models(base_url: str, model: str) -> None:
    """The model is listed, can be retrieved, and says its context length."""
    client = client_for(base_url)
    assert [card.id for card in client.models.list()] == [model]
    card = client.models.retrieve(model)
    assert (card.object, card.owned_by) == ("model", "moebius")
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] > 1


def check_chat(base_url: str, model: str) -> None:
    """A whole answer has text, a finish reason and consistent token counts."""
    answer = client_for(base_url).chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, temperature=0
    )
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", model)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage is not None
    assert 1 <= usage.completion_tokens <= 8
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None


def check_chat_stream(base_url: str, model: str) -> None:
    """Chunks: role first, texts that join to the whole answer, the finish reason, then the usage."""
    client = client_for(base_url)
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    # The last one that has text may say why it ended, as vLLM's does.
    text = "".join(chunk.choices[0].delta.content or "" for chunk in (*middle, last))
    assert text == whole.choices[0].message.content
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert usage.choices == []
    assert usage.usage is not None
    assert whole.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def check_n(base_url: str, model: str) -> None:
    """n = 2 gives two numbered choices, streamed and not; both streams end."""
    client = client_for(base_url)
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, temperature=1, n=2, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, temperature=1, n=2, seed=3, stream=True
    )
    texts, ends = ["", ""], [0, 0]
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in answer.choices]
    assert ends == [1, 1]


def check_stop(base_url: str, model: str) -> None:
    """A stop string taken from the middle of the greedy answer cuts it exactly there, streamed and not."""
    client = client_for(base_url)
    settings: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    text = client.completions.create(**settings).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = client.completions.create(**settings, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert (cut.choices[0].model_extra or {})["stop_reason"] == stop
    chunks = client.completions.create(**settings, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    kept = client.completions.create(**settings, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(stop) + len(stop)]


def check_chat_logprobs(base_url: str, model: str) -> None:
    """One entry per token, whose bytes join to the text; alternatives as many as asked for."""
    answer = client_for(base_url).chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == answer.usage.completion_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in content)
    if answer.choices[0].finish_reason == "length":
        joined = b"".join(bytes(entry.bytes or []) for entry in content)
        assert joined.decode("utf-8", "replace") == answer.choices[0].message.content


def check_echo_logprobs(base_url: str, model: str) -> None:
    """Echo with max_tokens 0 scores the prompt: parallel lists, the first without value, offsets into it."""
    answer = client_for(base_url).completions.create(
        model=model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == PROMPT
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    assert scores.text_offset is not None
    assert "".join(scores.tokens) == PROMPT
    assert scores.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in scores.token_logprobs[1:])
    assert [
        PROMPT[at:].startswith(token) for at, token in zip(scores.text_offset, scores.tokens, strict=True)
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(scores.tokens), 0)


def check_seed(base_url: str, model: str) -> None:
    """The same seed repeats a sampled answer."""
    client = client_for(base_url)
    texts = [
        client.completions.create(model=model, prompt=PROMPT, max_tokens=10, temperature=1, seed=seed)
        .choices[0]
        .text
        for seed in (7, 7)
    ]
    assert texts[0] == texts[1]


def check_prompt_forms(base_url: str, model: str) -> None:
    """Text, token ids, and lists of either give the same continuation, numbered prompt by prompt."""
    client = client_for(base_url)
    settings: dict[str, Any] = {"model": model, "max_tokens": 6, "temperature": 0}
    scored = client.completions.create(**{**settings, "max_tokens": 0}, prompt=PROMPT, echo=True, logprobs=0)
    assert scored.usage is not None
    answer: Any = client.post("/tokenize", body={"prompt": PROMPT}, cast_to=object)
    tokens = answer["tokens"]
    assert len(tokens) == scored.usage.prompt_tokens
    text = client.completions.create(**settings, prompt=PROMPT).choices[0].text
    forms: list[Any] = [tokens, [PROMPT, PROMPT], [tokens, tokens]]
    for prompt in forms:
        choices = client.completions.create(**settings, prompt=prompt).choices
        assert {choice.text for choice in choices} == {text}
    two = client.completions.create(**settings, prompt=[PROMPT, PROMPT], n=2)
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]


def check_bad_model(base_url: str, model: str) -> None:
    """An unknown model is a NotFoundError that names `model`."""
    with pytest.raises(openai.NotFoundError) as caught:
        client_for(base_url).chat.completions.create(model=f"{model}-not", messages=MESSAGES)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client_for(base_url).models.retrieve(f"{model}-not")


def check_bad_parameters(base_url: str, model: str) -> None:
    """Out of range and unsupported parameters are BadRequestErrors that name the parameter."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"10000000": 1}}, "logit_bias"),
        ({"extra_body": {"guided_regex": "a(?=b)"}}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ]
    client = client_for(base_url)
    for settings, param in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{"model": model, "messages": MESSAGES, **settings})
        assert caught.value.param == param, settings


def check_context_overflow(base_url: str, model: str) -> None:
    """A prompt, or prompt plus max_tokens, beyond the context is a 400 with OpenAI's code."""
    client = client_for(base_url)
    extra = client.models.retrieve(model).model_extra
    assert extra is not None
    length = extra["max_model_len"]
    for settings in ({"prompt": "fox dog " * length}, {"prompt": PROMPT, "max_tokens": length}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{"model": model, **settings})
        assert caught.value.code == "context_length_exceeded"


ALL_CHECKS: list[Callable[[str, str], None]] = [
    check_models,
    check_chat,
    check_chat_stream,
    check_n,
    check_stop,
    check_chat_logprobs,
    check_echo_logprobs,
    check_seed,
    check_prompt_forms,
    check_bad_model,
    check_bad_parameters,
    check_context_overflow,
]
