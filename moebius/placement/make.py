"""From settings to a placement."""

from __future__ import annotations

from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import PlacementConfig
from moebius.errors import UserError
from moebius.placement.layer_ranges import parse_layers
from moebius.placement.placement import Placement
from moebius.placement.statistics import ExpertStatistics
from moebius.placement.strategies import STRATEGIES, Candidates, Pair, Strategy, take_per_layer


def make_placement(config: PlacementConfig, geometry: MoeGeometry) -> Placement:
    """Whole layers first; in all others as many experts as `gpu_experts` or `gpu_experts_ratio` say.

    Deterministic: ranks need not exchange it. Raises UserError naming the setting.
    """
    if config.gpu_experts is not None and config.gpu_experts_ratio is not None:
        raise UserError("gpu_experts and gpu_experts_ratio are both set; only one of them is allowed")
    if config.gpu_experts is not None and config.gpu_experts > geometry.num_experts:
        raise UserError(
            f"gpu_experts: {config.gpu_experts} is not allowed; there are {geometry.num_experts} per layer"
        )
    whole = parse_layers(config.gpu_layers, geometry.moe_layers, geometry.num_layers)
    chosen = [(layer, expert) for layer in whole for expert in range(geometry.num_experts)]
    others = tuple(layer for layer in geometry.moe_layers if layer not in whole)
    if others and (config.gpu_experts or config.gpu_experts_ratio):
        strategy = STRATEGIES[config.placement_strategy]
        counts = _statistics(config, geometry).counts_by_layer() if strategy.needs_statistics else None
        candidates = Candidates(others, geometry.num_experts, config.placement_seed, counts)
        chosen += _take(config, strategy, candidates)
    return Placement.of(geometry, chosen)


def _take(config: PlacementConfig, strategy: Strategy, candidates: Candidates) -> list[Pair]:
    ranking = strategy.rank(candidates)
    if config.gpu_experts is None:
        return ranking[: round((config.gpu_experts_ratio or 0.0) * len(ranking))]
    if strategy.keeps_layer_counts:
        return take_per_layer(ranking, config.gpu_experts)
    return ranking[: config.gpu_experts * len(candidates.layers)]


def _statistics(config: PlacementConfig, geometry: MoeGeometry) -> ExpertStatistics:
    if not config.expert_statistics:
        raise UserError("placement_strategy is 'frequency', but expert_statistics is empty: it names a file")
    statistics = ExpertStatistics.read(config.expert_statistics)
    statistics.check_model(geometry, config.expert_statistics)
    return statistics
