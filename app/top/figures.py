"""What two answers of `/v1/live` say about the time between them. What is not known is None, never zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from app.top.layers import LayerRates, layer_rates

# Shares from which something is called the limit.
_KV_IS_FULL = 0.95
_STEPS_FILL = 0.5
_MOST_OF_STEP = 0.5
_NOTABLE_HAND_OFF = 0.2
_NEAR_ROOFLINE = 0.6
_LINK_IS_FULL = 0.7


@dataclass(frozen=True)
class ServerRates:
    """One expert server between two answers; filled by `server_rates`."""

    index: int
    busy_share: float  # of the time
    bytes_per_second: float  # packed weights read, over the whole time
    busy_bytes_per_second: float | None  # the same while it computed; None: it did not
    # Of what its kernels reached at load; None: that was not measured, or nothing was computed.
    of_roofline: float | None


@dataclass(frozen=True)
class Figures:
    """Filled by `figures_between`. Seconds unless said otherwise."""

    limit: str  # What limits the step, for people.
    roofline_bytes_per_second: float | None = None
    elapsed: float = 0.0
    servers: list[ServerRates | None] = field(default_factory=list)  # None: it is away, or was restarted
    bytes_per_second: float | None = None
    steps_per_second: float | None = None
    step: float | None = None  # one forward pass
    step_share: float | None = None  # of the time in which steps were under way; above 1 where they overlap
    experts_per_step: float | None = None  # computing of the server that computed longest
    hand_off_per_step: float | None = None
    hand_off_per_call: float | None = None
    # Microseconds of one call by layer.
    layers: dict[int, float] = field(default_factory=dict)
    # Who computes each layer, and what is copied for it.
    placement: list[LayerRates] = field(default_factory=list)
    # Bytes per second to the GPU, for streamed steps, fetched experts and exchanges, and their share of what
    # the link can.
    link_bytes_per_second: float | None = None
    link_share: float | None = None
    # Of the steps in between: what they should have taken over what they took.
    predicted_share: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns all fields."""
        return asdict(self)


