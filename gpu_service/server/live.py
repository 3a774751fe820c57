"""Who computes the experts of each layer, and how often they are chosen: for a live view, when one asks.

The figures are counted anyhow: expert servers count every row they compute, and the expert recorder, where it
is on, every choice. Nothing here runs unless `describe` is called.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np

from gpu_service.assembly.built import Built
from gpu_service.engine.step_check import StepCheck
from gpu_service.experts.adaptive.placement import AdaptivePlacement
from gpu_service.experts.client import ExpertClient
from gpu_service.experts.fetching.fetcher import ExpertFetcher
from gpu_service.experts.recorder import ExpertRecorder
from gpu_service.experts.streaming.streamer import ExpertStreamer
from gpu_service.memory.shares import MemoryShares
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.experts.placement import make_placement
from moebius.models.geometry import MoeGeometry
from moebius.models.served import read_served_geometry
from moebius.network.grpc_channels import open_aio_channel
from protos import engine_pb2 as pb
from protos import expert_pb2, expert_pb2_grpc

# A server in the middle of a prompt answers when a thread of it has time.
_ANSWER_S = 1.0
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_reconnect_backoff_ms", 1000)]


class LiveExperts:
    """The live view of all ranks' layers; one event loop calls it."""

    def __init__(
        self,
        geometry: MoeGeometry,
        resident: Callable[[int], Sequence[int]],
        addresses: Sequence[str],
        recorder: ExpertRecorder | None,
        streamer: ExpertStreamer | None,
        client: ExpertClient | None = None,
        placement: AdaptivePlacement | None = None,
        check: StepCheck | None = None,
        fetcher: ExpertFetcher | None = None,
        memory: Callable[[], MemoryShares] | None = None,
    ) -> None:
        """`resident`: of a layer, experts that are on the device now; `addresses`: of the expert servers.

        `client`: of this process; None: no experts are asked for. `placement`: None: what is resident stays.
        `fetcher`: None: decode steps copy no experts. `memory`: None: not known.
        """
        self._geometry = geometry
        self._resident = resident
        self._addresses = tuple(addresses)
        self._recorder = recorder
        self._streamer = streamer
        self._client = client
        self._placement, self._check, self._fetcher = placement, check, fetcher
        self._memory = memory
        self._channels: list[grpc.aio.Channel] = []

    async def describe(self, live: pb.GetLiveResponse) -> None:
        """Fills everything that concerns experts; takes at most about a second, whatever servers do."""
        answers = await asyncio.gather(*map(self._ask, range(len(self._addresses))))
        recorder = self._recorder
        chosen: Mapping[int, Any] = {}
        if recorder is not None and recorder.is_recording:
            live.recorder_is_on = True
            chosen = await asyncio.to_thread(_choices, recorder)
        live.num_experts, live.top_k = self._geometry.num_experts, self._geometry.top_k
        if self._streamer is not None:
            live.streamed_steps = self._streamer.streamed_steps
            live.streamed_bytes = self._streamer.streamed_bytes
        self._describe_hand_off(live)
        if self._check is not None:
            live.costs.CopyFrom(_costs(self._check, self._placement))
        if self._memory is not None:
            live.memory.CopyFrom(_memory(self._memory()))
        live.servers.extend(server for server, _ in answers)
        rows = self._rows([stats for _, stats in answers])
        seconds, calls = _layer_times([stats for _, stats in answers])
        nbytes = _layer_bytes([stats for _, stats in answers])
        for layer in self._geometry.moe_layers:
            found = pb.LiveLayer(
                layer=layer,
                gpu_experts=sorted(self._resident(layer)),
                cpu_rows=rows.get(layer, ()),
                cpu_seconds=seconds.get(layer, 0.0) if rows else None,
                cpu_calls=calls.get(layer, 0),
                cpu_bytes=nbytes.get(layer, 0) if rows else None,
                chosen=chosen[layer].tolist() if layer in chosen else (),
            )
            live.layers.append(found)
        self._describe_moves(live)

    def _describe_moves(self, live: pb.GetLiveResponse) -> None:
        """Fills in what is copied to the device and what that brings, by layer of this rank."""
        streamed = {} if self._streamer is None else self._streamer.streamed_of
        placed = {} if self._placement is None else self._placement.figures().layers
        fetched = {} if self._fetcher is None else self._fetcher.by_layer
        for layer in live.layers:
            if layer.layer in streamed:
                layer.streamed_experts, layer.streamed_bytes = streamed[layer.layer]
            figures = placed.get(layer.layer)
            if figures is not None:
                layer.decode_choices, layer.decode_hits = figures.chosen, figures.hits
                layer.exchanges, layer.exchange_bytes = figures.exchanges, figures.copied_bytes
            if layer.layer in fetched:
                own = fetched[layer.layer]
                layer.fetched_experts, layer.fetched_bytes = own.experts, own.nbytes
                layer.fetch_hits = own.in_slots

    def _describe_hand_off(self, live: pb.GetLiveResponse) -> None:
        if self._client is None:
            return
        stats = self._client.stats()
        if stats.hand_off_seconds is not None:
            live.hand_off.CopyFrom(
                pb.LiveHandOff(
                    calls=stats.calls, wait_seconds=stats.wait_seconds, seconds=stats.hand_off_seconds
                )
            )

    async def metrics(self) -> list[pb.ServerMetrics]:
        """Returns the metrics of the servers that answer in time."""
        pages = await asyncio.gather(*map(self._page, range(len(self._addresses))))
        return [page for page in pages if page is not None]

    async def _page(self, index: int) -> pb.ServerMetrics | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._stub(index).GetMetrics(expert_pb2.GetMetricsRequest())
        except (grpc.aio.AioRpcError, TimeoutError):
            return None
        return pb.ServerMetrics(index=index, text=answer.text)

    def _stub(self, index: int) -> Any:
        if not self._channels:
            self._channels = [open_aio_channel(address, _OPTIONS) for address in self._addresses]
        return expert_pb2_grpc.ExpertStub(self._channels[index])  # type: ignore[no-untyped-call]

    async def _ask(self, index: int) -> tuple[pb.LiveExpertServer, expert_pb2.StatsResponse | None]:
        """Returns one server's answer; None: it gave none in time."""
        stub = self._stub(index)
        try:
            async with asyncio.timeout(_ANSWER_S):
                info = await stub.Info(expert_pb2.InfoRequest())
                stats = await stub.Stats(expert_pb2.StatsRequest())
        except (grpc.aio.AioRpcError, TimeoutError):
            return pb.LiveExpertServer(index=index), None
        server = pb.LiveExpertServer(
            index=index,
            is_up=True,
            instance_id=info.instance_id,
            busy_seconds=stats.busy_seconds,
            weight_bytes=stats.weight_bytes,
            calibrated_bytes_per_second=info.calibrated_bytes_per_second,
            packed_bytes=info.packed_bytes,
            weight_format=info.weight_format,
            isa=info.isa,
            num_threads=info.num_threads,
            numa_node=info.numa_node,
        )
        return server, stats

    def _rows(self, answers: Sequence[expert_pb2.StatsResponse | None]) -> dict[int, list[int]]:
        """Returns the rows of each expert by layer.

        Servers that share every expert have all computed the same rows, servers of whole experts each its
        own: the largest count is right for both.
        """
        if not answers or any(stats is None for stats in answers):
            return {}
        num_experts = self._geometry.num_experts
        rows = {layer: np.zeros(num_experts, np.int64) for layer in self._geometry.moe_layers}
        for stats in answers:
            assert stats is not None
            for layer in stats.layers:
                if layer.layer in rows:
                    counts = np.array(layer.expert_rows, np.int64)
                    np.maximum(rows[layer.layer], counts, out=rows[layer.layer])
        return {layer: counts.tolist() for layer, counts in rows.items()}

    async def close(self) -> None:
        """Closes the connections to servers."""
        for channel in self._channels:
            await channel.close()
        self._channels = []


