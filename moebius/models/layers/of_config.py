"""From what a family's reader says of a model to its layers: the one place that asks a `ModelConfig` which
kind a layer is.

What a layer's value has no room for is not read, so that `check_switches` can refuse it by name: no switch is
without effect in silence.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from moebius.models.errors import ModelConfigError
from moebius.models.layers.compressed import CompressedAttention, EntryIndexer
from moebius.models.layers.ffn import Dense, Experts, FeedForward, LatentMoE, MoE, NormedMoE
from moebius.models.layers.gqa import GQA, BlockIndexer, Chunk, FullWidthQkNorm, Gate, QkNorm, Window
from moebius.models.layers.latent import MLA, TokenIndexer
from moebius.models.layers.layer import Layer
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.norms import LayerNorm, Norm, RMSNorm
from moebius.models.layers.recurrent import (
    KDA,
    GatedDeltaNet,
    Lightning,
    Mamba2,
    Recurrent,
    SelectiveScan,
    ShortConv,
)
from moebius.models.layers.residual import (
    GatedStreams,
    HyperConnections,
    NextToken,
    NGrams,
    NormedStream,
    Parallel,
    Residual,
    Sequential,
    Shortcut,
    Single,
)

if TYPE_CHECKING:
    from moebius.models.config import LinearAttentionConfig, ModelConfig, RopeConfig


def layers_of(config: ModelConfig) -> tuple[Layer, ...]:
    """Returns the model's layers, those of multi-token prediction at the end.

    Raises ModelConfigError naming two switches that no layer can have together.
    """
    return tuple(_layer(config, index) for index in range(config.num_layers))


def norm_of(config: ModelConfig) -> Norm:
    """Returns the norm that the model's layers and heads have."""
    if not config.mean_norms:
        return RMSNorm(config.rms_norm_eps, config.one_plus_weight_norms)
    if config.one_plus_weight_norms:
        raise _refusal(config, "mean_norms", "one_plus_weight_norms")
    return LayerNorm(config.rms_norm_eps, config.norm_bias)


def _refusal(config: ModelConfig, first: str, second: str, where: str = "") -> ModelConfigError:
    return ModelConfigError(f"{config.model_type}: {first} and {second} are not computed together{where}")


def _refuse(config: ModelConfig, switch: str, **others: object) -> None:
    """Raises ModelConfigError where one of the others is set, `switch` being set."""
    for name, value in others.items():
        if value:
            raise _refusal(config, switch, name)


def _rms_norm(config: ModelConfig, switch: str) -> RMSNorm:
    """Returns the model's norm where `switch` has no other."""
    norm = norm_of(config)
    if not isinstance(norm, RMSNorm):
        raise _refusal(config, switch, "mean_norms")
    return norm


def _plain_norms(config: ModelConfig, switch: str) -> None:
    """Raises ModelConfigError where the model's norms are not those that `switch` has inside."""
    if _rms_norm(config, switch).one_plus_weight:
        raise _refusal(config, switch, "one_plus_weight_norms")


def _layer(config: ModelConfig, index: int) -> Layer:
    half = config.layer_halves[index] if config.layer_halves else None
    mixer = None if half == "mlp" else _mixer(config, index)
    ffn = None if half == "attention" else _ffn(config, index)
    residual = _residual(config, index)
    if isinstance(ffn, NormedMoE) and not isinstance(residual, Sequential | NextToken):
        raise ModelConfigError(
            f"{config.model_type}: moe.own_norms is not computed in layers that are {type(residual).__name__}"
        )
    return Layer(mixer, ffn, norm_of(config), residual)


