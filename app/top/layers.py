"""Who computes each layer's experts, and what is copied for it, between two answers of `/v1/live`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class LayerRates:
    """One MoE layer; filled by `layer_rates`. None: not known, or nothing of the kind happens."""

    layer: int
    resident_share: float  # of its experts, now
    streamed_share: float | None  # of its experts, a step on average
    fetched_per_step: float | None  # experts that decode steps lacked and copied
    hit_rate: float | None  # of decoding rows' choices, experts on the GPU
    exchanges_per_second: float | None
    copied_bytes_per_second: float | None  # for streamed steps, fetched experts and exchanges
    cpu_bytes_per_second: float | None  # read by expert servers while they computed the layer
    call_microseconds: float | None  # of the server that computed longest


def layer_rates(
    before: Mapping[str, Any], now: Mapping[str, Any], elapsed: float, steps: float | None
) -> list[LayerRates]:
    """Returns the rates by layer, ascending.

    `steps`: forward passes in the `elapsed` seconds; None: not known.
    """
    experts = now.get("experts") or {}
    old = {layer["layer"]: layer for layer in (before.get("experts") or {}).get("layers") or []}
    total = max(1, experts.get("num_experts") or 1)
    found = []
    for layer in experts.get("layers") or []:
        then = old.get(layer["layer"])
        streamed = _difference(then, layer, "streamed", "experts")
        fetched = _difference(then, layer, "fetched", "experts")
        choices = _difference(then, layer, "decode", "choices")
        hits = _difference(then, layer, "decode", "hits")
        swaps = _difference(then, layer, "exchanges", "count")
        copied = [_difference(then, layer, name, "bytes") for name in ("streamed", "fetched", "exchanges")]
        known = [nbytes for nbytes in copied if nbytes is not None]
        seconds = _difference(then, layer, "", "cpu_seconds")
        nbytes, calls = (_difference(then, layer, "", name) for name in ("cpu_bytes", "cpu_calls"))
        found.append(
            LayerRates(
                layer["layer"],
                len(layer["gpu_experts"]) / total,
                streamed / steps / total if steps and streamed is not None else None,
                fetched / steps if steps and fetched is not None else None,
                hits / choices if choices and hits is not None else None,
                swaps / elapsed if swaps is not None else None,
                sum(known) / elapsed if known else None,
                nbytes / seconds if seconds and nbytes is not None else None,
                1e6 * seconds / calls if calls and seconds is not None else None,
            )
        )
    return found


def _difference(then: Mapping[str, Any] | None, now: Mapping[str, Any], part: str, name: str) -> float | None:
    """Returns what was added to a counter between two readings; None where one lacks it or the count was
    reset.
    """
    if then is None:
        return None
    old, new = ((found.get(part) or {} if part else found).get(name) for found in (then, now))
    return None if old is None or new is None or new < old else float(new - old)


def moves_experts(rates: Sequence[LayerRates]) -> bool:
    """Returns whether a GPU has experts of some layer, or gets some."""
    return any(rate.resident_share or rate.streamed_share or rate.fetched_per_step for rate in rates)


def layer_table(rates: Sequence[LayerRates], roofline: float | None) -> Table:
    """Returns a line for each. `roofline`: what all expert servers can read, bytes per second."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    titles = ("layer", "on GPU", "streamed", "fetch", "hits", "swaps/s", "MB/s", "CPU GB/s", "of it", "µs")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True, min_width=len(title))
    for rate in rates:
        read = rate.cpu_bytes_per_second
        table.add_row(
            str(rate.layer),
            f"{rate.resident_share:.0%}",
            _text(rate.streamed_share, "{:.0%}"),
            _text(rate.fetched_per_step, "{:.1f}"),
            _text(rate.hit_rate, "{:.0%}"),
            _text(rate.exchanges_per_second, "{:.1f}"),
            _text(rate.copied_bytes_per_second, "{:.1f}", 1e-6),
            _text(read, "{:.1f}", 1e-9),
            _text(read / roofline if read is not None and roofline else None, "{:.0%}"),
            _text(rate.call_microseconds, "{:.0f}"),
        )
    return table


def _text(value: float | None, pattern: str, scale: float = 1.0) -> str:
    return "-" if value is None else pattern.format(value * scale)