def _layer_times(
    answers: Sequence[expert_pb2.StatsResponse | None],
) -> tuple[dict[int, float], dict[int, int]]:
    """Returns by layer the seconds of the server that computed longest, and the calls of one server."""
    seconds: dict[int, float] = {}
    calls: dict[int, int] = {}
    for stats in answers:
        for layer in () if stats is None else stats.layers:
            seconds[layer.layer] = max(seconds.get(layer.layer, 0.0), layer.busy_seconds)
            calls[layer.layer] = max(calls.get(layer.layer, 0), layer.calls)
    return seconds, calls


def _layer_bytes(answers: Sequence[expert_pb2.StatsResponse | None]) -> dict[int, int]:
    """Returns by layer the packed weights that all servers read.

    Experts of a server are taken to be of one size.
    """
    found: dict[int, int] = {}
    for stats in answers:
        if stats is not None:
            experts = sum(layer.experts for layer in stats.layers)
            for layer in stats.layers:
                nbytes = stats.weight_bytes * layer.experts // max(1, experts)
                found[layer.layer] = found.get(layer.layer, 0) + nbytes
    return found


def _memory(shares: MemoryShares) -> pb.LiveMemory:
    return pb.LiveMemory(
        kv_bytes=shares.kv,
        expert_bytes=shares.experts,
        stream_bytes=shares.stream,
        fetch_bytes=shares.fetch,
        free_bytes=shares.free,
        is_shared=shares.is_shared,
    )


def _costs(check: StepCheck, placement: AdaptivePlacement | None) -> pb.LiveCosts:
    figures = check.costs.figures
    price = None if placement is None else placement.copy_price
    return pb.LiveCosts(
        predicted_seconds=check.predicted_seconds,
        measured_seconds=check.measured_seconds,
        predicted_over_measured=check.ratio,
        link_bytes_per_second=figures.link_bytes_per_second,
        cpu_expert_seconds=figures.cpu_expert_seconds,
        gpu_expert_seconds=figures.gpu_expert_seconds,
        copy_price=price if price is not None and math.isfinite(price) else None,
        times_measured_again=check.times_measured_again,
    )


def _choices(recorder: ExpertRecorder) -> Mapping[int, Any]:
    """Returns the counts by layer since the recorder's start; none when it was stopped meanwhile and never
    started.
    """
    try:
        return recorder.dump().counts_by_layer()
    except UserError:
        return {}


def make_live_experts(config: MoebiusConfig, built: Built) -> LiveExperts | None:
    """Returns the live view; None for a model without experts.

    Raises UserError for a placement that cannot be.
    """
    geometry = read_served_geometry(config)
    if not geometry.moe_layers:
        return None
    placed, resident = make_placement(config.placement, geometry).resident, built.resident

    def experts(layer: int) -> Sequence[int]:
        """Returns the resident experts; of layers of other ranks what they began with."""
        held = resident is not None and layer in resident.slots
        return resident.experts(layer) if resident is not None and held else placed[layer]

    moves = built.placement, built.check, built.fetcher, built.memory_shares
    addresses = config.experts.expert_addresses
    return LiveExperts(geometry, experts, addresses, built.recorder, built.streamer, built.experts, *moves)
