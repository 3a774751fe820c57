"""How many layers each pipeline stage has: by the memory and the speed of its GPUs, not equal numbers.

Stages take turns: a step lasts as long as all of them together, and a layer as long as the GPU of its stage
takes to read it. Experts on GPUs save more than that, so as many as possible come first; then speed, of which
a little is given for a longer KV cache, whose pages are as many on every stage as on the one with least room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from moebius.models.layers.ranks import even_shard

# How much longer a token may take for the sake of the KV cache, and how exactly that is made the longest.
LONGER, _EXACT_TOKENS = 1.05, 64


@dataclass(frozen=True, slots=True)
class LayerNeeds:
    """What one layer takes of a GPU of its stage, bytes; filled by `stages`."""

    fixed: int  # Parameters and states of requests.
    token: float  # KV cache of a token.
    experts: int  # All of its routed experts that may be resident.
    read: float  # Of its parameters, by a token.
    read_experts: float  # Of its experts, by a token, if all of them are resident.


@dataclass(frozen=True, slots=True)
class StageRoom:
    """What a stage's smallest GPU has, bytes and bytes per second; filled by `stages`."""

    nbytes: int  # For its layers.
    ring: int  # What else is free where all experts are resident.
    bandwidth: float


Division = tuple[int, ...]
"""The number of layers of each stage."""
MayBe = Callable[[range], bool]
"""Whether these layers may be a stage."""


def equal_division(layers: int, stages: int) -> Division:
    """Returns nearly equal numbers, as an engine that is given none has them."""
    return tuple(len(even_shard(layers, stage, stages).indices) for stage in range(stages))


def divide_layers(
    layers: Sequence[LayerNeeds],
    rooms: Sequence[StageRoom],
    tokens: int,
    shares: Sequence[float],
    may_be: MayBe = lambda stage: True,
) -> Division | None:
    """Returns the number of layers of each stage; None: no division has room for them.

    `tokens`: of KV cache, for which every stage must have room. `shares`: of all experts that may be
    resident, ascending; the largest with which a division fits is taken. Of those that fit then, the one with
    the longest KV cache with which a token takes at most `LONGER` as long as with the fastest, and no longer
    than with equal numbers.
    """
    table = _Divisions(layers, rooms, cache(may_be))
    # All of them may fit where nearly all do not, whose ring takes memory; below that fewer always fit.
    low, high, best = 0, len(shares) - 2, table.fastest(tokens, shares[-1])
    share = shares[-1]
    while best is None and low < high:
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if table.fastest(tokens, shares[middle]) is None else (middle, high)
    if best is None and high >= 0:
        share, best = shares[low], table.fastest(tokens, shares[low])
    if best is None:
        return None
    seconds, found = best
    limit = seconds * LONGER
    equal = table.seconds(equal_division(len(layers), len(rooms)), tokens, share)
    if equal is not None:
        limit = min(limit, max(equal, seconds))
    fits, too_many = tokens, table.most_tokens(share)
    while too_many - fits > _EXACT_TOKENS:
        middle = (fits + too_many) // 2
        longer = table.fastest(middle, share)
        if longer is None or longer[0] > limit:
            too_many = middle
        else:
            fits, found = middle, longer[1]
    return found


class _Divisions:
    """Sums over consecutive layers, and the best ways to divide them."""

    def __init__(self, layers: Sequence[LayerNeeds], rooms: Sequence[StageRoom], may_be: MayBe) -> None:
        names = ("fixed", "token", "experts", "read", "read_experts")
        self._sums: list[list[float]] = [
            list(accumulate((getattr(each, name) for each in layers), initial=0)) for name in names
        ]
        self._rooms, self._may_be, self._count = rooms, may_be, len(layers)

    def most_tokens(self, share: float) -> int:
        """Returns more tokens than any division has room for."""
        fixed, token, experts, _, _ = (each[-1] for each in self._sums)
        room = sum(room.nbytes + room.ring for room in self._rooms) - fixed - share * experts
        return int(room / token) + 1 if token else 0

    def seconds(self, division: Division, tokens: int, share: float) -> float | None:
        """Returns how long a token takes; None: there is no room."""
        total, begin = 0.0, 0
        for number, size in enumerate(division):
            seconds = self._stage(number, begin, begin + size, tokens, share)
            if seconds is None:
                return None
            total, begin = total + seconds, begin + size
        return total

    def fastest(self, tokens: int, share: float) -> tuple[float, Division] | None:
        """Returns the seconds of a token with the fastest division, and that; None: there is no room."""
        # The fastest way to each layer at which the next stage may begin.
        reached: dict[int, tuple[float, Division]] = {0: (0.0, ())}
        for number in range(len(self._rooms)):
            after = len(self._rooms) - number - 1
            ends = range(number + 1, self._count - after + 1) if after else (self._count,)
            ways: dict[int, tuple[float, Division]] = {}
            for end in ends:
                for begin, (until, division) in reached.items():
                    seconds = self._stage(number, begin, end, tokens, share)
                    if seconds is not None and (end not in ways or until + seconds < ways[end][0]):
                        ways[end] = until + seconds, (*division, end - begin)
            reached = ways
        return reached.get(self._count)

    def _stage(self, number: int, begin: int, end: int, tokens: int, share: float) -> float | None:
        """Returns how long a token takes in a stage of these layers; None: it cannot be one."""
        if begin >= end:
            return None
        room = self._rooms[number]
        fixed, token, experts, read, read_experts = (each[end] - each[begin] for each in self._sums)
        left = room.nbytes + (room.ring if share >= 1 else 0) - fixed - share * experts
        if left < tokens * token or not self._may_be(range(begin, end)):
            return None
        return (read + share * read_experts) / room.bandwidth
