"""Expert servers in process: random experts laid out as in a segment, and a client that computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.experts.client import ExpertClient, ExpertClientStats, Ticket, add_to
from gpu_service.experts.costs import LayerCosts
from gpu_service.experts.resident.experts import ResidentExperts, ResidentKernels, TorchResidentKernels
from gpu_service.experts.streaming.plan import SHARES, CopyRun, Piece, StoredExperts
from gpu_service.experts.streaming.ring import BufferRing, HostTransfers, TransferDevice
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.streamer import ExpertStreamer
from moebius import _kernels
from moebius import _kernels_testing as testing
from moebius.kernels import ExpertEngine
from moebius.kernels.weight_segment import SegmentLayer, digest_seed
from moebius.models.geometry import MoeGeometry
from tests.helpers.resident_layers import Shape, with_down

_ALIGNMENT = 4096


@dataclass
class MadeSegment:
    """`Segment`, whose state a test changes."""

    data: NDArray[np.uint8]
    layers: Mapping[int, SegmentLayer]
    identity: str = "expert_dtype=keep\n"
    generation: int = 1
    is_complete: bool = True
    closed: bool = False

    def digest(self, layer: int, slot: int) -> int:
        """Returns the digest of what it holds now, as a server computes it."""
        found = self.layers[layer]
        begin = found.offset + slot * found.expert_bytes
        return _kernels.weight_digest(self.data[begin : begin + found.expert_bytes], digest_seed(layer, slot))

    def close(self) -> None:
        """Nothing is mapped."""
        self.closed = True


@dataclass(frozen=True)
class Part:
    """What one server holds of every layer."""

    experts: tuple[int, ...]
    begin: int
    end: int


def tensor_split(shape: Shape, count: int) -> list[Part]:
    """Returns all experts, and a part of the channels of each."""
    bounds = [shape.intermediate * number // count // 8 * 8 for number in range(count)] + [shape.intermediate]
    return [Part(tuple(range(shape.experts)), *bounds[i : i + 2]) for i in range(count)]


def expert_split(shape: Shape, count: int) -> list[Part]:
    """Whole experts."""
    bounds = [shape.experts * number // count for number in range(count + 1)]
    return [Part(tuple(range(*bounds[i : i + 2])), 0, shape.intermediate) for i in range(count)]


def geometry(shape: Shape, num_layers: int) -> MoeGeometry:
    """Returns a checkpoint of `layers` layers, all of them with experts."""
    return MoeGeometry(
        "qwen3_moe",
        shape.hidden,
        num_layers,
        tuple(range(num_layers)),
        shape.experts,
        shape.top_k,
        shape.intermediate,
        shape.activation,
        "float32",
        limit=shape.limit,
    )


@dataclass
class MadeServer:
    """Random experts of every layer, of the part; the same seed gives the same."""

    shape: Shape
    weight_format: str
    part: Part
    num_layers: int
    seed: int
    engines: list[ExpertEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        for layer in range(self.num_layers):
            engine = ExpertEngine(
                self.shape.hidden,
                self.part.end - self.part.begin,
                self.shape.experts,
                1,
                weight_format=self.weight_format,
                down_format=with_down(self.weight_format)[1],
                activation=self.shape.activation,
                limit=self.shape.limit,
                has_bias=self.shape.has_bias,
                num_threads=1,
            )
            testing.fill_random(engine.backend, 0, 7 * self.seed + layer)
            self.engines.append(engine)

    def segment(self) -> MadeSegment:
        """Returns its experts as a segment holds them."""
        layers, pieces, end = {}, [], _ALIGNMENT
        for layer, engine in enumerate(self.engines):
            packed = [np.array(engine.packed_expert(0, expert)) for expert in self.part.experts]
            layers[layer] = SegmentLayer(
                layer,
                end,
                packed[0].nbytes,
                self.part.experts,
                *with_down(self.weight_format),
                self.shape.has_bias,
                self.shape.hidden,
                self.part.begin,
                self.part.end,
            )
            pieces.append((end, packed))
            end += -(-sum(one.nbytes for one in packed) // _ALIGNMENT) * _ALIGNMENT
        data = np.zeros(end, dtype=np.uint8)
        for begin, packed in pieces:
            joined = np.concatenate(packed)
            data[begin : begin + joined.nbytes] = joined
        return MadeSegment(data, layers)

    def forward(
        self, layer: int, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """This server's part of the sum, float32 `[T, H]`."""
        held = torch.isin(ids, torch.tensor(self.part.experts, dtype=torch.int32))
        own = torch.where(held, ids, -1)
        rows = hidden_states.float().numpy()
        return torch.from_numpy(self.engines[layer].forward(0, rows, own.numpy(), weights.numpy()))


