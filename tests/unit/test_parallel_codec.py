"""Guards that messages between ranks arrive as they were sent, as data and nothing else."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_service.engine.inbox import Abort, Add, Call, Flush, Message, Stop
from gpu_service.parallel.codec import decode_messages, encode_messages
from gpu_service.request import Request, SamplingParams

PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 1000),
    repetition_penalty=st.floats(0.1, 3),
    max_tokens=st.integers(1, 10**6),
    stop_token_ids=st.frozensets(st.integers(0, 200_000), max_size=4),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    seed=st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 200_000), st.floats(-100, 100)), max_size=3).map(tuple),
)
REQUESTS = st.builds(
    Request,
    request_id=st.text(min_size=1, max_size=20),
    prompt_token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
    params=PARAMS,
    index=st.integers(0, 127),
    priority=st.integers(-100, 100),
    cache_namespace=st.text(max_size=10),
)
MESSAGES = (
    st.builds(Add, st.lists(REQUESTS, min_size=1, max_size=3).map(tuple))
    | st.builds(Abort, st.text(max_size=20))
    | st.builds(Flush, st.builds(Future))
    | st.builds(Call, st.text(max_size=20), st.text(max_size=20), st.builds(Future))
    | st.builds(Stop)
)
FIELDS = ("request_id", "prompt_token_ids", "params", "index", "priority", "cache_namespace")


def facts(message: Message) -> object:
    """What has to arrive: everything the scheduler and the sampler read."""
    match message:
        case Add(requests):
            return [[getattr(request, field) for field in FIELDS] for request in requests]
        case Abort(request_id):
            return request_id
        case Call(operation, argument):
            return operation, argument
    return type(message)


@given(st.lists(MESSAGES, max_size=4))
def test_messages_arrive_as_they_were_sent(messages: list[Message]) -> None:
    """Kinds, order, prompts, and parameters to the last bit; an empty list, too."""
    arrived = decode_messages(encode_messages(messages))
    assert [type(message) for message in arrived] == [type(message) for message in messages]
    assert [facts(message) for message in arrived] == [facts(message) for message in messages]


def test_what_is_no_message_is_refused() -> None:
    """Unknown kinds, unknown parameters, and prompts of another length than announced."""
    good = encode_messages([Add((Request("r", [1, 2, 3], SamplingParams()),))])
    with pytest.raises(ValueError, match="4 prompt tokens arrived for 3 announced"):
        decode_messages(good + b"\0\0\0\0")
    with pytest.raises(ValueError, match="top_q"):
        decode_messages(good.replace(b'"top_p"', b'"top_q"'))
    with pytest.raises(ValueError, match="unknown message"):
        decode_messages(encode_messages([Stop()]).replace(b"stop", b"stay"))
