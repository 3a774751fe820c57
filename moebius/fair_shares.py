"""Shares of whatever several clients wait for: deficit round robin, with what was served as the deficit.

Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) gives each client that waits a quantum per round
and lets it spend what it has saved. With an infinitely small quantum, the next one is the client that
has been served least since all of them wait. This form needs no round, and takes costs that are known
afterwards only, as those of answers are. It is the virtual token counter of Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024), which bounds the difference between two clients that wait,
however long they do.

A client that did not wait has saved nothing: it begins where the one that was served least is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import count
from typing import TypeVar

T = TypeVar("T")


class FairShares:
    """What each client was served, in whatever unit the caller counts. Same calls, same results."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._least = 0.0

    def served(self, client: str) -> float:
        """Returns what the client was served, or counts as served for the time in which it did not wait."""
        return max(self._served.get(client, 0.0), self._least)

    def charge(self, client: str, cost: float) -> None:
        """The client was served that much more."""
        self._served[client] = self.served(client) + cost

    def settle(self, waiting: Collection[str]) -> None:
        """Has to be called with all clients that wait, before one is chosen: no others can save up.

        Where none waits there is enough for all, and no client owes anything.
        """
        if not waiting:
            self._served.clear()
            self._least = 0.0
            return
        self._least = min(map(self.served, waiting))
        self._served = {client: cost for client, cost in self._served.items() if cost > self._least}


def in_turns(
    queues: Mapping[str, Iterator[T]], served: Callable[[str], float], cost: Callable[[T], float]
) -> Iterator[T]:
    """Yields what waits in each client's queue, in the order in which it is served: always the next one of
    the client that was served least, what it was given here included. Ties: the order of `queues`.
    """
    order = count()
    heads = [(served(client), next(order), queue) for client, queue in queues.items()]
    heapify(heads)
    while heads:
        least, place, queue = heads[0]
        item = next(queue, None)
        if item is None:
            heappop(heads)
            continue
        heapreplace(heads, (least + cost(item), place, queue))
        yield item


def has_place(taken: Mapping[str, int], client: str, limit: int, wanted: int = 1) -> bool:
    """Whether a client may have `wanted` places more, by how many each has `taken` of `limit`.

    When all are taken, one with less than its equal share still gets some, so that no client is kept out by
    others who came first; there are at most twice as many places in use then.
    """
    return sum(taken.values()) + wanted <= limit or is_below_share(taken, client, limit, wanted)


def is_below_share(taken: Mapping[str, int], client: str, limit: int, wanted: int = 1) -> bool:
    """Returns whether a client has no more than an equal share of `limit` with `wanted` places more.

    Clients that have something count, and one other at least: who is alone has been first.
    """
    others = sum(1 for name, places in taken.items() if places and name != client)
    return taken.get(client, 0) + wanted <= limit // (1 + max(1, others))
