"""Measures a graph of layers that do nothing but hand over, for each signal, server count and row count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius.app.bench.mailbox import HIDDEN_SIZE, TOP_K, echo_mailbox
from moebius.app.bench.mailbox_device.rows import TABLE, DeviceRow, make_row
from moebius.app.bench.output import write_json
from moebius.errors import UserError
from moebius.mailbox import Mailbox


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Filled by the command line."""

    signals: tuple[str, ...]
    servers: tuple[int, ...]
    rows: tuple[int, ...]
    layers: int
    replays: int
    copy_kib: int | None  # from how many KiB the copy engine moves rows; None: measured
    jit_cache_dir: str


def run(options: DeviceOptions, json_file: Path | None = None) -> list[DeviceRow]:
    """Prints each row as it is measured; also writes JSON rows to `json_file` when given.

    Raises:
        UserError: there is no CUDA device, or a part of the gpu extra is missing.
        MailboxError: an echo process did not start or died.
    """
    import torch

    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; allowed here: cpu")
    from moebius.app.bench.mailbox_device.ping_pong import pci_round_trip_us

    limit_us = pci_round_trip_us(options.jit_cache_dir)
    name = torch.cuda.get_device_name()
    print(f"hand-off of a layer of {HIDDEN_SIZE}, {options.layers} in a graph, {name} (microseconds)")
    TABLE.print_header()
    results = []
    for servers in options.servers:
        for signal in options.signals:
            with echo_mailbox(servers, options.rows) as box:
                for row in measure(box, signal, options, limit_us):
                    TABLE.print_row(row)
                    results.append(row)
    print("limit: one word over PCIe to a spinning process and back; server: its echo, which is not hand-off")
    write_json(results, json_file)
    return results


def measure(box: Mailbox, signal: str, options: DeviceOptions, limit_us: float) -> list[DeviceRow]:
    """All row counts with one signal on one mailbox."""
    from moebius.app.bench.mailbox_device.layers import DoorbellLayers, HostLayers

    layers = HostLayers(box) if signal == "host" else DoorbellLayers(box, signal, options)
    results = []
    try:
        for rows in options.rows:
            before = _busy(box)
            times = replay_times(layers.make(rows), layers.begin, options)
            layers.check(rows)
            calls, seconds = (after - start for after, start in zip(_busy(box), before, strict=True))
            results.append(
                make_row(
                    signal,
                    box.geometry.num_servers,
                    rows,
                    HIDDEN_SIZE,
                    TOP_K,
                    options.layers,
                    times,
                    seconds * 1e6 / max(calls, 1),
                    limit_us,
                )
            )
    finally:
        layers.close()
    return results


def replay_times(layer: Callable[[], None], begin: Callable[[], None], options: DeviceOptions) -> list[float]:
    """Microseconds per layer of each replay of a graph of layers, after some unmeasured ones."""
    import torch

    # torch leaves these untyped.
    cuda: Any = torch.cuda
    begin()
    layer()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for _ in range(options.layers):
            layer()
    times = []
    for replay in range(options.replays + options.replays // 10 + 1):
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay > options.replays // 10:
            times.append(start.elapsed_time(end) * 1000 / options.layers)
    del graph
    return times


def _busy(box: Mailbox) -> tuple[int, float]:
    """Calls and seconds of the server that computed longest."""
    states = [box.server_state(index) for index in range(box.geometry.num_servers)]
    slowest = max(states, key=lambda state: state.busy_s)
    return slowest.calls, slowest.busy_s
