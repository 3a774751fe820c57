"""Layers of multi-token prediction (arXiv:2412.19437, section 2.2): whether a checkpoint has what is asked.

A layer makes one vector of a token's hidden state (after the final norm) and the embedding of the token after
it, passes it through a decoder layer of the model, and predicts with the model's own head the token after
that. It proposes tokens, which the model then checks, and is loaded only where it is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import has_weights
from moebius.models.checkpoint import open_index
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import Layer, mixers
from moebius.models.layers.recurrent import Recurrent
from moebius.models.layers.residual import NextToken, Sequential
from moebius.models.registry import FAMILIES, family_of

_OTHERWISE = "allowed: speculative_method off or ngram"


def with_heads(config: ModelConfig, count: int, source: str) -> ModelConfig:
    """Returns the model with its first `count` layers of multi-token prediction, or as many as it has.

    Raises ModelConfigError naming what is missing: a family that has none or whose layers are not known, a
    config.json (`source`) that promises none.
    """
    family = family_of(config.model_type)
    if family.mtp is None:
        served = ", ".join(sorted(name for name, other in FAMILIES.items() if other.mtp is not None))
        raise ModelConfigError(
            f"{source}: speculative_method mtp: multi-token prediction of model_type {config.model_type!r} "
            f"is not supported; {_OTHERWISE}, or a model of {served}"
        )
    if not config.num_mtp_layers:
        raise ModelConfigError(
            f"{source}: speculative_method mtp: the configuration has no layers of multi-token prediction "
            f"(num_nextn_predict_layers is 0 or absent); {_OTHERWISE}"
        )
    head = _head(config, family.mtp.hidden_first)
    return replace(config, layers=config.layers + (head,) * min(count, config.num_mtp_layers))


def _head(config: ModelConfig, hidden_first: bool) -> Layer:
    """A layer of multi-token prediction: like the last one, with experts and its own choice of tokens."""
    last = config.layers[-1]
    mixer = next(m for layer in reversed(config.layers) for m in layer.mixers if not isinstance(m, Recurrent))
    if isinstance(mixer, MLA) and mixer.is_sparse:
        indexers = (m.indexer for m in mixers(config.layers) if isinstance(m, MLA) and m.indexer is not None)
        mixer = replace(mixer, indexer=next(indexers), latents_back=0, shares_latents=False)
    *_, ffn = config.routed.values()
    inner = last.residual if isinstance(last.residual, Sequential) else Sequential()
    return Layer(mixer, ffn, last.norm, NextToken(inner, hidden_first))


def check_heads(config: ModelConfig, directory: str | Path) -> None:
    """Raises CheckpointError where tensors of the heads that `config` serves are missing, naming them.

    From headers alone; a directory without weights is not looked at. What decoder layers have is checked by
    those who load it.
    """
    if not config.num_mtp_heads or not has_weights(directory):
        return
    names = family_of(config.model_type).names
    canonical = (
        names.canonical_name(n, config.num_layers, config.num_mtp_heads)
        for n in open_index(directory).tensors
    )
    stored = {name.rpartition(".")[0] for name in canonical if name is not None}
    layers = range(config.num_decoder_layers, config.num_layers)
    own = NextToken.own_weights(config.layers[-1].norm, config.hidden_size)
    modules = dict.fromkeys(weight.name.rpartition(".")[0] for weight in own)
    wanted = [f"model.layers.{layer}.{module}" for layer in layers for module in modules]
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise CheckpointError(
            f"{directory}: speculative_method mtp: config.json promises {config.num_mtp_layers} layers of "
            f"multi-token prediction, but the checkpoint lacks {', '.join(missing)}; many quantised copies "
            f"leave them out. {_OTHERWISE.capitalize()}, or a checkpoint that has them"
        )
