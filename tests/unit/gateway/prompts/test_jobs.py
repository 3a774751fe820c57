"""Guards the limits of a request: what fits the context passes, one token more is refused by name."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from gateway.generation.model import ServedModel
from gateway.prompts.jobs import build_sampling_params, check_prompt, output_limit
from gateway.schemas.errors import ApiError, from_grpc
from gateway.schemas.requests import CompletionRequest
from gateway.text.tokenizer import Tokenizer
from gpu_service.assembly.built import sampling_defaults
from tests.helpers.tiny_tokenizer import byte_level_tokenizer

MODEL = ServedModel(
    name="m",
    root="/models/m",
    max_context_length=100,
    max_prompt_length=99,
    vocab_size=400,
    eos_token_ids=frozenset({2}),
    defaults={"temperature": 0.6, "top_p": 0.9, "top_k": None},
    tokenizer=Tokenizer(byte_level_tokenizer(), None),
)


def body(**fields: object) -> CompletionRequest:
    """Returns a request with further fields."""
    return CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields})


def test_prompt_bounds() -> None:
    """The longest prompt passes, one token more and none at all do not."""
    check_prompt(MODEL, [5] * 99, "prompt")
    for ids, code in (
        ([5] * 100, "context_length_exceeded"),
        ([], "invalid_value"),
        ([400], "invalid_value"),
    ):
        with pytest.raises(ApiError) as caught:
            check_prompt(MODEL, ids, "messages")
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", code)


@pytest.mark.parametrize(
    ("prompt", "requested", "limit"), [(60, 40, 40), (60, None, 40), (99, None, 1), (5, 0, 1)]
)
def test_output_limit(prompt: int, requested: int | None, limit: int) -> None:
    """Unset means what is left of the context."""
    assert output_limit(MODEL, prompt, "max_tokens", requested) == limit


def test_the_models_own_limit_of_outputs() -> None:
    """generation_config.json's `max_new_tokens` stands for an unset limit, and never for one that is sent."""
    generation = {"max_new_tokens": 30, "temperature": None, "top_k": 5, "do_sample": True}
    defaults = sampling_defaults(generation)
    assert defaults == {"max_new_tokens": 30, "top_k": 5}
    model = dataclasses.replace(MODEL, defaults=defaults)
    limits = [
        output_limit(model, prompt, "max_tokens", sent) for prompt, sent in [(9, None), (9, 40), (80, None)]
    ]
    assert limits == [30, 40, 20]


def test_output_beyond_the_context_is_refused() -> None:
    """Prompt and output together must fit."""
    with pytest.raises(ApiError) as caught:
        output_limit(MODEL, 60, "max_completion_tokens", 41)
    assert (caught.value.param, caught.value.code) == ("max_completion_tokens", "context_length_exceeded")


def test_defaults_and_overrides() -> None:
    """The model's defaults apply where the client said nothing, and nowhere else."""
    params = build_sampling_params(body(), MODEL, 10, None, None)
    assert (round(params.temperature, 5), round(params.top_p, 5), params.top_k) == (0.6, 0.9, 0)
    assert not params.HasField("logprobs")
    assert not params.HasField("seed")
    params = build_sampling_params(body(temperature=0, top_p=1, seed=0, n=3), MODEL, 10, 0, 2)
    assert (params.temperature, params.top_p, params.n) == (0, 1, 3)
    assert params.HasField("seed")
    assert (params.logprobs, params.prompt_logprobs) == (0, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"400": 1}}, "logit_bias"),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"min_tokens": 11}, "min_tokens"),
    ],
)
def test_values_the_model_can_not_take(fields: dict[str, object], param: str) -> None:
    """Token ids outside the vocabulary and impossible minima are refused by name, not dropped."""
    with pytest.raises(ApiError) as caught:
        build_sampling_params(body(**fields), MODEL, 10, None, None)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_grpc_status_mapping() -> None:
    """Each status of the contract has one HTTP meaning; unknown ones are the server's fault."""
    expected = {
        grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error", None),
        grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", 1),
        grpc.StatusCode.UNAVAILABLE: (503, "server_error", 2),
        grpc.StatusCode.DEADLINE_EXCEEDED: (504, "server_error", None),
        grpc.StatusCode.DATA_LOSS: (500, "server_error", None),
    }
    for code, (status, kind, retry_after_s) in expected.items():
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="why")
        answer = from_grpc(error)
        assert (answer.status, answer.body()["error"]["type"], answer.retry_after_s) == (
            status,
            kind,
            retry_after_s,
        )
        assert "why" in answer.message
