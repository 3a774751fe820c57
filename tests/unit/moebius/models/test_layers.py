"""Guards what a model's layers say of themselves against what is composed of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from gpu_service.cache.kv_cache import CACHES, make_cache, page_bytes
from gpu_service.cache.state_cache import make_states, state_bytes
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.partition import rank_layers
from gpu_service.models.compose import MIXERS, RESIDUALS, ROUTED, build_model
from moebius.errors import ConfigError
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.layers.ffn import Dense, Experts, FeedForward, NormedMoE
from moebius.models.layers.gqa import GQA, BlockIndexer, Gate, Window
from moebius.models.layers.layer import Layer, mixers, places, states
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.norms import RMSNorm
from moebius.models.layers.recurrent import Recurrent
from moebius.models.layers.residual import GatedStreams, Parallel, Residual, Shortcut
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig
from moebius.models.read import read_model_config
from tests.helpers.layer_values import common_sizes
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model

# Between them every kind of mixer, feed-forward block and residual stream.
NAMES = (
    "qwen3_moe",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "qwen3_next",
    "kimi_linear",
    "granitemoehybrid",
    "jamba",
    "lfm2_moe",
    "minimax",
    "nemotron_h_latent_dense",
    "longcat_flash",
    "cohere2_moe",
    "gemma4_text",
    "qwen4_exp_text_three_streams_bias_tied",
)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    found = {}
    for name in NAMES:
        directory = tmp_path_factory.mktemp(name)
        write_tiny_model(TINY_MODELS[name], directory, seed=3)
        found[name] = read_model_config(directory)
    return found


def leaves(base: type) -> set[str]:
    """Returns the names of all classes below one that have none below themselves."""
    # By names: a class with slots is made of one without, which may still be there.
    found: dict[str, set[str]] = {}
    kinds = [base]
    for kind in kinds:
        below = [sub for sub in kind.__subclasses__() if sub.__name__ != kind.__name__]
        found.setdefault(kind.__name__, set()).update(sub.__name__ for sub in below)
        kinds += below
    return {name for name, below in found.items() if not below}


def test_every_kind_has_one_module() -> None:
    """A value that no table names could be written down and not be computed."""
    assert leaves(Mixer) == {kind.__name__ for kind in MIXERS}
    assert leaves(FeedForward) <= {kind.__name__ for kind in (Dense, *ROUTED)}  # type: ignore[attr-defined]
    assert set(get_args(Residual)) == set(RESIDUALS)
    assert {kind for kind in MIXERS if not issubclass(kind, Recurrent)} == set(CACHES)


def test_the_models_here_have_every_kind(configs: dict[str, ModelConfig]) -> None:
    """Otherwise the comparisons below would leave some out."""
    layers = [layer for config in configs.values() for layer in config.layers]
    assert {type(mixer) for mixer in mixers(layers)} == set(MIXERS)
    assert {type(ffn) for layer in layers for ffn in layer.ffns} == {Dense, *ROUTED}
    kinds = {kind.__name__ for kind in RESIDUALS} - {"NextToken", "Eagle3"}  # of served heads alone
    assert {type(layer.residual).__name__ for layer in layers} == kinds


@pytest.mark.parametrize("name", NAMES)
def test_layers_count_the_weights_of_their_mixers(name: str, configs: dict[str, ModelConfig]) -> None:
    """Layers count all weights up to norms, biases and vectors of heads: what the planner and the scheduler's
    costs go by.
    """
    config = configs[name]
    model = build_model(config)
    for layer, module in zip(config.layers, model.model.layers, strict=True):
        found = [_mixer_of(module, index) for index in range(len(layer.mixers))]
        for mixer, own in zip(layer.mixers, found, strict=True):
            matrices = [p.numel() for p in own.parameters() if p.dim() > 1 and min(p.shape) > 1]
            counted = mixer.weight_elements(config.hidden_size)
            assert abs(counted - sum(matrices)) <= 0.12 * sum(matrices), type(mixer).__name__


def _mixer_of(module: nn.Module, index: int) -> nn.Module:
    for name in ("self_attn", "linear_attn", "mamba", "conv", "mixer"):
        found = getattr(module, name, None)
        if found is not None:
            mixer: nn.Module = found[index] if isinstance(found, nn.ModuleList) else found
            return mixer
    raise AssertionError(f"{type(module).__name__} has no mixer")


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_caches_and_states_are_what_layers_declare(
    name: str, stages: int, configs: dict[str, ModelConfig]
) -> None:
    """Every rank has the bytes that are planned, and a place of its own for each part that keeps
    something.
    """
    config, dtype = configs[name], torch.float32
    for stage in range(stages):
        try:
            layers = rank_layers(config, ParallelContext(stage=stage, num_stages=stages))
        except ConfigError:
            continue  # A stage would attend to what another one holds.
        cache, held = make_cache(layers, 3, 4, dtype), make_states(layers, 2, dtype)
        assert cache.nbytes == 3 * page_bytes(layers, 4, dtype, dtype)
        assert (0 if held is None else held.nbytes) == 3 * state_bytes(layers, dtype)
        found = [place for layer in places(layers) for place in layer]
        taken = [place.state for place in found if place.state is not None]
        assert taken == list(range(len(states(layers))))
        own = {place.cache for place in found if place.cache is not None}
        assert own == set(range(cache.num_layers))


@pytest.mark.parametrize("name", NAMES)
def test_ranks_have_equal_parts(name: str, configs: dict[str, ModelConfig]) -> None:
    """Two ranks' heads are the model's: neither computes what no rank, or both, would have to."""
    for layer in configs[name].layers:
        if any(mixer.indivisible(2) for mixer in layer.mixers):
            continue
        ranks: list[Layer] = [layer.on_rank(rank, 2) for rank in range(2)]
        for mixer, first, second in zip(layer.mixers, *(rank.mixers for rank in ranks), strict=True):
            assert first.score_width + second.score_width == mixer.score_width
            assert first.widest_row == second.widest_row <= mixer.widest_row


def _attention(**changes: Any) -> GQA:
    return common_sizes().gqa(RopeConfig(1e4, 8), **changes)


BLOCKS = BlockIndexer(head_dim=4, block_size=4, top_blocks=2, local_blocks=1, norm=RMSNorm(1e-5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_dim": 9}, "values that are longer than keys"),
        ({"value_dim": 4, "keys_are_values": True}, "shorter values that are keys"),
        ({"value_dim": 4, "gate": Gate("query")}, "gates made by the query projection"),
        ({"gate": Gate("element"), "bias": True}, "gates of elements beside biases"),
        ({"blocks": BLOCKS, "sight": Window(4)}, "within a window"),
        ({"blocks": BLOCKS, "rope": None}, "without rotation"),
    ],
)
def test_attention_that_no_kernel_computes_can_not_be_written_down(
    changes: dict[str, Any], message: str
) -> None:
    """Its value is refused where it is made, whichever family makes it."""
    with pytest.raises(ModelConfigError, match=message):
        replace(_attention(), **changes)


def test_halves_that_a_residual_stream_does_not_go_around_are_refused() -> None:
    """Such layers would be computed as if they had others."""
    common, router = common_sizes(), RouterConfig(4, 2, "softmax")
    dense, norm = common.dense(), common.norm
    normed = NormedMoE(router=router, experts=Experts(3), shared=dense, norm=norm, router_eps=1e-5)
    with pytest.raises(ModelConfigError, match="layers that are Parallel"):
        Layer(_attention(), normed, norm, Parallel())
    with pytest.raises(ModelConfigError, match="Shortcut have latent attention only"):
        Layer(_attention(), dense, norm, Shortcut(dense))
    with pytest.raises(ModelConfigError, match="GatedStreams have norms that hold their weight less 1"):
        Layer(_attention(), dense, norm, GatedStreams(2, 4))
    with pytest.raises(ModelConfigError, match="always active ones that do not clamp"):
        replace(normed, shared=replace(dense, limit=7.0))
