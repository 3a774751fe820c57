"""Invariant: an engine's greedy tokens do not depend on where experts are, nor on their moving meanwhile."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from gpu_service.experts.adaptive.exchange import SlotExchanges, Wanted
from gpu_service.experts.local_client import LocalExpertClient
from moebius.config import ExpertConfig, MoebiusConfig, PlacementConfig
from tests.equality.test_engine_real_model import config_for, engine_tokens, prompts
from tests.helpers.expert_cluster import running_cluster
from tests.helpers.tiny_models import TINY_MODELS, make_tiny_model

MODEL = "glm4_moe"
PLACEMENTS: list[dict[str, Any]] = [
    {"gpu_experts": 3},
    {"gpu_layers": "2"},
    {"gpu_experts_ratio": 0.5, "placement_strategy": "random"},
    {"gpu_experts_ratio": 0.7, "placement_strategy": "front-loading"},
]


def placed(config: MoebiusConfig, **placement: Any) -> MoebiusConfig:
    """Returns the configuration with some experts on the device."""
    return config.model_copy(update={"placement": PlacementConfig(**placement)})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model with shared experts and a dense first layer."""
    directory = tmp_path_factory.mktemp("placement")
    make_tiny_model(MODEL, directory)
    return directory


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    """Returns tokens with all experts on their servers."""
    return engine_tokens(config_for(model), prompts(211))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: "-".join(map(str, p.values())))
def test_tokens_are_the_same(model: Path, wanted: list[list[int]], placement: dict[str, Any]) -> None:
    """Parts of layers, whole layers, anything between; the other part in process."""
    assert engine_tokens(placed(config_for(model), **placement), prompts(211)) == wanted


def test_everything_resident_needs_no_servers(model: Path, wanted: list[list[int]]) -> None:
    """A plain engine: no expert transport is opened, so none need be there."""
    config = config_for(model).model_copy(update={"experts": ExpertConfig(expert_transport="mailbox")})
    assert engine_tokens(placed(config, gpu_experts_ratio=1.0), prompts(211)) == wanted


def test_mailbox_servers_compute_the_rest(model: Path, wanted: list[list[int]], tmp_path: Path) -> None:
    """The real servers, which hold no resident expert and never see its id."""
    placement = PlacementConfig(gpu_experts=5)
    with running_cluster(model, tmp_path, dtype="float32", placement=placement, split_count=2) as cluster:
        experts = cluster.config.experts
        config = config_for(model).model_copy(update={"experts": experts})
        assert engine_tokens(placed(config, gpu_experts=5), prompts(211)) == wanted


def test_experts_move_under_a_running_engine(
    model: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Slots change before nearly every step; expert servers are asked for just what is not resident."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[SlotExchanges] = []
    asked: set[tuple[int, int]] = set()
    advance, submit = SlotExchanges.advance, LocalExpertClient.submit
    experts = int(TINY_MODELS[MODEL].changes["n_routed_experts"])
    turn = itertools.count()

    def advancing(self: SlotExchanges, _: Any) -> None:
        """In place of what the placement wants: experts in turn."""
        made[:] = [self]
        moves = []
        for layer in (1, 2):
            held = [expert for expert in self._resident.slots[layer].expert_of_slot if expert >= 0]
            if held:
                moves.append(Wanted(layer, next(turn) % experts, held[0]))
        advance(self, moves)

    def noting(self: Any, layer: int, hidden: Any, ids: Any, weights: Any) -> Any:
        asked.update((layer, expert) for expert in ids.flatten().tolist() if expert >= 0)
        assert not made or not set(ids.flatten().tolist()) & set(made[0]._resident.experts(layer))
        return submit(self, layer, hidden, ids, weights)

    monkeypatch.setattr(SlotExchanges, "advance", advancing)
    monkeypatch.setattr(LocalExpertClient, "submit", noting)
    config = placed(config_for(model), gpu_experts=2, drop_resident="keep")
    # Its reference asks for residents, too.
    quiet = config.experts.model_copy(update={"self_test_layers": 0})
    assert engine_tokens(config.model_copy(update={"experts": quiet}), prompts(211)) == wanted
    made[0]._resident.check_integrity()
    assert made[0].count > 10
    assert {layer for layer, _ in asked} == {1, 2}
    assert all(expert < experts for _, expert in asked)
