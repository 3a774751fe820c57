"""Guards expert clients of several ranks: rows divided, failures seen by all, one numbering afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch

from gpu_service.experts.client import ExpertClient, ExpertUnavailable
from gpu_service.experts.mailbox_client import MailboxExpertClient
from moebius._kernels_testing import EchoBackend
from moebius.mailbox import Mailbox, MailboxServer, row_begin
from tests.helpers.doorbell_host import doorbell_client
from tests.helpers.doorbell_steps import MODEL, Layer
from tests.helpers.mailbox import geometry, new_mailbox

RANKS = 2


class Agreement:
    """`agree` of ranks that are threads: the largest of their numbers, once all have come."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=60)
        self._values = [0] * RANKS

    def of(self, rank: int) -> Callable[[int], int]:
        """One rank's part."""

        def agree(value: int) -> int:
            self._values[rank] = value
            self._barrier.wait()
            largest = max(self._values)
            self._barrier.wait()
            return largest

        return agree


class Ranks:
    """Two clients and what ranks do between steps; each rank's part runs in a thread of its own."""

    def __init__(self, clients: list[ExpertClient]) -> None:
        self.clients = clients
        self.agreement = Agreement()
        self.each(lambda rank: clients[rank].agree_with_ranks(self.agreement.of(rank)))

    def each(self, part: Callable[[int], object]) -> list[object]:
        """Returns every rank's result, in order."""
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(part, range(RANKS)))

    def step(self, layers: list[list[Layer]]) -> list[bool]:
        """Returns whether each rank's step ended well; its layers' `partial` then hold the sums."""

        def part(rank: int) -> bool:
            client = self.clients[rank]
            client.begin_step()
            try:
                for layer in layers[rank]:
                    layer.partial = layer.run(client)
            except ExpertUnavailable:
                return False
            return client.failure() is None

        return [bool(ended) for ended in self.each(part)]

    def recover(self) -> None:
        """All at once, then a barrier, as `RankExperts.recover` does."""

        def part(rank: int) -> None:
            self.clients[rank].recover(10)
            self.agreement.of(rank)(0)

        self.each(part)


@contextmanager
def ranks_of(kind: str, box: Mailbox, deadline_ms: int = 60_000) -> Iterator[Ranks]:
    """Clients driven by the host, or by the doorbell kernels."""
    boxes = [box, *(Mailbox.attach(box.name, 1, client=rank) for rank in range(1, RANKS))]
    memops = kind == "memops"
    with ExitStack() as stack:
        if kind == "host":
            hosts = [closing(MailboxExpertClient(one, MODEL, deadline_ms)) for one in boxes]
            yield Ranks([stack.enter_context(host) for host in hosts])
        else:
            made = [doorbell_client(one, MODEL, deadline_ms=deadline_ms, is_memops=memops) for one in boxes]
            yield Ranks([stack.enter_context(one)[0] for one in made])


Sums = list[list[torch.Tensor]]


def check(layers: list[list[Layer]], wanted: Sums, whole: Sums) -> None:
    """Every rank's own rows have the answer, all others are as they were."""
    for rank in range(RANKS):
        for layer, before, after in zip(layers[rank], wanted[rank], whole[rank], strict=True):
            expected = before.clone()
            for begin in range(0, len(before), 7):
                rows = min(7, len(before) - begin)
                own = slice(*(begin + row_begin(rows, rank + i, RANKS) for i in (0, 1)))
                expected[own] = after[own]
            assert torch.equal(layer.partial, expected)


def make_layers(
    seed: int = 0,
) -> tuple[list[list[Layer]], Sums, Sums]:
    """Both ranks' layers, their partial sums before, and with all answers added."""
    layers = [[Layer(rows, seed + rows, layer=rows % 5) for rows in (1, 6, 20, 2)] for _ in range(RANKS)]
    before = [[layer.partial.clone() for layer in rank] for rank in layers]
    after = [[layer.expected(2) for layer in rank] for rank in layers]
    return layers, before, after


@pytest.mark.parametrize("kind", ["host", "doorbell", "memops"])
def test_every_rank_adds_its_own_rows(kind: str) -> None:
    """Layers of fewer rows than ranks and of more than all slots hold; several steps."""
    with new_mailbox(geometry(2, num_clients=RANKS)) as box, ranks_of(kind, box) as ranks:
        servers = [MailboxServer(box.name, i, EchoBackend(48, scale=1.0 + i)) for i in range(2)]
        for server in servers:
            server.start()
        ranks.each(lambda rank: ranks.clients[rank].wait_ready(5))
        for seed in range(3):
            layers, before, after = make_layers(seed)
            assert ranks.step(layers) == [True, True]
            check(layers, before, after)
        # One forward of all rows, however many ranks.
        assert box.server_state(0).rows == 3 * (1 + 6 + 20 + 2)
        for server in servers:
            server.stop()


@pytest.mark.parametrize("kind", ["host", "doorbell", "memops"])
def test_lost_server_fails_all_ranks_and_the_step_runs_again(kind: str) -> None:
    """A server that leaves between two steps: no rank waits for ever, and numbering goes on alike."""
    with new_mailbox(geometry(2, num_clients=RANKS)) as box, ranks_of(kind, box, 400) as ranks:
        servers = [MailboxServer(box.name, i, EchoBackend(48, scale=1.0 + i)) for i in range(2)]
        for server in servers:
            server.start()
        ranks.each(lambda rank: ranks.clients[rank].wait_ready(5))
        for seed in range(3):
            servers[1].stop()
            layers, _, _ = make_layers(seed)
            assert ranks.step(layers) == [False, False]
            servers[1] = MailboxServer(box.name, 1, EchoBackend(48, scale=2.0))
            servers[1].start()
            ranks.recover()
            layers, before, after = make_layers(seed)
            assert ranks.step(layers) == [True, True]
            check(layers, before, after)
        for server in servers:
            server.stop()


@pytest.mark.parametrize("kind", ["host", "doorbell"])
def test_new_processes_go_on_beyond_the_old_ones_epochs(kind: str) -> None:
    """A group that is restarted on the same mailbox agrees on epochs that no server has seen."""
    with new_mailbox(geometry(2, num_clients=RANKS)) as box:
        servers = [MailboxServer(box.name, i, EchoBackend(48, scale=1.0 + i)) for i in range(2)]
        for server in servers:
            server.start()
        for seed in range(2):
            again = Mailbox.attach(box.name, 1)
            with ranks_of(kind, again) as ranks:
                ranks.each(lambda rank, ranks=ranks: ranks.clients[rank].wait_ready(5))
                layers, before, after = make_layers(seed)
                assert ranks.step(layers) == [True, True]
                check(layers, before, after)
        for server in servers:
            server.stop()
