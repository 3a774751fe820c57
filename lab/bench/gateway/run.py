"""Measures the gateway, then the limit, and prints a row per figure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.bench.output import BenchTable, Column, write_json
from lab.bench.gateway.clients import (
    connect,
    first_bytes,
    read_answer,
    request_bytes,
    whole_requests,
)
from lab.bench.gateway.engine import write_tokenizer
from lab.bench.gateway.processes import (
    bare_server,
    cpu_seconds,
    descendants,
    free_port,
    gateway,
    http_processes,
    own_affinity,
    scripted_engine,
)
from lab.bench.gateway.stalls import HEAVY, Stall, measure_stalls
from moebius.config import MoebiusConfig
from moebius.errors import UserError

PROMPT = "Tell me about the people who live in the world of this story, year by year."
_SETTLE_S = 1.0  # streams run for so long before they are measured
_SHORT = 8  # tokens of an answer whose beginning counts
_WHOLE_TOKENS = 16
_ROUNDS = 3


@dataclass(frozen=True)
class GatewayOptions:
    """Filled by the command line."""

    streams: int = 64
    step_ms: float = 10.0  # between two tokens of a stream
    seconds: float = 4.0  # of each measurement
    arrivals: int = 256  # streams that arrive together
    connections: int = 32  # of requests that are not streamed
    workers: int = 1
    engine: str = ""  # address of another engine; empty: the scripted one
    heavy: tuple[str, ...] = ()  # requests whose effect on another stream is measured


@dataclass(frozen=True)
class GatewayRow:
    """One figure; filled by `run`. The keys of the JSON rows."""

    figure: str
    unit: str
    ours: float
    limit: float  # of the same kind, measured in the same run
    ratio: float  # how many times the limit ours costs; of rates how much of it ours reaches


_TABLE = BenchTable[GatewayRow](
    Column("figure", lambda row: row.figure, 48, left=True),
    Column("ours", lambda row: f"{row.ours:.1f}", 9),
    Column("limit", lambda row: f"{row.limit:.1f}", 9),
    Column("unit", lambda row: row.unit, 10, left=True),
    Column("ratio", lambda row: f"{row.ratio:.2f}", 7),
)


@dataclass(frozen=True)
class Figures:
    """What one server shows; filled by `_measure`."""

    cpu_us_per_token: float
    tokens_per_second: float
    first_byte_p50_ms: float
    first_byte_p99_ms: float
    requests_per_second: float
    cpu_us_per_request: float  # of one that is not streamed; prompt processes included


def run(options: GatewayOptions, json_file: Path | None = None) -> list[GatewayRow]:
    """Measures and prints; also writes JSON rows to `json_file` when given.

    Raises:
        UserError: a process did not start, or an unknown name in `heavy`.
    """
    unknown = sorted(set(options.heavy) - set(HEAVY))
    if unknown:
        raise UserError(f"--heavy: {unknown[0]!r} is not allowed; allowed: {', '.join(HEAVY)}")
    print(
        f"{options.streams} streams, a token each {options.step_ms:g} ms; {options.workers} gateway "
        f"process(es), {own_affinity()} CPUs for all"
    )
    with tempfile.TemporaryDirectory(prefix="mb-gw-") as name:
        directory = Path(name)
        try:
            ours, stalls = _gateway_figures(options, directory)
            with bare_server(port := free_port(), directory, options.step_ms) as pid:
                limit = asyncio.run(_measure(options, port, pid, "bare"))
        except ConnectionError as error:
            raise UserError(f"a request of the bench was not answered: {error}") from error
    rows = [*_rows(ours, limit), *_stall_rows(stalls)]
    _TABLE.print_all(rows)
    write_json(rows, json_file)
    return rows


def _gateway_figures(options: GatewayOptions, directory: Path) -> tuple[Figures, list[Stall]]:
    """Returns the gateway's, and the records for the limit's server."""
    write_tokenizer(directory)
    address = options.engine or f"unix:{directory}/engine.sock"
    config = _settings(options, address, directory)
    with contextlib.ExitStack() as stack:
        if not options.engine:
            stack.enter_context(scripted_engine(address, directory, options.step_ms))
        pid = stack.enter_context(gateway(config, directory))
        port = config.gateway.port
        model = _served_model(port)
        asyncio.run(_record(port, model, directory))
        figures = asyncio.run(_measure(options, port, pid, model))
        stalls = asyncio.run(measure_stalls(port, model, options.heavy)) if options.heavy else []
    return figures, stalls


def _settings(options: GatewayOptions, address: str, directory: Path) -> MoebiusConfig:
    most = max(options.arrivals, options.streams, options.connections)
    return MoebiusConfig.model_validate(
        {
            # Another engine says itself which tokenizer it has.
            "model": {"model": "" if options.engine else str(directory)},
            "gateway": {
                "port": free_port(),
                "engine_address": address,
                "max_queued_requests": 2 * most,
                "workers": options.workers,
                "max_body_mib": 64.0,
            },
            "images": {"max_images_per_request": 32},
            "telemetry": {"log_level": "warning"},
            "security": {"grpc_tls": "off"},  # as the scripted engine, on a socket of this directory
        }
    )


def _served_model(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def chat(model: str, tokens: int, stream: bool) -> bytes:
    """Returns the request that is measured."""
    messages = [{"role": "user", "content": PROMPT}]
    return request_bytes({"model": model, "messages": messages, "max_tokens": tokens, "stream": stream})


async def _record(port: int, model: str, directory: Path) -> None:
    """Bytes of our answers, for the limit's server to send."""
    (client,) = await connect(port, 1)
    client.record = []
    client.send(chat(model, 4, True))
    await client.done
    client.close()
    text = b"".join(client.record).decode()
    events = [line + "\n\n" for line in text.splitlines() if line.startswith("data: ")]
    if client.failure or len(events) < 5:
        raise UserError(f"a stream of the bench failed: {text[:500]}")
    # The role comes with the first token, the finish reason with [DONE].
    parts = [events[0] + events[1], events[2], "".join(events[-2:])]
    (directory / "events.json").write_text(json.dumps(parts), encoding="utf-8")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(chat(model, _WHOLE_TOKENS, False))
    (directory / "whole.json").write_bytes(await read_answer(reader))
    writer.close()


