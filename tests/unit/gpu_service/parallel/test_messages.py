"""Guards that messages between ranks arrive as they were sent: data only, and images once each."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_service.core.images import ImageLayout, PreparedImage, place_images
from gpu_service.core.interface import Abort, Add, Flush, Message, RunOperation, Stop
from gpu_service.core.request import Request, SamplingParams
from gpu_service.parallel.inbox import decode_messages, encode_messages
from protos import ranks_pb2
from protos.engine_pb2 import Constraint
from tests.helpers.constraints import compiler, constrained

PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10, width=32),
    top_p=st.floats(0.015625, 1, width=32),
    top_k=st.integers(0, 1000),
    repetition_penalty=st.floats(0.125, 3, width=32),
    max_tokens=st.integers(1, 10**6),
    stop_token_ids=st.frozensets(st.integers(0, 200_000), max_size=4),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    seed=st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, 200_000), st.floats(-100, 100, width=32), max_size=3).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    allowed_token_ids=st.lists(st.integers(0, 200_000), max_size=3).map(tuple),
    bad_words=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    logprob_token_ids=st.lists(st.integers(0, 200_000), max_size=3).map(tuple),
)
REQUESTS = st.builds(
    Request,
    request_id=st.text(min_size=1, max_size=20),
    prompt_token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
    params=PARAMS,
    index=st.integers(0, 127),
    priority=st.integers(-100, 100),
    cache_namespace=st.text(max_size=10),
    keep_prefix_s=st.floats(0, 1e5),
    arrived_s=st.floats(0, 1e9),
)
MESSAGES = (
    st.builds(Add, st.lists(REQUESTS, min_size=1, max_size=3).map(tuple))
    | st.builds(Abort, st.text(max_size=20))
    | st.builds(Flush, st.builds(Future))
    | st.builds(RunOperation, st.text(max_size=20), st.text(max_size=20), st.builds(Future))
    | st.builds(Stop)
)
FIELDS = (
    "request_id",
    "prompt_token_ids",
    "params",
    "index",
    "priority",
    "cache_namespace",
    "keep_prefix_s",
    "arrived_s",
)


def facts(message: Message) -> object:
    """Returns what has to arrive: everything the scheduler and the sampler read."""
    match message:
        case Add(requests):
            return [[getattr(request, field) for field in FIELDS] for request in requests]
        case Abort(request_id):
            return request_id
        case RunOperation(operation, argument):
            return operation, argument
    return type(message)


@given(st.lists(MESSAGES, max_size=4))
def test_messages_arrive_as_they_were_sent(messages: list[Message]) -> None:
    """Kinds, order, prompts, and parameters to the last of their 32 bits; an empty list, too."""
    sent = encode_messages(messages).SerializeToString()
    arrived = decode_messages(ranks_pb2.Iteration.FromString(sent))
    assert [type(message) for message in arrived] == [type(message) for message in messages]
    assert [facts(message) for message in arrived] == [facts(message) for message in messages]


def test_what_is_no_message_is_refused() -> None:
    """A kind of message that this version does not know, and images of another size than announced."""
    with pytest.raises(ValueError, match="an unknown message arrived"):
        decode_messages(ranks_pb2.Iteration(messages=[ranks_pb2.Message()]))
    image = ranks_pb2.Image(key=-1, grid=[1, 2, 2], token_grid=[1, 1], shape=[4, 6], pixels=bytes(95))
    with pytest.raises(ValueError, match=r"shape \(4, 6\) arrived with 95 bytes"):
        decode_messages(ranks_pb2.Iteration(images=[image]))


def test_constraints_arrive_as_they_were_sent() -> None:
    """Constraints arrive with a state of their own at the beginning; a rank without a tokenizer says so."""
    source = Constraint(regex="[ab]+", after_token_ids=[4, 5], max_reasoning_tokens=0)
    sent = [constrained("a", [3], source), Request("b", [3], SamplingParams())]
    (arrived,) = decode_messages(encode_messages([Add(tuple(sent))]), compiler())
    assert isinstance(arrived, Add)
    first, second = arrived.requests
    assert first.constraint is not None
    assert first.constraint.source == source
    assert second.constraint is None
    with pytest.raises(ValueError, match="no tokenizer"):
        decode_messages(encode_messages([Add(tuple(sent))]))


PLACEHOLDER = 9
LAYOUT = ImageLayout(PLACEHOLDER, PLACEHOLDER, start=(7,), whole=(8,), column=(6,), row=(5,))


def image(key: int, rows: int, columns: int) -> PreparedImage:
    """Returns random patches of more than one dimension each."""
    pixels = np.random.default_rng(-key).normal(size=(4 * rows * columns, 3, 2)).astype(np.float32)
    return PreparedImage(key, pixels, (1, 2 * rows, 2 * columns), (rows, columns))


def request(name: str, prompt: list[int], images: list[PreparedImage]) -> Request:
    """With images in the place of its placeholders."""
    tokens, vision = place_images(prompt, images, LAYOUT)
    return Request(name, tokens, SamplingParams(), vision=vision if images else None)


ONE, TWO = image(-(2**63), 1, 3), image(-2, 2, 2)


def test_images_arrive_as_they_were_sent() -> None:
    """Pixels to the last bit, places, keys and positions; a request without images has none."""
    sent = [request("a", [1, 9, 2, 9], [ONE, TWO]), request("b", [3], []), request("c", [9], [TWO])]
    (arrived,) = decode_messages(encode_messages([Add(tuple(sent))]))
    assert isinstance(arrived, Add)
    assert [r.prompt_token_ids for r in arrived.requests] == [r.prompt_token_ids for r in sent]
    assert arrived.requests[1].vision is None
    for ours, theirs in ((arrived.requests[0], sent[0]), (arrived.requests[2], sent[2])):
        assert ours.vision is not None
        assert theirs.vision is not None
        assert ours.vision.positions.tolist() == theirs.vision.positions.tolist()
        assert ours.vision.offset == theirs.vision.offset
        assert ours.prefix_keys(ours.total_len) == theirs.prefix_keys(theirs.total_len)
        for mine, other in zip(ours.vision.images, theirs.vision.images, strict=True):
            assert (mine.start, mine.image.key, mine.image.grid) == (
                other.start,
                other.image.key,
                other.image.grid,
            )
            assert np.array_equal(mine.image.pixels, other.image.pixels)
            assert mine.image.pixels.flags.writeable


def test_outputs_of_one_request_share_their_images() -> None:
    """Pixels travel once, whatever `n` is."""
    once = encode_messages([Add((request("a", [9], [TWO]),))]).SerializeToString()
    thrice = encode_messages([Add(tuple(request(name, [9], [TWO]) for name in "abc"))]).SerializeToString()
    assert len(thrice) - len(once) < TWO.pixels.nbytes + 2000
    assert thrice.count(TWO.pixels.tobytes()) == 1
