"""Which client's requests are next: each gets an equal share of the tokens computed, as long as several wait.

Clients differ by `Request.fairness_id`. What one was served is the tokens that were computed for it,
prompt and output, each position once: neither cached prefixes nor what a preemption has computed again. As a
request's place in the batch is a promise of more, a client's account also has what its running requests
still need: the rest of their prompts, and as much output as requests have had lately. With one client, or as
long as nothing waits, requests are in order of seniority, as if there were no shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import nsmallest

from gpu_service.core.request import Request
from gpu_service.scheduler.admission import Prompt, Rank, seniority, turn
from moebius.fair_shares import FairShares, in_turns, is_below_share

# Output tokens that a request is expected to have, before any has ended, and the weight of the newest.
_FIRST_OUTPUT, _NEWEST = 64.0, 0.1


class ClientShares:
    """The accounts of all clients; the scheduler calls it in the same order on every rank."""

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()  # unfinished requests
        self._shares = FairShares()
        self._output = _FIRST_OUTPUT
        self._accounts: dict[str, float] = {}  # of the step that is planned; empty: seniority alone counts

    def came(self, request: Request) -> None:
        """A request is queued."""
        self._live[request.fairness_id] += 1

    def went(self, request: Request) -> None:
        """A request has ended, well or not."""
        self._live[request.fairness_id] -= 1
        if not self._live[request.fairness_id]:
            del self._live[request.fairness_id]
        if request.output_token_ids:
            self._output += _NEWEST * (len(request.output_token_ids) - self._output)

    def computes(self, request: Request, end: int) -> None:
        """The request's tokens up to position `end` are in a step."""
        if end > request.charged_len:
            self._shares.charge(request.fairness_id, end - request.charged_len)
            request.charged_len = end

    def weigh(self, waiting: Sequence[Request], running: Sequence[Request]) -> None:
        """Weighs, before a step is planned, what each waiting client has had and what it was promised."""
        self._accounts = {}
        if len(self._live) < 2:
            self._shares.settle(())
            return
        prompts = [request for request in running if request.planned_len - request.scheduled_len > 1]
        behind = dict.fromkeys(request.fairness_id for request in (*waiting, *prompts))
        self._shares.settle(behind)
        if len(behind) < 2:
            return
        self._accounts = {client: self._shares.served(client) for client in self._live}
        for request in running:
            self._accounts[request.fairness_id] += self._promised(request)

    def _promised(self, request: Request) -> float:
        """Returns the tokens that a request is likely to take from where it stands."""
        output = min(float(request.params.max_tokens), self._output) - len(request.output_token_ids)
        return max(0, request.prompt_len - max(request.scheduled_len, request.charged_len)) + max(0.0, output)

    def rank(self, request: Request) -> Rank:
        """Sort key: who is first of several prompts in a step."""
        return (self._accounts.get(request.fairness_id, 0.0), seniority(request))

    def oldest(self, candidates: Sequence[Request]) -> Request:
        """Returns the waiting request that none may overtake: the oldest of the least served client."""
        return min(candidates, key=self.rank) if self._accounts else candidates[0]

    def choose(self, prompts: Sequence[Prompt], count: int) -> list[Prompt]:
        """Returns the `count` waiting requests that may start, in order of seniority.

        Of each client the oldest, then the shortest; of clients in turns.
        """
        queues: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            queues.setdefault(prompt.request.fairness_id if self._accounts else "", []).append(prompt)
        ordered = {
            client: iter([first, *nsmallest(count - 1, others, key=turn)])
            for client, (first, *others) in queues.items()
        }
        chosen = in_turns(ordered, lambda client: self._accounts.get(client, 0.0), self._cost)
        return [prompt for prompt, _ in zip(chosen, range(count), strict=False)]

    def check_integrity(self, unfinished: Sequence[Request]) -> None:
        """Raises AssertionError unless the clients are those of the unfinished requests."""
        assert self._live == Counter(request.fairness_id for request in unfinished), "clients lost or doubled"

    def _cost(self, prompt: Prompt) -> float:
        return prompt.need + min(float(prompt.request.params.max_tokens), self._output)


def may_wait(waiting: Sequence[Request], requests: Sequence[Request], limit: int) -> bool:
    """Whether the outputs of one request may wait although `limit` do: others do, and their client has less
    than an equal share. Any thread may ask, with the scheduler's own list."""
    taken = Counter(request.fairness_id for request in list(waiting))
    client = requests[0].fairness_id
    return bool(taken.keys() - {client}) and is_below_share(taken, client, limit, len(requests))
