"""One layer of a model, and questions about all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moebius.models.errors import ModelConfigError
from moebius.models.layers.ffn import FeedForward, NormedMoE, Routed
from moebius.models.layers.latent import MLA
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.norms import Norm, RMSNorm
from moebius.models.layers.residual import (
    Eagle3,
    GatedStreams,
    HyperConnections,
    NextToken,
    Residual,
    Sequential,
    Shortcut,
    Single,
)
from moebius.models.layers.tensors import CacheTensor, StateTensor
from moebius.models.layers.weights import Weights, under


@dataclass(frozen=True, slots=True)
class Layer:
    """A mixer of tokens, a feed-forward block, and how both are added to the residual stream."""

    mixer: Mixer | None  # None: the layer is a feed-forward block alone.
    ffn: FeedForward | None  # None: the layer is a mixer alone.
    norm: Norm  # Of what the halves read.
    residual: Residual

    def __post_init__(self) -> None:
        """Raises ModelConfigError for halves that the residual stream does not go around."""
        residual, name = self.residual, type(self.residual).__name__
        if isinstance(self.ffn, NormedMoE) and not isinstance(residual, Sequential | NextToken):
            raise ModelConfigError(
                f"experts with norms of their own are not computed in layers that are {name}"
            )
        if isinstance(residual, Shortcut) and not isinstance(self.mixer, MLA):
            raise ModelConfigError(f"layers that are {name} have latent attention only")
        adds_one = isinstance(self.norm, RMSNorm) and self.norm.one_plus_weight
        if isinstance(residual, GatedStreams) and not adds_one:
            raise ModelConfigError(f"layers that are {name} have norms that hold their weight less 1 only")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Returns what mixes tokens, in order: each has a cache or a state of its own."""
        return () if self.mixer is None else (self.mixer,) * (2 if isinstance(self.residual, Shortcut) else 1)

    @property
    def ffns(self) -> tuple[FeedForward, ...]:
        """Feed-forward blocks, in order."""
        dense = (self.residual.dense,) * 2 if isinstance(self.residual, Shortcut) else ()
        return dense if self.ffn is None else (*dense, self.ffn)

    @property
    def states(self) -> tuple[tuple[StateTensor, ...], ...]:
        """The states of those of its parts that have one, in order."""
        own = [mixer.state for mixer in self.mixers]
        if isinstance(self.residual, GatedStreams | HyperConnections) and self.residual.ngrams is not None:
            own.append(self.residual.ngrams.state)
        return tuple(state for state in own if state)

    @property
    def parts(self) -> dict[str, Mixer | FeedForward]:
        """Mixers and feed-forward blocks by the names that checkpoints have for them."""
        found: dict[str, Mixer | FeedForward] = {}
        if isinstance(self.residual, Shortcut):
            found |= {f"self_attn.{half}": mixer for half, mixer in enumerate(self.mixers)}
            found |= {f"mlps.{half}": self.residual.dense for half in range(2)}
        elif self.mixer is not None:
            found["mixer" if isinstance(self.residual, Single) else self.mixer.name] = self.mixer
        if self.ffn is not None:
            found["mixer" if isinstance(self.residual, Single) else "mlp"] = self.ffn
        return found

    def weights(self, hidden_size: int) -> Weights:
        """Yields what checkpoints store of it, without routed experts, which servers hold; of the whole
        model's layer, which ranks then cut.
        """
        yield from self.residual.weights(self.norm, hidden_size)
        for name, part in self.parts.items():
            yield from under(name, part.weights(hidden_size))

    def weight_elements(self, hidden_size: int) -> int:
        """Returns the weights that a token meets, chosen experts' included, up to norms and biases."""
        mixed = sum(mixer.weight_elements(hidden_size) for mixer in self.mixers)
        return mixed + sum(ffn.weight_elements(hidden_size) for ffn in self.ffns)

    def stream_bytes(self, hidden_size: int, activation_bytes: int) -> int:
        """Returns bytes of one token that live through the layer next to the stream that every layer has."""
        total, residual = 0, self.residual
        if isinstance(residual, HyperConnections | GatedStreams):
            # The streams, and the same once more in float32 where weights are computed and streams mixed.
            total += residual.num_streams * hidden_size * (activation_bytes + 2 * 4)
        if isinstance(residual, Shortcut):
            # What experts are given, which waits until the layer's end; next to it the halves run.
            total += hidden_size * activation_bytes
        if isinstance(self.ffn, Routed) and self.ffn.router.num_zero_experts:
            total += hidden_size * 4
        return total

    @property
    def passed(self) -> bool:
        """Returns whether every token passes it: it is not one that only proposes draft tokens."""
        return not isinstance(self.residual, NextToken | Eagle3)

    @property
    def late_refusal(self) -> str:
        """Returns why what its experts answer can not be added a layer late; empty: it can."""
        return self.residual.late_refusal or ("" if self.ffn is None else self.ffn.late_refusal)

    def on_rank(self, rank: int, num_ranks: int) -> Layer:
        """Returns the part of one of `num_ranks` tensor-parallel ranks."""
        residual = self.residual
        if isinstance(residual, Shortcut):
            residual = replace(residual, dense=residual.dense.on_rank(rank, num_ranks))
        return replace(
            self,
            mixer=None if self.mixer is None else self.mixer.on_rank(rank, num_ranks),
            ffn=None if self.ffn is None else self.ffn.on_rank(rank, num_ranks),
            residual=residual,
        )