class MadeExperts(ExpertClient):
    """Computes on the host what all servers give; notes which pairs it was asked for."""

    def __init__(self, servers: Sequence[MadeServer]) -> None:
        self.geometry = geometry(servers[0].shape, servers[0].num_layers)
        self.servers = servers
        self.submitted: list[tuple[int, torch.Tensor]] = []

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        self.submitted.append((layer, topk_ids))
        return Ticket(layer, hidden_states.cpu(), topk_ids.cpu(), topk_weights.cpu())

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        answers = [
            server.forward(ticket.layer, ticket.hidden_states, ticket.topk_ids, ticket.topk_weights)
            for server in self.servers
        ]
        return add_to(partial, torch.stack(answers).sum(0))

    def wait_ready(self, timeout_s: float) -> None:
        """At once."""

    def recover(self, timeout_s: float) -> None:
        """Nothing is lost."""

    def stats(self) -> ExpertClientStats:
        return ExpertClientStats()

    def close(self) -> None:
        """Nothing is held."""


class MadeSource:
    """`ExpertSource` over segments that are there at once."""

    def __init__(
        self, segments: Sequence[MadeSegment], layers: Sequence[int], device: TransferDevice
    ) -> None:
        self.made = segments
        self.copied_bytes = 0
        self.seconds_of: Callable[[CopyRun], float] = lambda run: run.nbytes / 50e9
        self._layers = layers
        self._device = device
        self._opened: ExpertSegments | None = ExpertSegments(segments, layers)

    def segments(self) -> ExpertSegments | None:
        if self._opened is not None and self._opened.problem():
            self._opened.close()
            self._opened = None
        elif self._opened is None and all(segment.is_complete for segment in self.made):
            self._opened = ExpertSegments(self.made, self._layers)
        return self._opened

    def copy(self, segments: ExpertSegments, target: torch.Tensor, piece: Piece, run: CopyRun) -> None:
        data = segments.data[piece.stored.segment]
        self.copied_bytes += run.nbytes
        self._device.copy(target, data[run.source : run.source + run.nbytes])

    def address(self, segments: ExpertSegments, stored: StoredExperts) -> int:
        """Returns the memory of this process."""
        return segments.data[stored.segment].data_ptr() + stored.offset

    def time_copy(self, segments: ExpertSegments, target: torch.Tensor, piece: Piece, run: CopyRun) -> float:
        """What `seconds_of` says, for a copy that is made."""
        self.copy(segments, target, piece, run)
        return self.seconds_of(run)

    def close(self) -> None:
        self._opened = None


@dataclass
class FixedShare:
    """A chooser that always says the same."""

    value: int = SHARES
    # Rows, share, seconds of the step, and of the link in it.
    observed: list[tuple[int, int, float, float]] = field(default_factory=list)
    # Of those steps together.
    copied_bytes: int = 0
    costs: LayerCosts | None = None
    asks_servers: bool = False

    @property
    def break_even_rows(self) -> int:
        return 20

    def may_stream(self, rows: int, is_decode: bool) -> bool:
        return not is_decode

    def share(self, rows: int) -> int:
        return self.value

    def step_tokens(self, most: int, wait_s: float | None) -> int:
        return most

    def predict(self, rows: int, share: int) -> float | None:
        return None

    def measured(self, layer: LayerCosts, layer_bytes: float) -> None:
        self.costs = layer

    def routed(self, left: Sequence[float]) -> None:
        """A share that is fixed follows nothing."""

    def observe(self, rows: int, share: int, seconds: float, copying: float, nbytes: int) -> None:
        self.observed.append((rows, share, seconds, copying))
        self.copied_bytes += nbytes


@dataclass
class Streaming:
    """A streamer over made servers; filled by `streaming`."""

    streamer: ExpertStreamer
    source: MadeSource
    chooser: FixedShare
    client: MadeExperts


def streaming(
    servers: Sequence[MadeServer],
    *,
    share: int = SHARES,
    num_buffers: int = 3,
    experts_per_buffer: int = 2,
    device: TransferDevice | None = None,
    kernels: ResidentKernels | None = None,
    resident: ResidentExperts | None = None,
    parallel: ParallelContext = SOLO,
    largest: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    asks_servers: bool = False,
) -> Streaming:
    """Returns everything but the model; small buffers, so that layers are cut."""
    device = device or HostTransfers()
    client = MadeExperts(servers)
    segments = [server.segment() for server in servers]
    layers = client.geometry.moe_layers
    each = max(layer.expert_bytes for segment in segments for layer in segment.layers.values())
    chooser = FixedShare(share, asks_servers=asks_servers)
    streamer = ExpertStreamer(
        client.geometry,
        layers,
        BufferRing(device, num_buffers, each * experts_per_buffer),
        device,
        kernels or TorchResidentKernels(client.geometry),
        chooser,
        resident=resident,
        parallel=parallel,
        largest=largest,
    )
    source = MadeSource(segments, layers, device)
    streamer.open(source)
    return Streaming(streamer, source, chooser, client)
