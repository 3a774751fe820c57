"""Serves the live view's figures, as JSON. Unknown figures are null, never zero."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from protos import engine_pb2

# Seconds between two requests to the engine, for any number of viewers.
_FRESH_S = 0.5


@dataclass
class _Figures:
    """The last answer of one replica; filled by `LiveFigures`."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last: dict[str, Any] | None = None
    asked: float = 0.0  # time.monotonic()


class LiveFigures:
    """The engines' last answers, shared by all viewers."""

    def __init__(self, ask: Callable[[int], Awaitable[engine_pb2.GetLiveResponse]]) -> None:
        """`ask` calls GetLive of a replica, by its number."""
        self._ask = ask
        self._found: dict[int, _Figures] = {}

    async def get(self, replica: int) -> dict[str, Any]:
        """Returns figures that are at most half a second old. Raises grpc.aio.AioRpcError."""
        found = self._found.setdefault(replica, _Figures())
        async with found.lock:
            if found.last is None or time.monotonic() - found.asked >= _FRESH_S:
                found.last = None
                found.last = live_object(await self._ask(replica))
                found.asked = time.monotonic()
            return found.last


def live_object(live: engine_pb2.GetLiveResponse) -> dict[str, Any]:
    """Returns the engine's answer under the names in docs/web-page.md."""
    load, starts = live.load, live.first_token
    return {
        "object": "live",
        "time": time.time(),  # Unix seconds
        "version": load.version,
        "is_sleeping": load.is_sleeping,
        "tokens_per_second": load.gen_throughput,
        "prompt_tokens_per_second": live.prompt_throughput,
        "time_to_first_token": {"count": starts.count, "p50_s": starts.p50, "p95_s": starts.p95}
        if starts.count
        else None,
        "requests": {
            "running": load.num_running_reqs,
            "waiting": load.num_waiting_reqs,
            "max_running": load.max_running_requests,
            "preemptions": load.num_preemptions,
        },
        "kv_cache": {
            "used_tokens": load.num_used_tokens,
            "cached_tokens": load.num_cached_tokens,
            "total_tokens": load.max_total_num_tokens,
            "prefix_hit_rate": load.cache_hit_rate,
            "tiers": cache_tiers(live),
        },
        "draft_tokens": {"verified": load.draft_tokens, "accepted": load.accepted_tokens},
        "steps": {"count": live.steps, "seconds": live.step_seconds},
        "costs": _costs(live.costs) if live.HasField("costs") else None,
        "memory": _memory(live.memory) if live.HasField("memory") else None,
        "experts": _experts(live) if live.num_experts else None,
    }


def cache_tiers(live: engine_pb2.GetLiveResponse) -> list[dict[str, Any]]:
    """Returns what each tier of the prefix cache holds, the fastest first."""
    names = ("name", "tokens", "kept_tokens", "bytes", "total_bytes", "hit_tokens")
    return [{name: getattr(tier, name) for name in names} for tier in live.tiers]


def _memory(memory: engine_pb2.LiveMemory) -> dict[str, Any]:
    names = ("kv_bytes", "expert_bytes", "stream_bytes", "fetch_bytes", "free_bytes", "is_shared")
    return {name: getattr(memory, name) for name in names}


def _costs(costs: engine_pb2.LiveCosts) -> dict[str, Any]:
    optional = (
        "predicted_over_measured",
        "link_bytes_per_second",
        "cpu_expert_seconds",
        "gpu_expert_seconds",
        "copy_price",
    )
    return {
        "predicted_seconds": costs.predicted_seconds,
        "measured_seconds": costs.measured_seconds,
        **{name: getattr(costs, name) if costs.HasField(name) else None for name in optional},
        "times_measured_again": costs.times_measured_again,
    }


def _experts(live: engine_pb2.GetLiveResponse) -> dict[str, Any]:
    streams = live.HasField("streamed_steps")
    return {
        "num_experts": live.num_experts,
        "top_k": live.top_k,
        "recorder_is_on": live.recorder_is_on,
        "streamed": {"steps": live.streamed_steps, "bytes": live.streamed_bytes} if streams else None,
        "hand_off": {
            "calls": live.hand_off.calls,
            "wait_seconds": live.hand_off.wait_seconds,
            "seconds": live.hand_off.seconds,
        }
        if live.HasField("hand_off")
        else None,
        "servers": [_server(server) for server in live.servers],
        "layers": [_layer(layer) for layer in live.layers],
    }


def _layer(layer: engine_pb2.LiveLayer) -> dict[str, Any]:
    streams, follows = layer.HasField("streamed_experts"), layer.HasField("decode_choices")
    return {
        "layer": layer.layer,
        "gpu_experts": list(layer.gpu_experts),
        "cpu_rows": list(layer.cpu_rows) or None,
        "cpu_seconds": layer.cpu_seconds if layer.HasField("cpu_seconds") else None,
        "cpu_calls": layer.cpu_calls,
        "cpu_bytes": layer.cpu_bytes if layer.HasField("cpu_bytes") else None,
        "chosen": list(layer.chosen) or None,
        "streamed": {"experts": layer.streamed_experts, "bytes": layer.streamed_bytes} if streams else None,
        "decode": {"choices": layer.decode_choices, "hits": layer.decode_hits} if follows else None,
        "exchanges": {"count": layer.exchanges, "bytes": layer.exchange_bytes} if follows else None,
        "fetched": {
            "experts": layer.fetched_experts,
            "bytes": layer.fetched_bytes,
            "hits": layer.fetch_hits,
        }
        if layer.HasField("fetched_experts")
        else None,
    }


def _server(server: engine_pb2.LiveExpertServer) -> dict[str, Any]:
    if not server.is_up:
        return {"index": server.index, "is_up": False}
    return {
        "index": server.index,
        "is_up": True,
        "instance": str(server.instance_id),  # JavaScript numbers do not hold 64 bits
        "busy_seconds": server.busy_seconds,
        "weight_bytes": server.weight_bytes,
        "calibrated_bytes_per_second": server.calibrated_bytes_per_second or None,
        "packed_bytes": server.packed_bytes,
        "weight_format": server.weight_format,
        "isa": server.isa,
        "num_threads": server.num_threads,
        "numa_node": None if server.numa_node < 0 else server.numa_node,
    }
