"""All weights of a model, or of some consecutive layers of it, as its layers declare them.

Routed experts are not among them: who holds them reads them by `expert_checkpoint`.
"""

from __future__ import annotations

from moebius.models.config import ModelConfig
from moebius.models.layers.layer import mixers
from moebius.models.layers.ranks import Vocabulary
from moebius.models.layers.residual import GatedStreams, HyperConnections
from moebius.models.layers.weights import Weight, Weights, linear, under

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def model_weights(config: ModelConfig, stage: range | None = None) -> Weights:
    """Yields the weights of a pipeline stage's layers, and of what lies before the first and after the last.

    `stage` None: of all layers. Names are canonical.
    """
    stage = range(config.num_layers) if stage is None else stage
    yield from outside_weights(config, is_first=stage.start == 0, is_last=stage.stop == config.num_layers)
    for layer in stage:
        yield from under(f"model.layers.{layer}", config.layers[layer].weights(config.hidden_size))


def has_tables(config: ModelConfig) -> bool:
    """Returns whether layers have tables of which a step reads single rows, and which may stay on disk."""
    return any(weight.on_host for weight in model_weights(config))


def outside_weights(config: ModelConfig, *, is_first: bool, is_last: bool) -> Weights:
    """Yields those of no layer, of a stage that has the first or the last one; a stage that has the head has
    the embedding as well where both are one.
    """
    size, residual = config.hidden_size, config.layers[0].residual
    norm = config.layers[config.num_decoder_layers - 1].norm
    if is_first or (is_last and config.tie_word_embeddings):
        shape = config.vocab_size, size
        yield Weight(f"{EMBEDDING}.weight", shape, use="lookup", cut=Vocabulary())
    # Learned frequencies belong to one kind of rotation.
    learned = {m.rope for m in mixers(config.layers) if m.rope is not None and m.rope.learned}
    for rope in learned:
        yield Weight("model.rotary_emb.alpha", (rope.rotary_dim // 2,), "float32")
    if is_last and isinstance(residual, HyperConnections | GatedStreams):
        yield from under("model", residual.last_weights(norm, size))
    elif is_last:
        yield from under("model", norm.weights("norm", size))
    if is_last and not config.tie_word_embeddings:
        yield from linear(HEAD, config.vocab_size, size, bias=config.head_bias, cut=Vocabulary())