async def _measure(options: GatewayOptions, port: int, pid: int, model: str) -> Figures:
    """Returns one server's figures."""
    cpu_us_per_token, rate = await _stream_cost(options, port, pid, model)
    short = chat(model, _SHORT, True)
    rounds = [await first_bytes(port, options.arrivals, short) for _ in range(1 + _ROUNDS)][1:]
    times = sorted(rounds, key=lambda one: one[len(one) // 2])[_ROUNDS // 2]
    whole = chat(model, _WHOLE_TOKENS, False)
    pids = descendants(pid)
    cpu, begin = cpu_seconds(pids), time.perf_counter()
    requests = await whole_requests(port, options.connections, whole, options.seconds)
    cpu_us = (cpu_seconds(pids) - cpu) / (requests * (time.perf_counter() - begin)) * 1e6
    p50, p99 = times[len(times) // 2], times[min(len(times) - 1, int(len(times) * 0.99))]
    return Figures(cpu_us_per_token, rate, p50 * 1e3, p99 * 1e3, requests, cpu_us)


async def _stream_cost(options: GatewayOptions, port: int, pid: int, model: str) -> tuple[float, float]:
    """Processor time per token, µs, and tokens per second, while all streams run."""
    clients = await connect(port, options.streams)
    # Enough for twice the time: none ends while it is measured.
    tokens = int(2e3 * (options.seconds + _SETTLE_S + 2.0) / options.step_ms) + 2
    request = chat(model, tokens, True)
    for client in clients:
        client.send(request)
    await asyncio.gather(*(client.began for client in clients))
    failures = [client.failure for client in clients if client.failure]
    if failures:
        raise ConnectionError(failures[0][:500])
    await asyncio.sleep(_SETTLE_S)
    pids = http_processes(pid)
    cpu, events, begin = cpu_seconds(pids), _events(clients), time.perf_counter()
    await asyncio.sleep(options.seconds)
    cpu, events, seconds = (
        cpu_seconds(pids) - cpu,
        _events(clients) - events,
        time.perf_counter() - begin,
    )
    for client in clients:
        client.close()
    await asyncio.sleep(0.2)
    return cpu / max(events, 1) * 1e6, events / seconds


def _events(clients: list[Any]) -> int:
    return sum(client.events for client in clients)


def _rows(ours: Figures, limit: Figures) -> Iterator[GatewayRow]:
    named = (
        ("cpu_us_per_token", "processor time per streamed token", "µs"),
        ("tokens_per_second", "tokens per second meanwhile", "1/s"),
        ("first_byte_p50_ms", "first byte of streams that arrive together, p50", "ms"),
        ("first_byte_p99_ms", "first byte of streams that arrive together, p99", "ms"),
        ("requests_per_second", "requests that are not streamed", "1/s"),
        ("cpu_us_per_request", "processor time per such request, all processes", "µs"),
    )
    for field, name, unit in named:
        one, other = getattr(ours, field), getattr(limit, field)
        yield GatewayRow(name, unit, one, other, one / max(other, 1e-9))


def _stall_rows(stalls: list[Stall]) -> Iterator[GatewayRow]:
    for stall in stalls:
        name = f"longest gap of a stream during {stall.name}"
        yield GatewayRow(name, "ms", stall.gap_ms, stall.quiet_ms, stall.gap_ms / max(stall.quiet_ms, 1e-9))