def _residual(config: ModelConfig, index: int) -> Residual:
    if config.layer_halves:
        return Single()
    if config.shortcut_experts:
        if config.mla is None:
            raise ModelConfigError(f"{config.model_type}: shortcut_experts has no effect without mla")
        return Shortcut(_dense(config))
    if config.mtp is not None and index >= config.num_decoder_layers:
        return NextToken(_sequential(config, index), config.mtp.hidden_first)
    if config.normed_residuals is not None:
        weights = config.normed_residuals
        is_linear = config.linear is not None and index in config.linear.layers
        return NormedStream(weights.linear if is_linear else weights.attention, weights.mlp)
    if config.parallel_halves:
        return Parallel()
    if config.hyper is None:
        return _sequential(config, index)
    if not config.hyper.rank:
        return HyperConnections(config.hyper)
    if not _rms_norm(config, "hyper").one_plus_weight:
        raise ModelConfigError(f"{config.model_type}: hyper.rank has no norms without one_plus_weight_norms")
    ngram = config.ngram
    if ngram is None or index not in ngram.layers:
        return GatedStreams(config.hyper)
    return GatedStreams(config.hyper, NGrams(ngram, ngram.layers.index(index), config.stream_size))


def _sequential(config: ModelConfig, index: int) -> Sequential:
    if config.output_norms:
        output: Any = "both"
    else:
        output = "ffn" if config.moe_output_norms and index in config.moe.layers else "none"
    return Sequential(config.input_norms, output, config.residual_scale, config.layer_scales)


def _mixer(config: ModelConfig, index: int) -> Mixer:
    if config.compressed is not None:
        return _compressed(config, index)
    rope = config.layer_ropes[index] if config.layer_ropes else config.rope
    if config.shortcut_experts and config.mla is not None:
        return _latent(config, index, rope)
    if config.linear is not None and index in config.linear.layers:
        return _recurrent(config, config.linear, index)
    return _grouped(config, index, rope) if config.mla is None else _latent(config, index, rope)


def _compressed(config: ModelConfig, index: int) -> CompressedAttention:
    sizes = config.compressed
    assert sizes is not None
    _plain_norms(config, "compressed")
    _refuse(config, "compressed", mla=config.mla is not None)
    if config.hyper is not None and config.hyper.rank:
        raise _refusal(config, "compressed", "hyper", " where its streams are gated")
    rope = config.layer_ropes[index] if config.layer_ropes else config.rope
    if rope is None:
        raise _refusal(config, "compressed", "layer_ropes", " in layers that do not rotate")
    indexer = None
    if index in sizes.sparse_layers:
        indexer = EntryIndexer(sizes.index_num_heads, sizes.index_head_dim, sizes.top_k)
    return CompressedAttention(
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        q_lora_rank=sizes.q_lora_rank,
        rope_dim=sizes.rope_dim,
        rope=rope,
        window=sizes.window,
        rate=sizes.rates[index],
        output_groups=sizes.output_groups,
        output_rank=sizes.output_rank,
        scale=float(config.head_dim**-0.5),
        eps=config.rms_norm_eps,
        indexer=indexer,
    )


def _recurrent(config: ModelConfig, linear: LinearAttentionConfig, index: int) -> Recurrent:
    sizes: dict[str, Any] = {
        "num_key_heads": linear.num_key_heads,
        "num_value_heads": linear.num_value_heads,
        "key_head_dim": linear.key_head_dim,
        "value_head_dim": linear.value_head_dim,
        "conv_width": linear.conv_width,
        "eps": config.rms_norm_eps,
    }
    if linear.short_conv:
        return ShortConv(**sizes)
    if linear.fixed_decay:
        return Lightning(**sizes, layer=index, num_layers=config.num_layers)
    if linear.step_rank:
        return SelectiveScan(**sizes, step_rank=linear.step_rank)
    if linear.state_space:
        return Mamba2(**sizes)
    if not linear.channel_decay:
        return GatedDeltaNet(**sizes, interleaved=linear.interleaved, sigmoid_gates=linear.sigmoid_gates)
    return KDA(
        **sizes,
        direct_gates=linear.direct_gates,
        decay_bound=linear.decay_bound,
        decay_has_axes=linear.decay_has_axes,
    )


