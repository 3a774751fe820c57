"""How the halves of a layer read the residual stream and add to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moebius.models.layers.ffn import Dense
from moebius.models.layers.tensors import StateTensor

# Why answers of experts can not be added a layer late, see `Layer.late_refusal`.
NORMS_EXPERTS = "which norms what experts add: sums of two layers would be normed together"
_SCALES_STREAM = "whose layers scale the residual stream, each by a number of its own"
_WEIGHS_STREAMS = "which has several residual streams, and weighs for each layer what they get"


@dataclass(frozen=True, slots=True)
class Sequential:
    """`x += mixer(norm(x)); x += ffn(norm(x))`."""

    normed_input: bool = True  # Whether either half reads a norm of the stream.
    # Whose answers are normed before they are added.
    normed_output: Literal["none", "both", "ffn"] = "none"
    scale: float = 1.0  # What either half adds is multiplied by this first.
    learned_scale: bool = False  # Whether the stream is multiplied by a learned number at the end.

    @property
    def late_refusal(self) -> str:
        """Returns why what experts answer can not be added a layer late; empty: it can."""
        if self.normed_output != "none":
            return NORMS_EXPERTS
        return _SCALES_STREAM if self.learned_scale else ""


@dataclass(frozen=True, slots=True)
class Single:
    """`x += half(norm(x))`: a layer that is a mixer or a feed-forward block alone."""

    late_refusal: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Parallel:
    """`x += mixer(norm(x)) + ffn(norm(x))`, one norm for both."""

    late_refusal: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class NormedStream:
    """`x = norm(x); x = a x + b mixer(x)`, then the same of the feed-forward block (MiniMax-01)."""

    late_refusal: ClassVar[str] = _SCALES_STREAM

    mixer: tuple[float, float]  # a and b.
    ffn: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Shortcut:
    """Mixer and MLP, twice; the experts read what the first MLP reads and are added at the end (LongCat)."""

    late_refusal: ClassVar[str] = ""

    dense: Dense


@dataclass(frozen=True, slots=True)
class HyperConnections:
    """Several residual streams, mixed as wholes around each half; see `gpu_service.ops.hyper_connections`."""

    late_refusal: ClassVar[str] = _WEIGHS_STREAMS

    num_streams: int
    # Of Sinkhorn's normalisation of the weights between streams; 0: there are none, and each stream stays as
    # it is but for what is added to it.
    iterations: int
    eps: float  # Added to weights and to the sums that they are divided by.
    # Whether the streams end as a sum with learned weights; False: as their mean.
    weighs_last: bool = False
    magnitude: float = 2.0  # The largest weight with which a half of a layer is added to a stream.


@dataclass(frozen=True, slots=True)
class NGramConfig:
    """Embeddings of the latest tokens together, which some layers add to the residual streams (Qwen4).

    Rows of a table are found by hashing the latest 2, 3, ... `size` tokens, several times each.
    """

    # Layers that have them, ascending, counted over the whole model: a layer's place decides its hashes.
    layers: tuple[int, ...]
    size: int  # Tokens of the longest n-gram.
    heads: int  # Hashes of each order.
    embed_dim: int  # Elements of all hashes' rows together.
    vocab_base: int  # Each hash has a prime number of rows, the next ones from here on.
    padded_to: int  # A layer's table has a multiple of this many rows,
    parts: int  # and is stored as this many tensors of equal size.
    seed: int  # Of the hashes' factors.
    end_token_id: int  # No n-gram reaches beyond it.
    conv_taps: int  # Of the causal convolution, `size` tokens apart.

    @property
    def num_hashes(self) -> int:
        """Rows of the table that a token has."""
        return (self.size - 1) * self.heads

    @property
    def row_dim(self) -> int:
        """Elements of a row of the table."""
        return self.embed_dim // self.num_hashes

    @property
    def conv_width(self) -> int:
        """Tokens that the convolution spans, the newest included."""
        return (self.conv_taps - 1) * self.size + 1


@dataclass(frozen=True, slots=True)
class NGrams:
    """Embeddings of the latest tokens together, which are added to the streams at the layer's begin."""

    sizes: NGramConfig
    place: int  # Among the model's layers that have them: it decides the hashes.
    stream_size: int

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The latest tokens; inputs of the convolution over all elements of the streams."""
        tokens = StateTensor((self.sizes.size - 1,), "int64")
        return tokens, StateTensor((self.sizes.conv_width - 1, self.stream_size))


@dataclass(frozen=True, slots=True)
class GatedStreams:
    """Several residual streams, normed and mixed element by element; see `gpu_service.ops.gated_streams`."""

    late_refusal: ClassVar[str] = _WEIGHS_STREAMS

    num_streams: int
    rank: int  # Width of the bottleneck that the weights of a mix come through, also at the end.
    ngrams: NGrams | None = None


@dataclass(frozen=True, slots=True)
class NextToken:
    """A layer of multi-token prediction: a layer that begins with a hidden state and the next embedding."""

    inner: Sequential
    hidden_first: bool  # Whether the projection reads the hidden state first; False: the embedding.

    @property
    def late_refusal(self) -> str:
        """That of the layer within."""
        return self.inner.late_refusal


Residual = (
    Sequential | Single | Parallel | NormedStream | Shortcut | HyperConnections | GatedStreams | NextToken
)
