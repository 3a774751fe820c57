"""How the halves of a layer read the residual stream and add to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moebius.models.layers.ffn import Dense
from moebius.models.layers.ngrams import Engram, NGrams, stream_norm
from moebius.models.layers.norms import Norm
from moebius.models.layers.ranks import WHOLE, Cut, Vocabulary
from moebius.models.layers.weights import Weight, Weights, fused, linear, under

# What a half reads is normed first, in most layers.
_INPUT_NORM, _FFN_NORM = "input_layernorm", "post_attention_layernorm"
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

    def weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what checkpoints store of a layer besides its halves."""
        names = [_INPUT_NORM, _FFN_NORM] if self.normed_input else []
        names += ["post_self_attn_layernorm"] if self.normed_output == "both" else []
        names += ["post_mlp_layernorm"] if self.normed_output != "none" else []
        for name in names:
            yield from norm.weights(name, hidden_size)
        if self.learned_scale:
            yield Weight("layer_scalar", (1,))


@dataclass(frozen=True, slots=True)
class Single:
    """`x += half(norm(x))`: a layer that is a mixer or a feed-forward block alone."""

    late_refusal: ClassVar[str] = ""

    def weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what checkpoints store of a layer besides its half."""
        yield from norm.weights("norm", hidden_size)


@dataclass(frozen=True, slots=True)
class Parallel:
    """`x += mixer(norm(x)) + ffn(norm(x))`, one norm for both."""

    late_refusal: ClassVar[str] = ""

    def weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what checkpoints store of a layer besides its halves."""
        yield from norm.weights(_INPUT_NORM, hidden_size)


@dataclass(frozen=True, slots=True)
class NormedStream:
    """`x = norm(x); x = a x + b mixer(x)`, then the same of the feed-forward block (MiniMax-01)."""

    late_refusal: ClassVar[str] = _SCALES_STREAM

    mixer: tuple[float, float]  # a and b.
    ffn: tuple[float, float]

    def weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what checkpoints store of a layer besides its halves."""
        yield from Sequential().weights(norm, hidden_size)


@dataclass(frozen=True, slots=True)
class Shortcut:
    """Mixer and MLP, twice; the experts read what the first MLP reads and are added at the end (LongCat)."""

    late_refusal: ClassVar[str] = ""

    dense: Dense

    def weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what checkpoints store of a layer besides its halves, of which there are two each."""
        for name in (_INPUT_NORM, _FFN_NORM):
            for half in range(2):
                yield from norm.weights(f"{name}.{half}", hidden_size)


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
    # Whether the weights of what a half reads were computed by the half before it, from what that one read:
    # the first half reads the first stream, and the last one's weights give what the streams end as.
    lags: bool = False
    ngrams: Engram | None = None

    def weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what checkpoints store of a layer besides its halves; names are those of transformers."""
        yield from Sequential().weights(norm, hidden_size)
        if self.ngrams is not None:
            yield from under("engram", self.ngrams.weights(hidden_size))
        num, kinds = self.num_streams, 3 if self.iterations else 2
        # Of the weights between streams there may be none.
        rows = (2 + num) * num if self.iterations else 2 * num
        for name in ("attn_hc", "ffn_hc"):
            yield Weight(f"{name}.fn", (rows, num * hidden_size), "float32")
            yield Weight(f"{name}.base", (rows,), "float32")
            yield Weight(f"{name}.scale", (kinds,), "float32")

    def last_weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what checkpoints store of what the streams end as."""
        yield from norm.weights("norm", hidden_size)
        if self.weighs_last:
            num = self.num_streams
            yield Weight("hc_head.hc_fn", (num, num * hidden_size), "float32")
            yield Weight("hc_head.hc_base", (num,), "float32")
            yield Weight("hc_head.hc_scale", (1,), "float32")