def _latent(config: ModelConfig, index: int, rope: RopeConfig | None) -> MLA:
    mla = config.mla
    assert mla is not None
    _plain_norms(config, "mla")
    gate: Any = "element" if config.element_gate else "head" if config.head_gate else None
    sources, indexer = mla.latent_sources, mla.indexer
    own = None
    if indexer is not None and index in indexer.layers:
        own = TokenIndexer(
            num_heads=indexer.num_heads,
            head_dim=indexer.head_dim,
            top_k=indexer.top_k,
            interleaved=indexer.interleaved,
            pool=indexer.pool,
            reads_hidden=indexer.reads_hidden,
            rotates_last=indexer.rotates_last,
            key_eps=indexer.key_eps,
        )
    return MLA(
        num_heads=config.num_heads,
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        softmax_scale=mla.softmax_scale,
        rope=rope,
        bias=config.attention_bias,
        gate=gate,
        has_sinks=config.attention_sinks,
        latent_eps=mla.latent_eps,
        latent_scale=mla.latent_scale,
        learned_query_growth=mla.learned_query_growth,
        all_from_latent=mla.unrotated_from_latent and rope is None,
        latents_back=index - sources[index] if sources else 0,
        is_sparse=indexer is not None,
        indexer=own,
        shares_latents=index in sources[index + 1 :],
    )


def _grouped(config: ModelConfig, index: int, rope: RopeConfig | None) -> GQA:
    head_dim = config.layer_head_dims[index] if config.layer_head_dims else config.head_dim
    if config.layer_head_dims and config.attention_scale is None:
        raise ModelConfigError(f"{config.model_type}: layer_head_dims has no effect without attention_scale")
    has_sinks = config.attention_sinks and (config.sink_layers[index] if config.sink_layers else True)
    growth = config.unrotated_query_growth, config.unrotated_query_growth_length
    return GQA(
        num_heads=config.layer_num_heads[index] if config.layer_num_heads else config.num_heads,
        num_kv_heads=config.layer_kv_heads[index] if config.layer_kv_heads else config.num_kv_heads,
        head_dim=head_dim,
        value_dim=_value_dim(config, head_dim),
        scale=config.softmax_scale,
        rope=rope,
        eps=config.rms_norm_eps,
        sight=_sight(config, index),
        has_sinks=has_sinks,
        bias=config.attention_bias,
        output_bias=config.output_bias,
        qk_norm=_qk_norm(config),
        unit_norm=config.unit_qk_norm,
        query_growth=growth if growth[0] and rope is None else None,
        gate=_gate(config),
        value_scale=config.value_scale,
        value_norm=config.value_norm,
        keys_are_values=bool(config.keys_as_values) and config.keys_as_values[index],
        limit=config.qkv_limit,
        blocks=_blocks(config, index, rope),
    )


def _value_dim(config: ModelConfig, head_dim: int) -> int:
    if config.value_head_dim is None:
        return head_dim
    alone = {"keys_as_values": config.keys_as_values, "layer_head_dims": config.layer_head_dims}
    _refuse(config, "value_head_dim", **alone)
    if config.value_head_dim > head_dim:
        raise ModelConfigError(
            f"{config.model_type}: value_head_dim is {config.value_head_dim}; allowed: at most head_dim "
            f"({head_dim})"
        )
    return config.value_head_dim


def _sight(config: ModelConfig, index: int) -> Window | Chunk | None:
    window = config.attention_windows[index] if config.attention_windows else None
    chunk = config.attention_chunks[index] if config.attention_chunks else None
    if window is not None:
        if chunk is not None:
            raise _refusal(config, "attention_windows", "attention_chunks", " in one layer")
        return Window(window)
    # Where no sequence is longer than one chunk, there are none.
    return None if chunk is None or chunk >= config.max_model_len else Chunk(chunk)


