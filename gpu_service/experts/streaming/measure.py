"""What `costs` needs to know, measured: the GPU while there is memory for the longest steps, servers before
serving, the link once it is there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from gpu_service.device.stream import DeviceStream
from gpu_service.experts.client import ExpertClient, ExpertComputeFailed, ExpertUnavailable
from gpu_service.experts.costs import CostCurve, LayerCosts
from gpu_service.experts.resident.panels import LayerFormat
from gpu_service.experts.streaming.plan import SHARES, plan_layer
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.streamer import ExpertSource, ExpertStreamer

_log = structlog.get_logger(__name__)
# Rows of a layer that are tried; servers are slow with many, and grow evenly by then.
_SERVER_ROWS, _GPU_ROWS = (16, 64, 256, 1024), (64, 512, 4096)
_REPEATS = 2
_LINK_S = 0.1


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Seconds of a whole layer; filled by `measure_costs`."""

    cpu: CostCurve
    gpu: CostCurve


@dataclass(frozen=True, slots=True)
class _Rows:
    """Random rows, every expert as likely as any other."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def _random_rows(streamer: ExpertStreamer, rows: int, dtype: torch.dtype) -> _Rows:
    geometry, generator = streamer.geometry, torch.Generator().manual_seed(rows)
    hidden_states = torch.randn(rows, geometry.hidden_size, generator=generator).to(dtype)
    scores = torch.rand(rows, geometry.num_experts, generator=generator)
    ids = scores.topk(geometry.top_k, dim=1).indices.int()
    weights = torch.full(ids.shape, 1.0 / geometry.top_k)
    device = streamer.device.device
    return _Rows(hidden_states.to(device), ids.to(device), weights.to(device))


def measure_products(
    streamer: ExpertStreamer, kind: LayerFormat, dtype: torch.dtype, max_rows: int
) -> CostCurve:
    """Measures the device by the host's clock, with the experts that a rank streams of a layer.

    `max_rows`: of the largest step that streams. `kind`: how most of a layer's experts are packed. Kernels
    are warm, and nothing else runs on the current stream.
    """
    slots, device = streamer.sample_slots(kind), streamer.device

    def on_device(rows: _Rows) -> None:
        streamer.kernels.forward(slots, rows.hidden_states, rows.topk_ids, rows.topk_weights, None)

    # Of the experts in the buffer to those that a rank streams of a layer.
    factor = streamer.geometry.num_experts / (slots.count * streamer.num_ranks)
    measured = []
    for rows in _up_to(_GPU_ROWS, max_rows):
        made = _random_rows(streamer, rows, dtype)
        seconds = _time(lambda: device.wait(device.record_read()), on_device, made)
        measured.append((rows, factor * seconds))
    return CostCurve.of(measured)


def measure_costs(
    streamer: ExpertStreamer,
    experts: ExpertClient,
    stream: DeviceStream,
    gpu: CostCurve,
    dtype: torch.dtype,
    max_rows: int,
) -> MeasuredCosts | None:
    """All ranks at once, while no step is under way; None: a server was lost meanwhile.

    `max_rows`: of the largest step in which servers have a part. `gpu`: of `measure_products`.
    """
    # One after another, as in a step: the servers' caches hold most of one.
    layers = itertools.cycle(streamer.layers)

    def on_servers(rows: _Rows) -> None:
        experts.begin_step()
        ticket = experts.submit(next(layers), rows.hidden_states, rows.topk_ids, rows.topk_weights)
        experts.collect(ticket)

    try:
        with stream.active(), torch.inference_mode():
            cpu = [
                (rows, _time(stream.synchronize, on_servers, _random_rows(streamer, rows, dtype)))
                for rows in _up_to(_SERVER_ROWS, max_rows)
            ]
            failure = experts.failure()
            if failure is not None:
                raise failure
    except (ExpertUnavailable, ExpertComputeFailed) as error:
        _log.warning(
            "how fast expert servers are could not be measured; they compute all", because=str(error)
        )
        with stream.active():
            experts.recover(60.0)
        return None
    return MeasuredCosts(CostCurve.of(cpu), gpu)


def _up_to(sizes: tuple[int, ...], most: int) -> list[int]:
    return sorted({min(size, most) for size in sizes})


def _time(wait: Callable[[], None], work: Callable[[_Rows], None], rows: _Rows) -> float:
    """Returns the seconds of the best of some runs; `wait`: for the device."""
    best = float("inf")
    for _ in range(_REPEATS):
        wait()
        begin = time.perf_counter()
        work(rows)
        wait()
        best = min(best, time.perf_counter() - begin)
    return best


def measure_link(
    streamer: ExpertStreamer, source: ExpertSource, segments: ExpertSegments, costs: MeasuredCosts
) -> None:
    """Copies a layer again and again, and tells the streamer's chooser all. No step may stream meanwhile.

    While servers serve it is as fast as with them.
    """
    ring = streamer.ring
    plans = [
        plan_layer(
            segments.stored[layer],
            streamer.resident_of(layer),
            streamer.geometry.num_experts,
            SHARES,
            ring.buffer_bytes,
            streamer.rank,
            streamer.num_ranks,
        )
        for layer in streamer.layers
    ]
    nbytes = sum(piece.nbytes for plan in plans for piece in plan.pieces) / len(plans)
    pieces = max(plans, key=lambda plan: len(plan.experts)).pieces
    rate, begin = 0.0, time.perf_counter()
    while pieces and time.perf_counter() - begin < _LINK_S:
        for number, piece in enumerate(pieces):
            buffer = ring.buffers[number % len(ring.buffers)]
            for run in piece.runs:
                target = buffer[run.target : run.target + run.nbytes]
                # The best: in between the host may be late.
                rate = max(rate, run.nbytes / max(1e-9, source.time_copy(segments, target, piece, run)))
    if not rate:
        return
    _log.info("link to the device measured", gb_per_s=round(rate / 1e9, 1), layer_mib=round(nbytes / 2**20))
    streamer.chooser.measured(LayerCosts(nbytes / rate, costs.cpu, costs.gpu), nbytes)
