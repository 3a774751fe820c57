"""Which experts of which layers a step streams, in which pieces, and how large the ring for them is.

Pure arithmetic: nothing here touches a device, a segment or a clock. A layer of a server's segment is cut
into pieces that fit a buffer of the ring; what lies side by side in the segment is copied at once.

Of several tensor-parallel ranks each streams a part of the chosen experts, whole ones, over its own link: the
sum of all ranks' answers is the layer's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpu_service.experts.resident.panels import LayerFormat
from moebius.models.layers.ranks import even_shard

# A split is chosen in multiples of one of this many parts of a layer's experts, so that ranks can agree on a
# number.
SHARES = 64
# A piece is about this large: copies of 32 MiB reach the link's rate, larger ones only delay the products.
PIECE_BYTES = 192 * 2**20


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """A layer's experts as one server's segment holds them; filled by `ExpertSegments`."""

    layer: int
    segment: int
    # Of slot 0, bytes from the segment's begin.
    offset: int
    # By slot: global expert ids.
    experts: tuple[int, ...]
    kind: LayerFormat

    @property
    def nbytes(self) -> int:
        """All slots."""
        return len(self.experts) * self.kind.expert_bytes


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Bytes that lie together in the segment and in the buffer; filled by `cut`."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Piece:
    """Some experts of a layer from one segment: one buffer's content; filled by `cut`."""

    stored: StoredExperts
    # By slot of the buffer.
    experts: tuple[int, ...]
    runs: tuple[CopyRun, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer."""
        return len(self.experts) * self.stored.kind.expert_bytes


def cut(stored: StoredExperts, wanted: Collection[int], buffer_bytes: int) -> tuple[Piece, ...]:
    """The wanted experts that the segment has, in pieces of nearly equal size that fit a buffer.

    Raises ValueError when not even one expert fits.
    """
    each = stored.kind.expert_bytes
    most = buffer_bytes // each
    slots = [slot for slot, expert in enumerate(stored.experts) if expert in wanted]
    if not slots:
        return ()
    if most < 1:
        raise ValueError(f"an expert of {each} bytes does not fit a buffer of {buffer_bytes}")
    count = -(-len(slots) // most)
    parts = (even_shard(len(slots), number, count).slice for number in range(count))
    return tuple(_piece(stored, slots[part]) for part in parts)


def _piece(stored: StoredExperts, slots: Sequence[int]) -> Piece:
    each, runs = stored.kind.expert_bytes, list[CopyRun]()
    for place, slot in enumerate(slots):
        source = stored.offset + slot * each
        if runs and runs[-1].source + runs[-1].nbytes == source:
            runs[-1] = CopyRun(runs[-1].source, runs[-1].target, runs[-1].nbytes + each)
        else:
            runs.append(CopyRun(source, place * each, each))
    return Piece(stored, tuple(stored.experts[slot] for slot in slots), tuple(runs))


@dataclass(frozen=True)
class LayerStream:
    """What a step streams of one layer; filled by `plan_layer`."""

    layer: int
    # By all ranks together, ascending.
    experts: tuple[int, ...]
    # Of this rank, in the order in which they are copied and used.
    pieces: tuple[Piece, ...]
    # Those that would be streamed, too, but will probably have no rows: servers have them, or where none is
    # asked they are copied once they are known to have some. Of all ranks together, ascending.
    deferred: tuple[int, ...]
    # All other experts are resident.
    is_whole: bool

    @cached_property
    def nbytes(self) -> int:
        """Returns what this rank copies of it."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class StreamPlan:
    """The plan of a step; filled by `ExpertStreamer`. Layers are in the order in which they are computed."""

    # Of `SHARES`, what of each layer's experts is streamed.
    share: int
    layers: tuple[LayerStream, ...]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of all layers, in order."""
        return tuple(piece for layer in self.layers for piece in layer.pieces)

    def pieces_of(self, layers: Collection[int]) -> int:
        """Returns how many pieces these layers have."""
        return sum(len(layer.pieces) for layer in self.layers if layer.layer in layers)

    @cached_property
    def by_layer(self) -> Mapping[int, LayerStream]:
        """By decoder layer."""
        return {layer.layer: layer for layer in self.layers}


def chosen_experts(available: Collection[int], share: int, counts: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns the share (of `SHARES`) of a layer's experts that is streamed, ascending.

    `counts`: how often each expert was chosen, by id; those with the most rows are streamed, and the servers
    keep those with the fewest. Without it the first ones, which lie together.
    """
    count = -(-len(available) * share // SHARES)
    ordered = sorted(available, key=lambda expert: (-counts[expert] if counts else 0, expert))
    return tuple(sorted(ordered[:count]))


def whole_experts(stored: Sequence[StoredExperts]) -> list[int]:
    """Returns the experts of a layer every part of which is in a segment, in the order in which they lie
    there.

    With the tensor split each segment has all experts of the layer, with the expert split each has its own.
    """
    parts: dict[int, int] = {}
    for found in stored:
        for expert in found.experts:
            parts[expert] = parts.get(expert, 0) + found.kind.intermediate_size
    whole = max(parts.values(), default=0)
    return [expert for expert, size in parts.items() if size == whole]


def plan_layer(
    stored: Sequence[StoredExperts],
    resident: Collection[int],
    num_experts: int,
    share: int,
    buffer_bytes: int,
    rank: int = 0,
    ranks: int = 1,
    counts: Sequence[int] = (),
    unrouted: Collection[int] = (),
) -> LayerStream:
    """Plans one layer, `stored` being its part in each segment; `rank` of `ranks` tensor-parallel ones.

    `unrouted`: experts that will probably have no rows.

    An expert is streamed only when every part of it is there (`whole_experts`).
    """
    held_here = set(resident)
    available = [expert for expert in whole_experts(stored) if expert not in held_here]
    wanted = chosen_experts(available, share, counts)
    experts = tuple(expert for expert in wanted if expert not in unrouted)
    deferred = tuple(expert for expert in wanted if expert in unrouted)
    own = set(experts[even_shard(len(experts), rank, ranks).slice])
    pieces = tuple(piece for found in stored for piece in cut(found, own, buffer_bytes))
    held = len(held_here.union(wanted))
    return LayerStream(stored[0].layer, experts, pieces, deferred, held == num_experts)


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Filled by `ring_layout`."""

    num_buffers: int
    buffer_bytes: int

    @property
    def nbytes(self) -> int:
        """The bytes of the whole ring."""
        return self.num_buffers * self.buffer_bytes


def ring_layout(
    layer_bytes: int, expert_bytes: int, num_parts: int, most_bytes: int | None = None
) -> RingLayout:
    """Two of the largest layer (this rank's part of it), in pieces; less where `most_bytes` says so.

    `layer_bytes`: of `num_parts` segments together; `expert_bytes`: of the largest part of an expert in one.
    Raises ValueError when not even two buffers of one expert each fit.
    """
    # Four buffers at least: one may have to be kept free (`BufferRing.start`).
    count = max(2, num_parts, -(-layer_bytes // PIECE_BYTES))
    # An expert more than the even part: pieces hold whole ones.
    buffer_bytes = _aligned(-(-layer_bytes // count) + expert_bytes)
    layout = RingLayout(2 * count, buffer_bytes)
    if most_bytes is None or layout.nbytes <= most_bytes:
        return layout
    least = _aligned(expert_bytes)
    if 2 * least > most_bytes:
        raise ValueError(f"two experts of {expert_bytes} bytes do not fit {most_bytes} bytes")
    # Four buffers rather than two, so that a copy need not wait for the very last product.
    buffer_bytes = max(least, min(buffer_bytes, most_bytes // 4 // _ALIGNMENT * _ALIGNMENT))
    return RingLayout(most_bytes // buffer_bytes, buffer_bytes)


_ALIGNMENT = 4096


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