def _qk_norm(config: ModelConfig) -> QkNorm | FullWidthQkNorm | None:
    if not config.qk_norm:
        return None
    if not config.qk_norm_full_width:
        return QkNorm(norm_of(config), config.qk_norm_after_rope)
    _plain_norms(config, "qk_norm_full_width")
    return FullWidthQkNorm(config.rms_norm_eps, config.qk_norm_after_rope)


def _gate(config: ModelConfig) -> Gate | None:
    """Gates of elements are columns of the projection of queries, keys and values."""
    if config.output_gate:
        _refuse(
            config,
            "output_gate",
            element_gate=config.element_gate,
            value_head_dim=config.value_head_dim is not None,
            keys_as_values=config.keys_as_values,
            layer_head_dims=config.layer_head_dims,
        )
        of: Any = "query"
    elif config.element_gate:
        _refuse(config, "element_gate", attention_bias=config.attention_bias, head_gate=config.head_gate)
        of = "element"
    elif config.head_gate:
        of = "head"
    else:
        return None
    return Gate(of, config.gate_activation)


def _blocks(config: ModelConfig, index: int, rope: RopeConfig | None) -> BlockIndexer | None:
    """One choice and one set of small queries stand for all layers."""
    sizes = config.block_indexer
    if sizes is None or index not in sizes.layers:
        return None
    _refuse(
        config,
        "block_indexer",
        layer_kv_heads=config.layer_kv_heads,
        layer_num_heads=config.layer_num_heads,
        attention_windows=config.attention_windows,
        attention_chunks=config.attention_chunks,
    )
    if rope is None:
        raise _refusal(config, "block_indexer", "layer_ropes", " in layers that do not rotate")
    return BlockIndexer(
        sizes.head_dim,
        sizes.block_size,
        sizes.top_blocks,
        sizes.local_blocks,
        _rms_norm(config, "block_indexer"),
        sizes.shared_heads,
        sizes.rotary_dim,
    )


def _dense(config: ModelConfig, limit: float = math.inf) -> Dense:
    return Dense(
        intermediate_size=config.intermediate_size,
        activation=config.activation,
        limit=limit,
        alpha=config.moe.expert_alpha,
    )


def _ffn(config: ModelConfig, index: int) -> FeedForward:
    moe = config.moe
    limit = config.mlp_limits[index] if config.mlp_limits else math.inf
    if index not in moe.layers:
        return _dense(config, limit)
    experts = Experts(
        moe.intermediate_size,
        moe.expert_activation,
        moe.expert_alpha,
        moe.expert_limits[index] if moe.expert_limits else moe.expert_limit,
        moe.expert_bias,
    )
    shared = None
    if moe.shared_intermediate_size:
        shared = Dense(
            intermediate_size=moe.shared_intermediate_size,
            activation=config.activation,
            limit=limit,
            alpha=moe.expert_alpha,
        )
    if moe.own_norms:
        return _normed_moe(config, experts, shared)
    parts: dict[str, Any] = {
        "router": moe.router,
        "experts": experts,
        "shared": shared,
        "shared_gate": moe.shared_gate,
        "shared_fused": moe.shared_fused,
        "output_scale": moe.output_scale,
        "hashed_tokens": config.vocab_size if index in moe.hash_layers else 0,
        "kinds": moe.kinds,
    }
    return LatentMoE(**parts, latent_size=moe.latent_size) if moe.latent_size else MoE(**parts)


def _normed_moe(config: ModelConfig, experts: Experts, shared: Dense | None) -> NormedMoE:
    router = config.moe.router
    if shared is None:
        raise ModelConfigError(f"{config.model_type}: moe.own_norms has no effect without shared experts")
    if shared.limit != math.inf:
        raise _refusal(config, "moe.own_norms", "mlp_limits")
    if router.weighs_inputs or router.num_zero_experts:
        raise _refusal(config, "moe.own_norms", "experts that weigh inputs or have no weights")
    norm, eps = norm_of(config), config.rms_norm_eps
    return NormedMoE(router=router, experts=experts, shared=shared, norm=norm, router_eps=eps)
