"""Sizes of a model's tensors, by which its kernels are compiled and tried: small ones, or a rank's own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moebius.models.config import ModelConfig
from moebius.models.layers.compressed import EntryAttention
from moebius.models.layers.ffn import Dense, MoE, Routed
from moebius.models.layers.gqa import GQA
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import Layer, Layers, mixers
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.ngrams import NGramConfig
from moebius.models.layers.recurrent import KDA, GatedDeltaNet, Recurrent, SelectiveScan, ShortConv
from moebius.models.layers.residual import GatedStreams, HyperConnections
from moebius.models.layers.router import RouterConfig

_SMALL_LINEAR = GatedDeltaNet(
    num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=64, conv_width=4, eps=1e-6
)
_SMALL_HYPER = HyperConnections(3, 4, 1e-6)
SMALL_NGRAMS = NGramConfig((0, 1), 3, 3, 12, 50, 8, 4, 1234, 2, 4)
_SMALL_ROUTER = RouterConfig(
    16, 3, "sigmoid", correction_bias=True, num_groups=4, top_groups=2, post="renormalize", scale=2.5
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model's tensors, in elements; filled by `sizes_of`, or by the defaults, which fill no
    block.
    """

    tokens: int = 3
    # A model's width, because libraries compile another kernel for a narrow one.
    hidden: int = 2048
    queries: int = 4
    keys: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    interleaved: bool = False
    index_dim: int = 48  # Of a key of sparse attention's indexer.
    latent_dim: int = 80  # Of a token's latent.
    # Of a gated activation's output.
    intermediate: int = 128
    linear: Recurrent = _SMALL_LINEAR
    decay_bound: float | None = None  # Of Kimi Delta Attention.
    # Channels of Mamba, and elements of the state of each.
    scan: tuple[int, int] = (40, 12)
    # Channels of the convolution; None: those of `linear`.
    channels: int | None = 300
    router: RouterConfig = _SMALL_ROUTER
    hyper: HyperConnections = _SMALL_HYPER
    # Columns of a weight in 8 bits, the first of them inside of a group.
    fp8_columns: int = 200
    fp8_first_column: int = 88
    vocabulary: int = 5000
    storage: torch.dtype | None = None  # What keys and values are stored as; None: as they come.


SMALL = Sizes()
# A decode step and a chunk: kernels have tiles for either.
_DECODE, _CHUNK = 3, 128


def sizes_of(config: ModelConfig, layers: Layers, storage: torch.dtype | None = None) -> tuple[Sizes, ...]:
    """Returns the sizes of a rank's own `layers` for few tokens and many, and for each kind of mixer that
    rotates.

    `storage`: `kv_cache_dtype`, None for the activations' own type.
    """
    sizes = Sizes(
        hidden=config.hidden_size,
        fp8_columns=config.hidden_size,
        fp8_first_column=0,
        vocabulary=config.vocab_size,
        storage=storage,
    )
    for layer in reversed(layers):
        sizes = _of_ffn(_of_mixer(_of_residual(sizes, layer), layer), layer)
    kinds = dict.fromkeys(kind for mixer in mixers(layers) if (kind := _rotated(mixer)) is not None)
    # Where no layer rotates, what would is tried with sizes of no model.
    small = SMALL.queries, SMALL.keys, SMALL.head_dim, SMALL.rotary_dim, SMALL.interleaved
    kinds = kinds or dict.fromkeys([small])
    return tuple(
        replace(
            sizes,
            tokens=tokens,
            queries=queries,
            keys=keys,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
        )
        for tokens in (_DECODE, _CHUNK)
        for queries, keys, head_dim, rotary_dim, interleaved in kinds
    )


def _of_ffn(sizes: Sizes, layer: Layer) -> Sizes:
    ffn = layer.ffn
    if isinstance(ffn, Dense):
        return replace(sizes, intermediate=ffn.intermediate_size)
    if not isinstance(ffn, Routed):
        return sizes
    router = ffn.router
    if isinstance(ffn, MoE) and ffn.kinds is not None:
        router = replace(router, num_experts=ffn.kinds.num_experts, top_k=ffn.kinds.top_k)
    width = ffn.experts.intermediate_size if ffn.shared is None else ffn.shared.intermediate_size
    return replace(sizes, router=router, intermediate=width)


def _of_residual(sizes: Sizes, layer: Layer) -> Sizes:
    residual = layer.residual
    if isinstance(residual, GatedStreams):
        residual = HyperConnections(residual.num_streams, 0, 0.0)
    return replace(sizes, hyper=residual) if isinstance(residual, HyperConnections) else sizes


def _of_mixer(sizes: Sizes, layer: Layer) -> Sizes:
    """Returns the sizes that the ops of a mixer are called with."""
    mixer = layer.mixer
    if isinstance(mixer, SelectiveScan):
        scan = mixer.num_value_heads, mixer.key_head_dim
        return replace(sizes, scan=scan, channels=mixer.conv_size)
    if isinstance(mixer, ShortConv):
        linear = replace(sizes.linear, conv_width=mixer.conv_width)
        return replace(sizes, linear=linear, channels=mixer.conv_size)
    if isinstance(mixer, KDA):
        sizes = replace(sizes, decay_bound=mixer.decay_bound)
    if isinstance(mixer, Recurrent):
        # Where there is no convolution, one of the usual width is tried.
        mixer = replace(mixer, conv_width=mixer.conv_width if mixer.conv_width > 1 else 4)
        return replace(sizes, linear=mixer, channels=None)
    if isinstance(mixer, MLA):
        sizes = replace(sizes, latent_dim=mixer.kv_lora_rank)
        return sizes if mixer.indexer is None else replace(sizes, index_dim=mixer.indexer.head_dim)
    if isinstance(mixer, GQA) and mixer.blocks is not None:
        return replace(sizes, index_dim=mixer.blocks.head_dim)
    return sizes


def _rotated(mixer: Mixer) -> tuple[int, int, int, int, bool] | None:
    """Returns query and key heads, elements of a head and of them rotated, and the pairing; None: nothing
    rotates.
    """
    rope = mixer.rope
    if isinstance(mixer, EntryAttention):
        # The ends of heads are rotated.
        return mixer.num_heads, 1, mixer.rope_dim, mixer.rope_dim, True
    if isinstance(mixer, MLA) and rope is not None:
        # Only the parts that carry a position are rotated, of all heads' queries and of one key.
        rotated = mixer.qk_rope_head_dim
        return mixer.num_heads, 1, rotated, rotated, rope.interleaved
    if not isinstance(mixer, GQA):
        return None
    # Where nothing is rotated, what would rotate is tried with whole heads.
    rotated = mixer.head_dim if rope is None else rope.rotary_dim
    heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    return *heads, rotated, rope is not None and rope.interleaved
