"""Guards who may serve a mailbox: no server that computes something else than those before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from moebius._kernels_testing import EchoBackend
from moebius.kernels import ExpertEngine
from moebius.mailbox import IdentityMismatch, Mailbox, MailboxServer, ServerLost
from tests.helpers.mailbox import Call, geometry, new_mailbox
from tests.helpers.waiting import wait_until

OURS = "checkpoint=aa\nexpert_dtype=keep\nsplit_shares=1,1\n"
OTHERS = "checkpoint=aa\nexpert_dtype=int8\nsplit_shares=3,1\n"


@contextmanager
def serving(box: Mailbox, index: int = 0, identity: str = OURS, digest: int = 7) -> Iterator[MailboxServer]:
    """An echo server of this process, of scale 1 + index."""
    backend = EchoBackend(box.geometry.hidden_size, scale=1.0 + index)
    server = MailboxServer(box.name, index, backend, heartbeat_s=0.02, identity=identity)
    try:
        server.start(digest)
        yield server
    finally:
        server.stop()


def test_another_identity_is_refused_by_name() -> None:
    """The server is refused at any index, before anything is loaded; a caller that waits for it learns what
    differs.
    """
    with new_mailbox(geometry(2)) as box:
        with serving(box, 0), serving(box, 1):
            assert box.wait_servers_ready(60) == [1, 1]
            assert box.identity == OURS
        with serving(box, 0):
            with pytest.raises(IdentityMismatch) as caught, serving(box, 1, OTHERS):
                pass
            assert "expert_dtype is int8, expected keep; split_shares is 3,1, expected 1,1" in str(
                caught.value
            )
            assert "checkpoint" not in str(caught.value)
            with pytest.raises(ServerLost, match=r"refused: expert_dtype is int8, expected keep"):
                box.wait_servers_ready(0.05)
            with serving(box, 1):
                assert box.wait_servers_ready(60) == [2, 2]
            assert box.server_state(1).refusal == ""


def test_other_weights_under_the_same_identity_are_refused() -> None:
    """What was packed is compared when it is known, with what any generation before had packed."""
    with new_mailbox(geometry()) as box:
        with serving(box, digest=7):
            box.wait_servers_ready(60)
        with (
            pytest.raises(IdentityMismatch, match="the checkpoint's weights have changed"),
            serving(box, digest=8),
        ):
            pass
        assert box.server_state(0).state == "absent"
        with pytest.raises(ServerLost, match="not those that were served before"):
            box.wait_servers_ready(0.05)
        with serving(box, digest=7):
            assert box.wait_servers_ready(60) == [3]


def test_a_server_that_returned_between_requests_is_noticed() -> None:
    """Nothing was in flight when it was replaced; still its answer is not taken before it is accepted."""
    with new_mailbox(geometry()) as box:
        call = Call(box, 2)
        with serving(box):
            box.accept_generations(box.wait_servers_ready(60))
            np.testing.assert_array_equal(call.collect(call.submit()), call.expected())
        with serving(box):
            generations = box.wait_servers_ready(60)
            with pytest.raises(ServerLost, match="restarted"):
                call.collect(call.submit())
            box.accept_generations(generations)
            np.testing.assert_array_equal(call.collect(call.submit()), call.expected())


def test_a_rejected_server_leaves_and_its_successor_is_welcome() -> None:
    """The reason reaches the server and those who wait."""
    with new_mailbox(geometry()) as box:
        with serving(box) as server:
            box.reject(0, box.wait_servers_ready(60)[0], "layer 3, expert 6: relative error 1")
            wait_until(lambda: not server.is_running)
            assert server.rejection == "layer 3, expert 6: relative error 1"
            with pytest.raises(ServerLost, match="layer 3, expert 6"):
                box.wait_servers_ready(0.05)
        with serving(box) as server:
            assert box.wait_servers_ready(60) == [2]
            assert server.rejection == ""


def _digest(matrices: Any, **options: Any) -> int:
    engine = ExpertEngine(64, 32, 2, 2, **{"weight_format": "bfloat16", "num_threads": 1} | options)
    for layer, expert, part in matrices:
        engine.load_expert(layer, expert, *part)
    return engine.weights_digest


def test_the_digest_is_of_every_weight_and_its_place() -> None:
    """One bit of one weight, or two experts exchanged, change it; order and threads of loading do not."""
    random = np.random.default_rng(0)

    def expert() -> list[Any]:
        shapes = ((32, 64), (32, 64), (64, 32))
        return [random.integers(0, 2**15, shape, dtype=np.uint16) & 0xBFFF for shape in shapes]

    loaded = [(layer, number, expert()) for layer in range(2) for number in range(2)]
    digest = _digest(loaded)
    assert digest != 0
    assert _digest(loaded[::-1], num_threads=2) == digest
    exchanged = [(layer, 1 - number, part) for layer, number, part in loaded]
    assert _digest(exchanged) != digest
    for matrix in range(3):
        changed = [(layer, number, [one.copy() for one in part]) for layer, number, part in loaded]
        changed[3][2][matrix][-1, -1] ^= 1
        assert _digest(changed) != digest
