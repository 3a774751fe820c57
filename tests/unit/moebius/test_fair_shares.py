"""Guards shares of clients: each one that waits is served as much as any other, in tokens."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_service.core.request import Request
from gpu_service.core.results import RowResult
from gpu_service.scheduler.scheduler import Scheduler
from moebius.fair_shares import FairShares, has_place, in_turns
from tests.helpers.engine_harness import Knobs, build_scheduler, make_request

SEQS = 8


class Client(NamedTuple):
    """A client that has a number of requests in progress all the time."""

    name: str
    connections: int
    prompt: tuple[int, int]  # tokens, least and most
    output: tuple[int, int]
    priority: int = 0

    @property
    def largest(self) -> int:
        return self.prompt[1] + self.output[1]


class Load:
    """Clients in front of a scheduler, each of which sends its next request when one has ended."""

    def __init__(self, clients: list[Client], seed: int, budget: int = 64) -> None:
        knobs = Knobs(num_pages=20_000, max_num_seqs=SEQS, budget=budget, context_limit=10_000)
        self.scheduler: Scheduler = build_scheduler(knobs)
        self.clients = {client.name: client for client in clients}
        self.draws = random.Random(seed)
        self.numbers = count()
        self.tokens: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.longest_wait: Counter[str] = Counter()  # steps until the first token
        self.began: dict[Request, int] = {}
        self.now = 0
        for client in clients:
            for _ in range(client.connections):
                self.send(client)

    def send(self, client: Client) -> None:
        """One more request, with a prompt that no other shares."""
        number = next(self.numbers)
        prompt = [1 + number % 60, 1 + number // 60 % 60, 1 + number // 3600]
        prompt += [2] * self.draws.randint(*client.prompt)
        request = make_request(f"r{number}", prompt, max_tokens=self.draws.randint(*client.output))
        request.fairness_id, request.priority = client.name, client.priority
        self.scheduler.add(request)
        self.began[request] = self.now

    def step(self) -> None:
        """All that one step does."""
        batch = self.scheduler.schedule()
        assert batch is not None
        for request, tokens in zip(batch.requests, batch.num_new_tokens, strict=True):
            self.tokens[request.fairness_id] += tokens
        self.scheduler.commit(batch, [RowResult(5 if samples else None) for samples in batch.samples])
        # Looks at every page; tests of the scheduler do so after each step.
        if self.now % 64 == 0:
            self.scheduler.check_integrity()
        self.now += 1
        for request in batch.requests:
            name = request.fairness_id
            if len(request.output_token_ids) == 1:
                self.longest_wait[name] = max(self.longest_wait[name], self.now - self.began[request])
            if request.finished:
                del self.began[request]
                self.answers[name] += 1
                self.send(self.clients[name])

    def run(self, steps: int) -> Load:
        """Adds a number of them."""
        for _ in range(steps):
            self.step()
        return self


def deviation(tokens: Counter[str]) -> float:
    """Returns how far the share of the most or least served is from an equal one, relative to that."""
    equal = sum(tokens.values()) / len(tokens)
    return max(abs(served - equal) / equal for served in tokens.values())


BUSY = [
    [Client("a", 64, (20, 20), (16, 16)), Client("b", 16, (20, 20), (16, 16))],
    [Client("a", 64, (5, 20), (8, 40)), Client("b", 9, (40, 200), (1, 8))],
    [
        Client("a", 64, (1, 4), (4, 8)),
        Client("b", 12, (200, 400), (1, 4)),
        Client("c", 10, (10, 20), (60, 90)),
    ],
    [Client("a", 64, (20, 20), (16, 16), priority=-5), Client("b", 16, (20, 20), (16, 16), priority=5)],
]


@pytest.mark.parametrize("clients", BUSY, ids=["equal", "prompts and outputs", "three", "priorities"])
def test_clients_that_all_wait_have_equal_shares(clients: list[Client]) -> None:
    """However many connections each has, however long its requests are, and whatever priority it gives them:
    within 10 % of all tokens, prompt and output."""
    load = Load(clients, seed=1).run(1500)
    assert deviation(load.tokens) <= 0.1, load.tokens


def test_one_connection_is_not_held_up_by_sixty_four() -> None:
    """A client that asks for less than its share has all it asks for: each request begins when the next place
    is free, not after those who came before it."""
    mine, others = Client("mine", 1, (20, 20), (16, 16)), Client("others", 64, (20, 20), (16, 16))
    load = Load([others, mine], seed=2).run(1500)
    assert load.longest_wait["mine"] <= 20, load.longest_wait  # one output of others, and its own prompt
    alone = Load([mine], seed=2).run(1500)
    assert load.answers["mine"] >= 0.4 * alone.answers["mine"]


@given(
    shapes=st.lists(
        st.tuples(st.integers(SEQS + 1, 24), st.integers(1, 60), st.integers(1, 24)), min_size=2, max_size=4
    ),
    seed=st.integers(0, 2**16),
)
def test_no_client_falls_behind_by_more_than_what_is_in_progress(
    shapes: list[tuple[int, int, int]], seed: int
) -> None:
    """At any time the most and the least served of clients that always wait differ by what fits into the
    batch twice, not by more the longer it lasts.
    """
    clients = [
        Client(f"c{number}", connections, (1, prompt), (1, output))
        for number, (connections, prompt, output) in enumerate(shapes)
    ]
    bound = 2 * SEQS * max(client.largest + 4 for client in clients)
    load = Load(clients, seed)
    for _ in range(150):
        load.step()
        served = [load.tokens[client.name] for client in clients]
        assert max(served) - min(served) <= bound


def test_who_was_alone_owes_nothing() -> None:
    """A newcomer has its share from now on, not what others had before it came."""
    load = Load([Client("a", 20, (20, 20), (16, 16))], seed=3).run(1000)
    newcomer = Client("b", 20, (20, 20), (16, 16))
    load.clients["b"] = newcomer
    for _ in range(newcomer.connections):
        load.send(newcomer)
    load.tokens.clear()
    load.run(1500)
    assert deviation(load.tokens) <= 0.1, load.tokens


def test_requests_without_a_client_are_in_order_of_seniority() -> None:
    """Without a client's name all are one: the oldest first, as if there were no shares."""
    load = Load([Client("", 3 * SEQS, (20, 20), (4, 4))], seed=4)
    begun: list[int] = []
    for _ in range(100):
        batch = load.scheduler.schedule()
        assert batch is not None
        begun += [request.arrival for request in batch.admitted]
        load.scheduler.commit(batch, [RowResult(5 if samples else None) for samples in batch.samples])
        if not load.scheduler.has_work:
            break
    assert begun == sorted(begun)


