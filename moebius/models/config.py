"""What a model is, however a checkpoint spells it: a list of layers, and what is the whole model's.

A `ModelConfig` is made once from a checkpoint's `config.json` (`read.read_model_config`) and never holds an
object of another library. The modules in `families` know the key names of each family; everything downstream
reads the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from moebius.models.errors import ModelConfigError as ModelConfigError
from moebius.models.layers.ffn import Routed
from moebius.models.layers.layer import Layer, mixers, routed
from moebius.models.layers.residual import GatedStreams, HyperConnections, NextToken

DTypeName = Literal["float32", "bfloat16", "float16"]

# Bytes of an element.
DTYPE_BYTES: Mapping[DTypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """What the engine has to know of a vision tower; filled by the family's `VisionFamily.read`.

    The tower itself is composed from `vision_config` by `gpu_service.models.vision`.
    """

    image_token_id: int  # The token that stands for images in a prompt.
    merge_size: int  # Patches along each side of what becomes one token.
    patch_size: int  # Height and width of a patch, pixels.
    # Widths of the tower: its residual stream and the intermediate size of its MLPs.
    hidden_size: int
    intermediate_size: int
    tile_size: int = 0  # Pixels along each side of all that the tower reads at a time; 0: any size.
    # Tokens around an image that the prompt has from its processor; None: it has none, or finds them by name.
    start_token_id: int | None = None
    end_token_id: int | None = None
    # Whether the tokens of an image see one another, also the later ones, in layers with a window.
    sees_ahead: bool = False


@dataclass(frozen=True, slots=True)
class ModelOverrides:
    """What the user may change about a checkpoint; filled from `MoebiusConfig`."""

    top_k: int | None = None
    max_model_len: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    language_model_only: bool = False  # Whether a vision tower is left out.
    # Heads of multi-token prediction that are served at most; 0: none is loaded.
    mtp_heads: int = 0
    draft_model: str = ""  # Directory of an EAGLE-3 head for this model; empty: none.
    small_model: str = ""  # Directory of a smaller model that drafts tokens for this one; empty: none.


@dataclass(frozen=True)
class ModelConfig:
    """A model, made by `common.Common.model`; sizes in elements, lengths in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]  # Decoder layers, and after them those that only propose draft tokens.
    dtype: DTypeName
    max_model_len: int  # Longest prompt + output: the checkpoint's, or the smaller override.
    embedding_scale: float = 1.0  # What the tokens' embeddings are multiplied by,
    # and whether that is rounded to the type that the model is computed in, whichever that is.
    rounds_embedding_scale: bool = False
    logit_scale: float = 1.0  # What the logits are multiplied by.
    # The head's logits become `final_logit_softcap * tanh(logits / final_logit_softcap)`; 0: they do not.
    final_logit_softcap: float = 0.0
    head_bias: bool = False  # Whether the head adds a bias.
    # Whether the head is the embedding: what the checkpoint says, unless it stores another head.
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    num_mtp_layers: int = 0  # Layers of multi-token prediction that the checkpoint says it has.
    draft_model: str = ""  # Directory of the EAGLE-3 head that is its last layer; empty: it is none.
    small_model: SmallModel | None = None  # What drafts tokens for it; None: no other model does.
    vision: VisionConfig | None = None  # None: the model is text-only, or is served without its tower.
    # What is read otherwise than another reader of config.json does; logged.
    remarks: tuple[str, ...] = field(default=(), compare=False)
    # Keys of config.json that nothing here reads; logged, so that nothing is ignored in silence.
    unread_keys: tuple[str, ...] = field(default=(), compare=False)

    def __hash__(self) -> int:
        """Returns a hash of a few fields: plans of memory, which are kept by model, ask for thousands."""
        return hash((self.model_type, self.hidden_size, len(self.layers), self.dtype, self.max_model_len))

    def with_top_k(self, top_k: int) -> ModelConfig:
        """Returns the model in which a token chooses `top_k` experts."""
        layers = (
            replace(layer, ffn=layer.ffn.with_top_k(top_k)) if isinstance(layer.ffn, Routed) else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def with_max_model_len(self, max_model_len: int) -> ModelConfig:
        """Returns the model of sequences of at most `max_model_len` tokens."""
        return replace(self, layers=_layers_within(self, max_model_len), max_model_len=max_model_len)

    @property
    def num_layers(self) -> int:
        """Decoder layers, and after them those that only propose draft tokens."""
        return len(self.layers)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of dense weights, activations and KV."""
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def num_mtp_heads(self) -> int:
        """Layers of multi-token prediction that are served."""
        return sum(isinstance(layer.residual, NextToken) for layer in self.layers)

    @cached_property
    def num_draft_layers(self) -> int:
        """Layers that only propose draft tokens: of multi-token prediction, or an EAGLE-3 head."""
        return sum(not layer.passed for layer in self.layers)

    @property
    def num_decoder_layers(self) -> int:
        """Layers that every token passes; those that propose draft tokens are numbered after them."""
        return self.num_layers - self.num_draft_layers

    @property
    def num_stored_layers(self) -> int:
        """Layers that are the model's own checkpoint's: all but an EAGLE-3 head."""
        return self.num_decoder_layers + self.num_mtp_heads

    @property
    def stream_size(self) -> int:
        """Elements of a token between two layers."""
        residual = self.layers[0].residual
        if isinstance(residual, HyperConnections | GatedStreams):
            return self.hidden_size * residual.num_streams
        return self.hidden_size

    @cached_property
    def has_mrope(self) -> bool:
        """Whether a token has positions in time, height and width."""
        ropes = (mixer.rope for mixer in mixers(self.layers))
        return any(rope is not None and rope.mrope_sections for rope in ropes)

    @cached_property
    def routed(self) -> Mapping[int, Routed]:
        """The blocks with routed experts by their layer, ascending."""
        return routed(self.layers)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """MoE layers, ascending."""
        return tuple(self.routed)

    def is_moe_layer(self, layer_id: int) -> bool:
        """Returns whether the layer routes to experts (else: dense MLP)."""
        return layer_id in self.routed


@dataclass(frozen=True)
class SmallModel:
    """A model of its own that drafts tokens for another; made by `small_model.with_small_model`."""

    directory: str
    # Of the other model's type of activations, for sequences as long as that one's.
    config: ModelConfig


# A plan of memory asks for few lengths, thousands of times.
@lru_cache(maxsize=32)
def _layers_within(config: ModelConfig, max_model_len: int) -> tuple[Layer, ...]:
    return tuple(
        layer if layer.mixer is None else replace(layer, mixer=layer.mixer.within(max_model_len))
        for layer in config.layers
    )
