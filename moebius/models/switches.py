"""Which switches of a `ModelConfig` are computed together; all others are refused by name.

A switch is a field whose value is not its default. Each kind of attention and of layer reads its own; one
that a kind does not read would be without effect, and the answers wrong in silence. `check_switches` is
called when a configuration is read, and when a model is composed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from moebius.models.config import ModelConfig, ModelConfigError

# Of grouped-query attention alone.
_GROUPED = frozenset(
    {
        "qk_norm",
        "qk_norm_full_width",
        "qk_norm_after_rope",
        "unit_qk_norm",
        "unrotated_query_growth",
        "output_gate",
        "attention_windows",
        "attention_chunks",
        "attention_scale",
        "layer_num_heads",
        "layer_kv_heads",
        "layer_head_dims",
        "sink_layers",
        "value_head_dim",
        "value_scale",
        "value_norm",
        "qkv_limit",
        "keys_as_values",
        "block_indexer",
    }
)
# Of `DecoderLayer` alone: where norms are, and what is done to what a half of a layer adds.
_HALVES = frozenset(
    {"input_norms", "output_norms", "moe_output_norms", "residual_scale", "layer_scales", "moe.own_norms"}
)
# Layers of other kinds; each takes the place of all others.
_LAYERS = ("layer_halves", "shortcut_experts", "normed_residuals", "parallel_halves", "hyper")
# What is not read where the switch on the left is set. Pairs count both ways.
_APART: dict[str, frozenset[str]] = {
    "mla": _GROUPED | {"compressed", "mean_norms", "one_plus_weight_norms", "output_bias", "gate_activation"},
    # One family: its layers have norms and projections of their own.
    "compressed": _GROUPED
    | _HALVES
    | {
        "mean_norms",
        "one_plus_weight_norms",
        "attention_bias",
        "output_bias",
        "head_gate",
        "element_gate",
        "attention_sinks",
        "linear",
        "layer_halves",
        "shortcut_experts",
        "normed_residuals",
        "parallel_halves",
    },
    **{layer: _HALVES.union(_LAYERS) - {layer} for layer in _LAYERS},
    "linear": frozenset({"shortcut_experts"}),
    "mean_norms": frozenset({"one_plus_weight_norms", "qk_norm_full_width", "block_indexer"}),
    "one_plus_weight_norms": frozenset({"qk_norm_full_width"}),
    "output_norms": frozenset({"moe_output_norms"}),
    # The embedding is the head.
    "tie_word_embeddings": frozenset({"head_bias"}),
    # Norms of its own around the experts, of the stream itself; nothing else of a `MoE` is read.
    "moe.own_norms": frozenset(
        {
            "mlp_limits",
            "moe.shared_gate",
            "moe.shared_fused",
            "moe.output_scale",
            "moe.latent_size",
            "moe.hash_layers",
            "moe.kinds",
        }
    ),
    # They are all columns of one projection, or of one name.
    "output_gate": frozenset({"element_gate", "value_head_dim", "keys_as_values", "layer_head_dims"}),
    "element_gate": frozenset({"head_gate"}),
    "value_head_dim": frozenset({"keys_as_values", "layer_head_dims"}),
    # One choice and one set of small queries stand for all layers.
    "block_indexer": frozenset(
        {"layer_kv_heads", "layer_num_heads", "attention_windows", "attention_chunks"}
    ),
}
# What a switch has an effect with only.
_NEEDS: dict[str, str] = {
    "qk_norm_full_width": "qk_norm",
    "qk_norm_after_rope": "qk_norm",
    "norm_bias": "mean_norms",
    "sink_layers": "attention_sinks",
    # The factor of the scores is one for all layers.
    "layer_head_dims": "attention_scale",
    "ngram": "hyper",
    # Two caches for a layer.
    "shortcut_experts": "mla",
}


def check_switches(config: ModelConfig) -> None:
    """Raises ModelConfigError naming two switches not computed together, or one that needs another."""
    active = frozenset(_active(config))
    for switch, others in _APART.items():
        if switch in active and (clashing := sorted(others & active)):
            raise _refusal(config, switch, clashing[0])
    for switch, needed in _NEEDS.items():
        if switch in active and needed not in active:
            raise ModelConfigError(f"{config.model_type}: {switch} has no effect without {needed}")
    _check_layers(config, active)


def _active(config: ModelConfig) -> Iterator[str]:
    """Names of switches that are set; those of the experts begin with `moe.`."""
    for prefix, section in (("", config), ("moe.", config.moe)):
        for field in fields(section):
            if field.default is not MISSING and getattr(section, field.name) != field.default:
                yield prefix + field.name


def _refusal(config: ModelConfig, *switches: str, where: str = "") -> ModelConfigError:
    first, second = switches
    return ModelConfigError(f"{config.model_type}: {first} and {second} are not computed together{where}")


def _check_layers(config: ModelConfig, active: frozenset[str]) -> None:
    """Of switches that are lists over layers: what a single layer can not have."""
    if config.mla is None and {"element_gate", "attention_bias"} <= active:
        raise _refusal(config, "element_gate", "attention_bias", where=": no projection of gates has a bias")
    windows, chunks = config.attention_windows, config.attention_chunks
    if any(w is not None and c is not None for w, c in zip(windows, chunks, strict=False)):
        raise _refusal(config, "attention_windows", "attention_chunks", where=" in one layer")
    if config.value_head_dim is not None and config.mla is None and config.value_head_dim > config.head_dim:
        raise ModelConfigError(
            f"{config.model_type}: value_head_dim is {config.value_head_dim}; allowed: at most head_dim "
            f"({config.head_dim})"
        )
    if config.block_indexer is not None:
        ropes = config.layer_ropes or (config.rope,) * config.num_layers
        if any(ropes[layer] is None for layer in config.block_indexer.layers):
            raise _refusal(config, "block_indexer", "layer_ropes", where=" in layers that do not rotate")
    if config.hyper is not None and config.hyper.rank:
        if not config.one_plus_weight_norms:
            raise ModelConfigError(
                f"{config.model_type}: hyper.rank has no norms without one_plus_weight_norms"
            )
        if config.compressed is not None:
            raise _refusal(config, "compressed", "hyper", where=" where its streams are gated")
    elif config.ngram is not None:
        raise _refusal(config, "ngram", "hyper", where=" unless its streams are gated")
    router = config.moe.router
    if config.moe.own_norms and (router.weighs_inputs or router.num_zero_experts):
        raise _refusal(config, "moe.own_norms", "experts that weigh inputs or have no weights")
