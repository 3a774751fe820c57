"""Draft heads of the EAGLE-3 kind (arXiv:2503.01840), which are published for one model each, apart from it.

A head projects the residual stream of three of the model's layers to one vector (`fc`), reads it with the
embedding of the token after it in one decoder layer, and predicts the token after that, mostly out of the
frequent part of the vocabulary (`d2t`: how far a token's id there is from the model's). It goes on with its
own stream in place of `fc`'s vector. The tensors are those that SGLang and vLLM read: `midlayer.` or
`layers.0.`, `fc`, `norm`, and maybe `lm_head`, `embed_tokens`, `d2t` (`t2d` says the same the other way
round); config.json is a Llama's, or has one as its `transformer_layer_config`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from moebius.checkpoint.config_file import read_config_file
from moebius.checkpoint.index import TensorInfo, open_safetensors
from moebius.models.common import read_common
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.keys import HfKeys
from moebius.models.layers.compressed import CompressedAttention
from moebius.models.layers.layer import Layer, mixers
from moebius.models.layers.residual import Eagle3
from moebius.models.rope import read_rope

_PREFIX = re.compile(r"(?:model\.)?(?:(?:midlayer|layers\.0)\.)?")
# Which of the model's tokens are the head's, and frequencies that everybody computes.
_LEFT_OUT = re.compile(r"(?:.*\.)?t2d|.*\.rotary_emb\.inv_freq")
_READ_LAYERS = "eagle_aux_hidden_state_layer_ids"


def with_eagle3(config: ModelConfig, directory: str) -> ModelConfig:
    """Returns the model with the head of a directory as its last layer.

    Raises ModelConfigError naming what of the head does not fit the model, or why the model can have none,
    and CheckpointError for files that can not be read.
    """
    _check_model(config, directory)
    described = read_config_file(Path(directory))
    inner = described.get("transformer_layer_config")
    of_layer = inner if isinstance(inner, dict) else {}
    hf = HfKeys(f"{directory}/config.json", {"model_type": "llama"} | of_layer | described)
    common = read_common(hf)
    sizes = {
        "num_hidden_layers": (common.num_layers, 1),
        "hidden_size": (common.hidden_size, config.hidden_size),
        "target_hidden_size": (
            hf.integer("target_hidden_size", default=config.hidden_size),
            config.hidden_size,
        ),
        "vocab_size": (common.vocab_size, config.vocab_size),
    }
    for name, (found, wanted) in sizes.items():
        if found != wanted:
            raise hf.error(name, found, f"{wanted}, in an EAGLE-3 head for this model")
    for name in ("mlp_bias", "qkv_bias"):
        hf.refuse(name)
    attention = common.gqa(read_rope(hf, common.head_dim), input_width=2, output_bias=common.attention_bias)
    head = Layer(attention, common.dense(), common.norm, _residual(hf, config, directory))
    return replace(config, layers=(*config.layers, head), draft_model=directory)


def is_head(directory: str) -> bool:
    """Returns whether config.json describes such a head. Raises CheckpointError."""
    if not (Path(directory) / "config.json").is_file():
        return False
    described = read_config_file(Path(directory))
    names = described.get("architectures") or []
    of_heads = ("transformer_layer_config", "eagle_config", "draft_vocab_size", _READ_LAYERS)
    return any(key in described for key in of_heads) or any("Eagle3" in str(name) for name in names)


def head_tensors(config: ModelConfig) -> dict[str, TensorInfo]:
    """Returns the tensors of a model's head by canonical name, those left out that nothing here reads.

    Raises CheckpointError.
    """
    found = _stored(config.draft_model).items()
    return {f"model.layers.{config.num_layers - 1}.{name}": info for name, info in found}


def _stored(directory: str) -> dict[str, TensorInfo]:
    """Returns the tensors by their names within the layer."""
    tensors = open_safetensors(directory).tensors
    return {
        _PREFIX.sub("", name, count=1): info
        for name, info in tensors.items()
        if not _LEFT_OUT.fullmatch(name)
    }


def _check_model(config: ModelConfig, directory: str) -> None:
    """Raises ModelConfigError where the engine can not run a head beside the model."""
    rotations = [mixer.rope for mixer in mixers(config.layers) if mixer.rope is not None]
    refused = {
        "several residual streams": config.stream_size != config.hidden_size,
        "attention to compressed entries": any(
            isinstance(mixer, CompressedAttention) for mixer in mixers(config.layers)
        ),
        "rotation by positions in time, height and width (without images: --language-model-only)": (
            config.has_mrope
        ),
        "learned frequencies of its rotation": any(rope.learned for rope in rotations),
    }
    for what, is_so in refused.items():
        if is_so:
            raise ModelConfigError(
                f"speculative_model {directory}: an EAGLE-3 head is not supported for {config.model_type}, "
                f"which has {what}; allowed: speculative_method off, ngram, or mtp where the model has it"
            )


def _residual(hf: HfKeys, config: ModelConfig, directory: str) -> Eagle3:
    names = _stored(directory)
    size = hf.integer("draft_vocab_size", default=config.vocab_size)
    residual = Eagle3(
        read_layers=_read_layers(hf, config.num_decoder_layers),
        norm_before_residual=hf.boolean("norm_before_residual", default=False),
        draft_vocab_size=size,
        vocab_size=config.vocab_size,
        has_embedding="embed_tokens.weight" in names,
        has_head="lm_head.weight" in names,
        has_ids="d2t" in names,
        has_bias="fc.bias" in names,
    )
    if size > config.vocab_size or (
        size < config.vocab_size and not (residual.has_head and residual.has_ids)
    ):
        allowed = f"{config.vocab_size}, or fewer in a checkpoint with tensors lm_head.weight and d2t"
        raise hf.error("draft_vocab_size", size, allowed)
    return residual


def _read_layers(hf: HfKeys, num_layers: int) -> tuple[int, ...]:
    """Returns the layers at whose beginning the head reads the stream, ascending, as vLLM counts them.

    SGLang's `eagle_config` names layers whose output it is; without either it is the three that both take.
    """
    section = hf.section("eagle_config")
    of_outputs = () if section is None else section.integers(_READ_LAYERS)
    found = hf.integers(_READ_LAYERS) or tuple(layer + 1 for layer in of_outputs)
    found = tuple(sorted(found or (2, num_layers // 2, num_layers - 3)))
    if len(set(found)) < len(found) or not 0 <= found[0] <= found[-1] <= num_layers:
        raise hf.error(_READ_LAYERS, list(found), f"different layers, 0 to {num_layers}")
    return found
