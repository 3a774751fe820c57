"""Guards what ranks that fetch conclude from one another: the same prices and maps on all at every step."""

from __future__ import annotations

import pytest
import torch

from gpu_service.core.parallel import SoloCollectives
from gpu_service.experts.fetching.agreement import FetchAgreement
from gpu_service.experts.fetching.slots import FetchState
from tests.helpers.fetching_layers import fetch_state
from tests.helpers.resident_layers import Shape
from tests.helpers.stored_experts import MadeServer, tensor_split

SHAPE = Shape(hidden=64, intermediate=16, experts=6, top_k=2)
SERVERS = [MadeServer(SHAPE, "int8", part, 2, n) for n, part in enumerate(tensor_split(SHAPE, 1))]
ADDRESSES = torch.ones((2, 1, 6), dtype=torch.int64)
PRICES = [(16e-6, 48e-6), (17e-6, 49e-6)]


class Rows(SoloCollectives):
    """Gathers the rows of all ranks of this process."""

    def __init__(self) -> None:
        self.ranks: list[FetchAgreement] = []

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([rank.row for rank in self.ranks])


def world(num_ranks: int = 3) -> tuple[list[FetchState], list[FetchAgreement]]:
    """Returns ranks whose slots are filled, and which have not offered anything yet."""
    group = Rows()
    states = [fetch_state(SERVERS, 2, ranks=(rank, num_ranks))[0] for rank in range(num_ranks)]
    group.ranks = [FetchAgreement(state, group, num_ranks) for state in states]
    for state in states:
        state.places.copy_(torch.arange(12).view(2, 6))
        state.maps.fill_(1)
    return states, group.ranks


def offer(
    rank: FetchAgreement,
    addresses: torch.Tensor | None = ADDRESSES,
    prices: list[tuple[float, float]] = PRICES,
    is_changed: bool = False,
) -> None:
    """The host's part of a step."""
    rank.row.copy_(rank.values(prices, addresses, is_changed))


def agree(ranks: list[FetchAgreement]) -> None:
    """The device's part of a step, on all ranks."""
    for rank in ranks:
        rank.agree()


def test_prices_are_the_first_ranks_once_all_may_copy() -> None:
    """Until the last rank has opened its segments nothing is worth a copy on any."""
    states, ranks = world()
    for number, rank in enumerate(ranks):
        agree(ranks)
        assert not any(state.prices.any() for state in states)
        offer(rank, prices=[(price * (1 + number), 1.0) for price, _ in PRICES])
    agree(ranks)
    for state in states:
        assert torch.equal(state.prices, torch.tensor([(16e-6, 1.0), (17e-6, 1.0)]))
    offer(ranks[1], None)
    agree(ranks)
    assert not any(state.prices.any() for state in states)


def test_other_experts_on_a_rank_are_not_copied() -> None:
    """Ranks that may read different experts would choose differently."""
    states, ranks = world()
    fewer = ADDRESSES.clone()
    fewer[1, 0, 3] = 0
    for rank, addresses in zip(ranks, (ADDRESSES, fewer, ADDRESSES), strict=True):
        offer(rank, addresses)
    agree(ranks)
    assert not any(state.prices.any() for state in states)
    offer(ranks[1], ADDRESSES * 7)
    agree(ranks)
    assert all(state.prices.all() for state in states)


@pytest.mark.parametrize("number", range(3))
def test_a_change_on_any_rank_empties_the_slots_of_all_once(number: int) -> None:
    """What was copied from memory that one rank's host gave up is in no slot any more, on any rank."""
    states, ranks = world()
    for rank in ranks:
        offer(rank)
    agree(ranks)
    assert all((state.maps == 1).all() and (state.places >= 0).all() for state in states)
    offer(ranks[number], is_changed=True)
    agree(ranks)
    assert all((state.maps == -1).all() and (state.places == -1).all() for state in states)
    for state in states:
        state.places.fill_(4)
    agree(ranks)
    offer(ranks[number])
    agree(ranks)
    assert all((state.places == 4).all() for state in states)