@dataclass(frozen=True, slots=True)
class GatedStreams:
    """Several residual streams, normed and mixed element by element; see `gpu_service.ops.gated_streams`."""

    late_refusal: ClassVar[str] = _WEIGHS_STREAMS

    num_streams: int
    rank: int  # Width of the bottleneck that the weights of a mix come through, also at the end.
    ngrams: NGrams | None = None

    def weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what checkpoints store of a layer besides its halves; it has no other norms."""
        if self.ngrams is not None:
            yield from under("ple", self.ngrams.weights(hidden_size))
        for name in ("attn_hyper_connection", "mlp_hyper_connection"):
            yield from under(name, self._mixer_weights(hidden_size, injects=True))

    def last_weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what checkpoints store of what the streams end as."""
        yield from under("norm", self._mixer_weights(hidden_size, injects=False))

    def _mixer_weights(self, hidden_size: int, injects: bool) -> Weights:
        """Yields what the streams are read by; `injects`: and by which they are added to."""
        stream_size = self.num_streams * hidden_size
        yield stream_norm("hc_norm", stream_size)
        down: dict[str, tuple[int, Cut]] = {"input_mix_weight_down": (self.rank, WHOLE)}
        if injects:
            down["block_inject_weight"] = self.num_streams, WHOLE
        yield from fused("down", stream_size, down)
        yield from linear("input_mix_weight_up", stream_size, self.rank)


@dataclass(frozen=True, slots=True)
class NextToken:
    """A layer of multi-token prediction: a layer that begins with a hidden state and the next embedding."""

    inner: Sequential
    hidden_first: bool  # Whether the projection reads the hidden state first; False: the embedding.

    @property
    def late_refusal(self) -> str:
        """That of the layer within."""
        return self.inner.late_refusal

    def weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what checkpoints store of a layer besides its halves."""
        yield from self.inner.weights(norm, hidden_size)
        yield from self.own_weights(norm, hidden_size)

    @staticmethod
    def own_weights(norm: Norm, hidden_size: int) -> Weights:
        """Yields what it has besides those of a decoder layer."""
        yield from (*norm.weights("enorm", hidden_size), *norm.weights("hnorm", hidden_size))
        yield from linear("eh_proj", hidden_size, 2 * hidden_size)
        yield from norm.weights("shared_head.norm", hidden_size)


@dataclass(frozen=True, slots=True)
class Eagle3:
    """A draft head of a checkpoint of its own that reads several layers of the model; see `models.eagle3`."""

    late_refusal: ClassVar[str] = ""

    read_layers: tuple[int, ...]  # Decoder layers at whose beginning the stream is read, or their number: at
    # the end of the last one.
    norm_before_residual: bool  # Whether the head's own stream begins with a norm of what it reads.
    draft_vocab_size: int  # Tokens that its own head knows.
    vocab_size: int  # The model's.
    # What its checkpoint stores: else the embedding and the head are the model's, and tokens have its ids.
    has_embedding: bool
    has_head: bool
    has_ids: bool
    has_bias: bool  # Of `fc`.

    def weights(self, norm: Norm, hidden_size: int) -> Weights:
        """Yields what its checkpoint stores besides attention and MLP."""
        width = len(self.read_layers) * hidden_size
        yield from linear("fc", hidden_size, width, bias=self.has_bias)
        for name in (_INPUT_NORM, "hidden_norm", _FFN_NORM, "norm"):
            yield from norm.weights(name, hidden_size)
        if self.has_embedding:
            shape = self.vocab_size, hidden_size
            yield Weight("embed_tokens.weight", shape, use="lookup", cut=Vocabulary())
        if self.has_head:
            yield from linear("lm_head", self.draft_vocab_size, hidden_size, cut=Vocabulary())
        if self.has_ids:
            yield Weight("d2t", (self.draft_vocab_size,), "int32")


Residual = (
    Sequential
    | Single
    | Parallel
    | NormedStream
    | Shortcut
    | HyperConnections
    | GatedStreams
    | NextToken
    | Eagle3
)
