"""Invariant: ranks that exchange experts together compute every resident expert once in every step.

Ranks are threads of this process with residents of a real checkpoint, and meet at every step.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gpu_service.core.parallel import ParallelContext
from gpu_service.experts.adaptive import agreed
from gpu_service.experts.adaptive.agreed import AgreedExchanges
from gpu_service.experts.adaptive.exchange import Wanted
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.resident.make import make_resident_experts
from gpu_service.experts.streaming.ring import HostTransfers
from moebius.checkpoint.errors import CheckpointError
from moebius.config import ModelConfigSection, MoebiusConfig, PlacementConfig
from moebius.models.read import read_geometry
from tests import tolerances
from tests.helpers.checkpoints import TinyMoe

WAIT_S = 60.0
UNREADABLE = 5  # An expert that one rank cannot read.


class Meeting:
    """Where the threads of `size` ranks give each other the largest of their numbers."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: dict[int, torch.Tensor] = {}

    def largest(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a rank's `elementwise_largest`."""

        def agree(values: torch.Tensor) -> torch.Tensor:
            self.values[rank] = values
            self.barrier.wait(WAIT_S)
            found = torch.stack(list(self.values.values())).amax(0)
            self.barrier.wait(WAIT_S)
            return found

        return agree


class Ranks:
    """The residents and exchanges of all ranks of a stage."""

    def __init__(self, directory: Path, size: int, whole: bool) -> None:
        self.geometry = read_geometry(TinyMoe(num_layers=2, num_experts=8, top_k=8).write(directory))
        config = MoebiusConfig(
            model=ModelConfigSection(model=str(directory)), placement=PlacementConfig(gpu_experts=3)
        )
        self.servers = LocalExpertClient(str(directory), self.geometry, torch.float32)
        self.meeting = Meeting(size)
        self.residents: list[ResidentExperts] = []
        self.exchanges: list[AgreedExchanges] = []
        for rank in range(size):
            place = ParallelContext(rank, size, holds_whole_experts=whole)
            resident = make_resident_experts(config, self.geometry, torch.device("cpu"), torch.float32, place)
            assert resident is not None
            self.residents.append(resident)
            ends = HostTransfers(), None, lambda nbytes, seconds: None, place, self.meeting.largest(rank)
            self.exchanges.append(AgreedExchanges(resident, *ends))

    def check(self) -> None:
        """Between two steps: all ranks agree, and their sums are what servers compute of the same experts."""
        ids = torch.arange(self.geometry.num_experts, dtype=torch.int32)[None, :]
        for layer in self.geometry.moe_layers:
            served = {tuple(one.cpu_ids(layer, ids)[0].tolist()) for one in self.residents}
            assert len(served) == 1
            (asked,) = served
            here = [expert for expert, left in enumerate(asked) if left < 0]
            assert all(one.experts(layer) == tuple(here) for one in self.residents)
            hidden_states = torch.randn(1, self.geometry.hidden_size)
            weights = torch.ones(1, self.geometry.num_experts)
            total = torch.zeros(1, self.geometry.hidden_size)
            for one in self.residents:
                total = one.forward(layer, hidden_states, ids, weights, total)
            held = ids.clone()
            held[0, [expert for expert in range(ids.shape[1]) if expert not in here]] = -1
            wanted = self.servers.collect(self.servers.submit(layer, hidden_states, held, weights))
            assert (total - wanted).abs().max() <= tolerances.EXPERTS_SUMMED_APART * wanted.abs().max()

    def run(self, enough: Callable[[], bool], before: Callable[[int, random.Random], None]) -> None:
        """Runs steps on all ranks until it is enough; `before` is called by each rank before each."""

        def steps(rank: int) -> None:
            rng, exchanges, barrier = random.Random(rank), self.exchanges[rank], self.meeting.barrier
            end, goes_on = time.monotonic() + WAIT_S, True
            try:
                while goes_on:
                    before(rank, rng)
                    exchanges.advance(self.proposals(rank, rng))
                    if barrier.wait(WAIT_S) == 0:
                        self.check()
                        self.goes_on = not enough()
                        assert time.monotonic() < end, "too few exchanges"
                    barrier.wait(WAIT_S)
                    goes_on = self.goes_on
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.residents)) as pool:
            for done in [pool.submit(steps, rank) for rank in range(len(self.residents))]:
                done.result()
        for one, exchanges in zip(self.residents, self.exchanges, strict=True):
            exchanges.close()
            one.check_integrity()

    def proposals(self, rank: int, rng: random.Random) -> list[Wanted]:
        """Returns exchanges that may be possible or not, also into empty slots; of followers they count
        for nothing.
        """
        layers, experts = self.geometry.moe_layers, self.geometry.num_experts
        return [
            Wanted(rng.choice(layers), rng.randrange(experts), rng.randrange(-1, experts)) for _ in range(2)
        ]


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have a turn every third step."""
    monkeypatch.setattr(agreed, "TURN_STEPS", 3)


@pytest.mark.parametrize(("size", "whole"), [(2, True), (4, True), (2, False)])
def test_every_resident_expert_is_computed_once(tmp_path: Path, size: int, whole: bool) -> None:
    """While experts move, one rank reads late, cannot read one of them, and its server finds damage."""
    ranks = Ranks(tmp_path, size, whole)
    broken, may_read = ranks.residents[-1], threading.Event()
    read = broken.packed

    def packed(layer: int, expert: int) -> torch.Tensor:
        assert may_read.wait(WAIT_S)
        if expert == UNREADABLE:
            raise CheckpointError("the file is gone")
        return read(layer, expert)

    broken.packed = packed  # type: ignore[method-assign]
    calls = [0]

    def before(rank: int, rng: random.Random) -> None:
        if rank == size - 1:
            calls[0] += 1
            if calls[0] % 40 == 0:
                ranks.exchanges[rank].distrust()
            if calls[0] % 10 == 0:
                may_read.set()
            if calls[0] % 10 == 4:
                may_read.clear()

    def enough() -> bool:
        found = calls[0] > 90 and sum(one.count for one in ranks.exchanges) >= 12
        if found:
            may_read.set()
        return found

    ranks.run(enough, before)
