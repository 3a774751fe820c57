"""Which consecutive part of a dimension a rank holds.

All partitions are functions of sizes and ranks only, so that every rank can compute everybody's part.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from gpu_service.core.parallel import ParallelContext
from moebius.errors import ConfigError
from moebius.models.config import ModelConfig
from moebius.models.layers.layer import Layer, cached, mixers
from moebius.models.layers.ranks import even_shard

# Numbers of ranks that messages list.
_MOST_RANKS = 128


def stage_layers(config: ModelConfig, parallel: ParallelContext) -> range:
    """Returns decoder layers of a pipeline stage, by their index in the checkpoint."""
    sizes = parallel.stage_sizes
    if sizes:
        begin = sum(sizes[: parallel.stage])
        return range(begin, begin + sizes[parallel.stage])
    shard = even_shard(config.num_layers, parallel.stage, parallel.num_stages)
    return range(shard.begin, shard.end)


def check_divisible(config: ModelConfig, parallel: ParallelContext) -> None:
    """Raises ConfigError naming the size that cannot be divided over the ranks, and what is allowed."""
    size, num_stages = parallel.tp_size, parallel.num_stages
    kinds = list(dict.fromkeys(mixers(config.layers)))
    for mixer in kinds:
        if divided := mixer.indivisible(size):
            allowed = (n for n in range(1, _MOST_RANKS + 1) if not any(kind.indivisible(n) for kind in kinds))
            raise ConfigError(
                f"tensor_parallel_size: {size} does not divide {divided}; allowed for this model: "
                f"{', '.join(map(str, allowed))}"
            )
    widths = (width for layer in config.layers for ffn in layer.ffns for width in ffn.intermediate_sizes)
    narrowest = min(widths, default=size)
    if narrowest < size:
        raise ConfigError(f"tensor_parallel_size: {size} ranks cannot share an MLP of width {narrowest}")
    if config.num_layers < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size: {num_stages} stages for {config.num_layers} layers; "
            f"allowed: 1 to {config.num_layers}"
        )
    sizes = parallel.stage_sizes
    if sizes and sum(sizes) != config.num_layers:
        raise ConfigError(
            f"pipeline_layers: {','.join(map(str, sizes))} are {sum(sizes)} layers together; allowed: "
            f"numbers whose sum is {config.num_layers}, the model's layers"
        )
    for stage in range(num_stages):
        check_stage(config, stage_layers(config, replace(parallel, stage=stage)), num_stages)


def check_stage(config: ModelConfig, stage: range, num_stages: int) -> None:
    """Raises ConfigError where a stage would have no cache of tokens, or attend to what an earlier one chose
    or cached.
    """
    layers = config.layers
    if not cached(layers[stage.start : stage.stop]):
        raise ConfigError(
            f"pipeline_parallel_size: of {num_stages} stages, one would have layers {stage.start} to "
            f"{stage.stop - 1} only, none of which attends; fewer stages are allowed"
        )
    has_choice = False
    for index in stage:
        for mixer in layers[index].mixers:
            if index - mixer.attends_back < stage.start:
                raise ConfigError(
                    f"pipeline_parallel_size: of {num_stages} stages, the one that begins at layer "
                    f"{stage.start} would attend in layer {index} to latents of layer "
                    f"{index - mixer.attends_back}, of an earlier stage; layers that share latents have to "
                    "be in the same stage"
                )
            has_choice = has_choice or mixer.chooses
            if mixer.awaits_choice and not has_choice:
                begins = [i for i, layer in enumerate(layers) if any(m.chooses for m in layer.mixers)]
                raise ConfigError(
                    f"pipeline_parallel_size: {num_stages} stages would begin at layer {index}, which uses "
                    f"the tokens chosen by an earlier layer; stages may begin at layers {begins}"
                )


def rank_layers(config: ModelConfig, parallel: ParallelContext) -> tuple[Layer, ...]:
    """Returns what a rank computes: its stage's layers, with its own heads and widths.

    The vocabulary stays whole: every rank's sampler needs all of it. Raises ConfigError as `check_divisible`.
    """
    _check_divisible(config, parallel.tp_size, parallel.num_stages, parallel.stage_sizes)
    return all_stages_layers(config, parallel)[stage_slice(config, parallel)]


def all_stages_layers(config: ModelConfig, parallel: ParallelContext) -> tuple[Layer, ...]:
    """Returns the layers of all stages, with the heads and widths of one rank."""
    return _all_layers(config, parallel.tp_rank, parallel.tp_size)


# A plan of memory asks a thousand times for the layers of few ranks.
@lru_cache(maxsize=32)
def _all_layers(config: ModelConfig, tp_rank: int, tp_size: int) -> tuple[Layer, ...]:
    return tuple(layer.on_rank(tp_rank, tp_size) for layer in config.layers)


@lru_cache(maxsize=32)
def _check_divisible(config: ModelConfig, tp_size: int, num_stages: int, sizes: tuple[int, ...]) -> None:
    check_divisible(config, ParallelContext(tp_size=tp_size, num_stages=num_stages, stage_sizes=sizes))


def stage_slice(config: ModelConfig, parallel: ParallelContext) -> slice:
    """`stage_layers` as an index."""
    layers = stage_layers(config, parallel)
    return slice(layers.start, layers.stop)