def figures_between(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Figures:
    """`before` is an earlier answer of the same replica; None: only what needs no difference is known."""
    elapsed = now["time"] - before["time"] if before is not None else 0.0
    if before is None or elapsed <= 0:
        return Figures(roofline_bytes_per_second=_roofline(now), limit=_limit(now, None))
    servers = server_rates(before, now, elapsed)
    known = [server for server in servers if server is not None]
    steps = _difference(before, now, "steps", "count")
    seconds = _difference(before, now, "steps", "seconds")
    busy = max((server.busy_share for server in known), default=None)
    has_steps = bool(steps and seconds)
    hand_off, calls = _hand_off(before, now)
    figures = Figures(
        elapsed=elapsed,
        servers=servers,
        bytes_per_second=sum(server.bytes_per_second for server in known) if known else None,
        roofline_bytes_per_second=_roofline(now),
        steps_per_second=None if steps is None else steps / elapsed,
        step=seconds / steps if steps and seconds else None,
        step_share=None if seconds is None else seconds / elapsed,
        experts_per_step=busy * elapsed / steps if has_steps and steps and busy is not None else None,
        hand_off_per_step=hand_off / steps if has_steps and steps and hand_off is not None else None,
        hand_off_per_call=hand_off / calls if calls and hand_off is not None else None,
        layers=_layers(before, now),
        placement=layer_rates(before, now, elapsed, steps),
        predicted_share=_predicted_share(before, now),
        limit="",
    )
    copied = [rate.copied_bytes_per_second for rate in figures.placement]
    link = (now.get("costs") or {}).get("link_bytes_per_second")
    if figures.placement and None not in copied:
        rate = sum(value or 0.0 for value in copied)
        share = rate / link if link else None
        figures = replace(figures, link_bytes_per_second=rate, link_share=share)
    return replace(figures, limit=_limit(now, figures))


def server_rates(
    before: Mapping[str, Any], now: Mapping[str, Any], elapsed: float
) -> list[ServerRates | None]:
    """Returns the rates of each server, in the order of the answer."""
    old = {server["index"]: server for server in _servers(before)}
    found: list[ServerRates | None] = []
    for server in _servers(now):
        then = old.get(server["index"])
        if not server["is_up"] or not then or not then["is_up"] or then["instance"] != server["instance"]:
            found.append(None)
            continue
        read = server["weight_bytes"] - then["weight_bytes"]
        busy = server["busy_seconds"] - then["busy_seconds"]
        while_busy = read / busy if busy > 0 else None
        limit = server["calibrated_bytes_per_second"]
        share = while_busy / limit if while_busy is not None and limit else None
        found.append(ServerRates(server["index"], busy / elapsed, read / elapsed, while_busy, share))
    return found


def _servers(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list((answer.get("experts") or {}).get("servers") or [])


def _roofline(now: Mapping[str, Any]) -> float | None:
    rates = [float(server.get("calibrated_bytes_per_second") or 0) for server in _servers(now)]
    return sum(rates) if rates and all(rates) else None


def _difference(before: Mapping[str, Any], now: Mapping[str, Any], part: str, name: str) -> float | None:
    """Returns what was added to a counter between two readings; None where the server lacks it or was
    restarted.
    """
    then, found = (before.get(part) or {}).get(name), (now.get(part) or {}).get(name)
    return None if then is None or found is None or found < then else found - then


def _hand_off(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Returns seconds and calls."""
    old, new = (before.get("experts") or {}), (now.get("experts") or {})
    return _difference(old, new, "hand_off", "seconds"), _difference(old, new, "hand_off", "calls")


def _predicted_share(before: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    predicted = _difference(before, now, "costs", "predicted_seconds")
    measured = _difference(before, now, "costs", "measured_seconds")
    return predicted / measured if predicted is not None and measured else None


def _layers(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[int, float]:
    old = {layer["layer"]: layer for layer in (before.get("experts") or {}).get("layers") or []}
    found = {}
    for layer in (now.get("experts") or {}).get("layers") or []:
        then = old.get(layer["layer"])
        if then is None or layer.get("cpu_seconds") is None or then.get("cpu_seconds") is None:
            continue
        calls = layer["cpu_calls"] - then["cpu_calls"]
        seconds = layer["cpu_seconds"] - then["cpu_seconds"]
        if calls > 0 and seconds >= 0:
            found[int(layer["layer"])] = 1e6 * seconds / calls
    return found


def _limit(now: Mapping[str, Any], figures: Figures | None) -> str:
    requests, kv = now["requests"], now["kv_cache"]
    if not requests["running"] and not requests["waiting"]:
        return "nothing: no request is running"
    if requests["waiting"] and kv["used_tokens"] >= _KV_IS_FULL * max(1, kv["total_tokens"]):
        return "KV cache: it is full, and requests wait for room"
    if requests["waiting"] and requests["running"] >= requests["max_running"]:
        return f"--max-num-seqs: {requests['running']} requests run at once, others wait"
    if figures is None or not figures.step or figures.step_share is None:
        return "not known yet"
    if figures.step_share < _STEPS_FILL:
        return f"arriving work: steps take {figures.step_share:.0%} of the time"
    link = (figures.link_share or 0.0) / min(1.0, figures.step_share)
    if link >= _LINK_IS_FULL:
        return f"link to the GPU: copies of experts take {link:.0%} of a step"
    experts = (figures.experts_per_step or 0.0) / figures.step
    hand_off = (figures.hand_off_per_step or 0.0) / figures.step
    if experts >= _MOST_OF_STEP:
        return _experts_limit(experts, figures)
    if hand_off >= _NOTABLE_HAND_OFF:
        return f"hand-off to expert servers: {hand_off:.0%} of a step (shared cores?)"
    return (
        f"the engine's own part (attention, dense layers): {max(0.0, 1 - experts - hand_off):.0%} of a step"
    )


def _experts_limit(share: float, figures: Figures) -> str:
    known = [server for server in figures.servers if server is not None and server.of_roofline is not None]
    part = f"{share:.0%} of a step"
    if not known:
        return f"experts on the CPU: {part}"
    slowest = max(known, key=lambda server: server.busy_share)
    assert slowest.of_roofline is not None
    if slowest.of_roofline >= _NEAR_ROOFLINE:
        return f"CPU memory bandwidth: experts are {part}, {slowest.of_roofline:.0%} of the roofline"
    return f"CPU cores: experts are {part}, {slowest.of_roofline:.0%} of the roofline (many rows?)"