Layers = Sequence[Layer]


def mixers(layers: Layers) -> Iterator[Mixer]:
    """Yields all mixers, in order."""
    for layer in layers:
        yield from layer.mixers


def routed(layers: Layers) -> dict[int, Routed]:
    """Returns the blocks with routed experts by their layer."""
    return {i: layer.ffn for i, layer in enumerate(layers) if isinstance(layer.ffn, Routed)}


def cached(layers: Layers) -> list[tuple[Mixer, CacheTensor]]:
    """Returns whatever is attended to, with its mixer, in order: a layer of the cache each."""
    return [(mixer, part) for mixer in mixers(layers) for part in mixer.cache if not part.is_index]


def indexed(layers: Layers) -> list[CacheTensor]:
    """Returns the keys that tokens are chosen by, in order."""
    return [part for mixer in mixers(layers) for part in mixer.cache if part.is_index]


def states(layers: Layers) -> list[tuple[StateTensor, ...]]:
    """Returns the states of all parts that have one, in order."""
    return [state for layer in layers for state in layer.states]


def divided(layers: Layers) -> tuple[Layers, Layers]:
    """Returns layers that share a cache, and an EAGLE-3 head at their end where its cache is of another
    kind.
    """
    kinds = [type(mixer) for mixer, _ in cached(layers)]
    apart = kinds[:-1] and kinds[-1] is not kinds[0] and isinstance(layers[-1].residual, Eagle3)
    return (layers[:-1], layers[-1:]) if apart else (layers, ())


def page_bytes(layers: Layers, page_size: int, stored_bytes: int, activation_bytes: int) -> int:
    """Returns bytes of a page over all layers; `stored_bytes`: of an element of keys, values and latents."""
    sizes = page_size, stored_bytes, activation_bytes
    return sum(part.page_bytes(*sizes) for mixer in mixers(layers) for part in mixer.cache)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a part of a layer finds what it keeps; filled by `places`. None: it keeps no such thing."""

    cache: int | None = None  # The layer of the cache that it attends to, maybe another mixer's.
    index: int | None = None  # Among the keys that tokens are chosen by.
    state: int | None = None  # Among the states.


def places(layers: Layers) -> list[list[Places]]:
    """Returns the places of each layer's parts: its mixers, then, where a state is left, its n-grams."""
    layers, apart = divided(layers)
    if apart:
        return [*places(layers), *places(apart)]
    found: list[list[Places]] = []
    num_cached = num_indexed = num_states = 0
    for index, layer in enumerate(layers):
        own, num_layer_states = list[Places](), len(layer.states)
        for mixer in layer.mixers:
            kept = mixer.cache
            cache = num_cached if any(not part.is_index for part in kept) else None
            chooses = num_indexed if any(part.is_index for part in kept) else None
            state = num_states if mixer.state else None
            if mixer.attends_back:
                cache = found[index - mixer.attends_back][0].cache
            else:
                num_cached += cache is not None
            num_indexed += chooses is not None
            num_states += state is not None
            num_layer_states -= state is not None
            own.append(Places(cache, chooses, state))
        if num_layer_states:
            own.append(Places(state=num_states))
            num_states += 1
        found.append(own)
    return found
