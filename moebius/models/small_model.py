"""Small models that draft tokens for a large one: whether the two fit together.

A small model's tokens have to be the large one's. Publishers pad vocabularies to other sizes and add a few
special tokens to later models of a series, so the two tokenizers may differ in tokens that only one of them
has: those of the large model are read as any other token, those of the small one are never drafted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import structlog

from moebius.checkpoint.errors import CheckpointError
from moebius.models.config import ModelConfig, ModelConfigError, SmallModel
from moebius.models.layers.compressed import CompressedAttention
from moebius.models.layers.layer import mixers, states

# Tokens that one tokenizer may have and the other may not; llama.cpp allows as many.
_MOST_MISSING = 128
_OTHERWISE = "allowed: a model with the same tokenizer, or another speculative_method"
_log = structlog.get_logger(__name__)


def with_small_model(config: ModelConfig, small: ModelConfig, directory: str) -> ModelConfig:
    """Returns the model with a small one, `small` as its checkpoint in `directory` describes it.

    Raises ModelConfigError where that one keeps what the engine can not keep beside another model's.
    """
    refused = {
        "a state for each request (linear attention, state spaces, convolutions)": bool(states(small.layers)),
        "compressed attention": any(isinstance(m, CompressedAttention) for m in mixers(small.layers)),
        "rotation by positions in time, height and width": small.has_mrope,
    }
    for what, is_so in refused.items():
        if is_so:
            raise ModelConfigError(
                f"speculative_model {directory}: a draft model of model_type {small.model_type} is not "
                f"supported, because it has {what}; allowed: models that keep keys and values, or latents, "
                "alone"
            )
    if small.max_model_len < config.max_model_len:
        _log.info(
            "the draft model was made for shorter sequences than the model is served with: beyond them fewer "
            "of its tokens may be accepted",
            draft_model_len=small.max_model_len,
            max_model_len=config.max_model_len,
        )
    small = replace(small.with_max_model_len(config.max_model_len), dtype=config.dtype, vision=None)
    return replace(config, small_model=SmallModel(directory, small))


def check_tokenizers(model: str | Path, config: ModelConfig) -> None:
    """Compares the tokenizer of a model with that of its small one, where there is one.

    Raises ModelConfigError naming a token that is another one there, and CheckpointError for a tokenizer
    that can not be read. Where neither checkpoint has one, vocabularies have to be of one size.
    """
    small = config.small_model
    if small is None:
        return
    own, other = _vocabulary(model), _vocabulary(small.directory)
    if own is None and other is None:
        if config.vocab_size != small.config.vocab_size:
            raise ModelConfigError(
                f"speculative_model {small.directory}: its vocabulary has {small.config.vocab_size} tokens, "
                f"the model's {config.vocab_size}, and neither has a tokenizer; {_OTHERWISE}"
            )
        return
    if own is None or other is None:
        lacking = model if own is None else small.directory
        raise CheckpointError(f"{lacking} has no tokenizer, so the draft model's can not be compared")
    for token_id in sorted(own.keys() & other.keys()):
        if own[token_id] != other[token_id]:
            raise ModelConfigError(
                f"speculative_model {small.directory}: token {token_id} is {other[token_id]!r}, in the model "
                f"it is {own[token_id]!r}: the tokenizers differ; {_OTHERWISE}"
            )
    missing = len(own.keys() ^ other.keys())
    if missing > _MOST_MISSING:
        raise ModelConfigError(
            f"speculative_model {small.directory}: {missing} tokens are in one tokenizer only, that of the "
            f"model or the draft model's, at most {_MOST_MISSING} may be; {_OTHERWISE}"
        )


def _vocabulary(model: str | Path) -> dict[int, str] | None:
    """Returns the text of each token, added ones included; None: the checkpoint has no tokenizer."""
    # Here, because it loads a library that most readers of configurations do not need.
    from moebius.checkpoint.tokenizer import has_tokenizer, read_backend

    if not has_tokenizer(Path(model)):
        return None
    found: dict[str, int] = read_backend(Path(model)).get_vocab(with_added_tokens=True)
    return {token_id: text for text, token_id in found.items()}