def test_a_cached_prefix_and_a_preemption_cost_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is charged for what is computed for it, each token once."""
    scheduler = build_scheduler(Knobs(num_pages=200, max_num_seqs=2, budget=64, context_limit=500))
    charged: list[float] = []
    monkeypatch.setattr(scheduler.shares._shares, "charge", lambda _client, cost: charged.append(cost))

    def step() -> None:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.commit(batch, [RowResult(5 if samples else None) for samples in batch.samples])

    prompt = [1, 2, 3, 4] * 8
    for last, costs in ((5, [33, 1]), (6, [1, 1])):  # the second one finds the first one's pages
        request = make_request(f"r{last}", [*prompt, last], max_tokens=2)
        scheduler.add(request)
        while not request.finished:
            step()
        assert charged == costs
        charged.clear()
    scheduler.cache.prefix_caching = False  # all of it is computed again
    request = make_request("preempted", [7] * 30, max_tokens=8)
    scheduler.add(request)
    for _ in range(4):
        step()
    scheduler.preempt(request)
    while not request.finished:
        step()
    assert sum(charged) == 30 + 8 - 1


def test_turns_are_by_what_was_served() -> None:
    """The next one is always of the client with the least, what it is given here included; one that comes
    back begins where the least served is, and what is served without competition makes no debts."""
    shares = FairShares()
    shares.settle(["a", "b"])
    shares.charge("a", 10)
    queues = {"a": iter([4, 4]), "b": iter([6, 6, 6])}
    assert list(in_turns(queues, shares.served, float)) == [6, 6, 4, 6, 4]
    shares.settle(["a"])
    assert shares.served("b") == shares.served("c") == 10
    shares.settle([])
    assert shares.served("a") == 0


def test_a_full_queue_lets_in_who_has_less_than_a_share() -> None:
    """The queue takes any client up to the limit; beyond it those below an equal share, so that at most twice
    as many are in.
    """
    assert has_place({"a": 255}, "a", 256)
    assert not has_place({"a": 256}, "a", 256)
    assert has_place({"a": 256}, "b", 256)
    assert has_place({"a": 256, "b": 127}, "b", 256)
    assert not has_place({"a": 256, "b": 128}, "b", 256)
    taken: Counter[str] = Counter()
    draws = random.Random(5)
    for _ in range(20_000):
        client = f"c{draws.randrange(40)}"
        if has_place(taken, client, 256):
            taken[client] += 1
        elif taken[client] and draws.random() < 0.3:
            taken[client] -= 1
        assert sum(taken.values()) <= 512
