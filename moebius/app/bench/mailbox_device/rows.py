"""What is measured, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moebius.app.bench.output import BenchTable, Column
from moebius.errors import UserError

SIGNALS = ("doorbell", "memops", "host")
MAX_ROWS = 4096


@dataclass(frozen=True)
class DeviceRow:
    """One measurement, microseconds per layer; filled by `run`."""

    signal: str  # doorbell kernels, stream memory operations, or host functions in the stream
    servers: int  # echo processes
    rows: int  # token rows per layer
    hidden_size: int  # elements per row, bfloat16 out and float32 back
    layers: int  # in one graph
    bytes_out: int  # of hidden states, ids and weights, per layer
    bytes_back: int  # of answers, per layer
    median_us: float  # a layer of a replayed graph
    p99_us: float
    server_us: float  # of it: the slowest server's echo
    hand_off_us: float  # median_us - server_us
    limit_us: float  # bare round trip of one word over PCIe, in the same run
    ratio: float  # hand_off_us / limit_us


def parse_numbers(text: str, option: str, most: int) -> tuple[int, ...]:
    """Comma-separated numbers. Raises UserError naming the option and what is allowed."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > most:
        raise UserError(f"{option}: {text!r} is not allowed; allowed: numbers 1..{most}, comma separated")
    return numbers


def parse_signals(text: str) -> tuple[str, ...]:
    """Comma-separated names of `SIGNALS`. Raises UserError naming the one that is none."""
    signals = tuple(text.split(","))
    for signal in signals:
        if signal not in SIGNALS:
            raise UserError(f"--signal: {signal!r} is not allowed; allowed: {', '.join(SIGNALS)}")
    return signals


def make_row(
    signal: str,
    servers: int,
    rows: int,
    hidden_size: int,
    top_k: int,
    layers: int,
    layer_us: Sequence[float],
    server_us: float,
    limit_us: float,
) -> DeviceRow:
    """From the microseconds per layer of each replay."""
    ordered = sorted(layer_us)
    median = ordered[len(ordered) // 2]
    return DeviceRow(
        signal=signal,
        servers=servers,
        rows=rows,
        hidden_size=hidden_size,
        layers=layers,
        bytes_out=rows * (2 * hidden_size + 8 * top_k),
        bytes_back=rows * 4 * hidden_size * servers,
        median_us=median,
        p99_us=ordered[int(0.99 * (len(ordered) - 1))],
        server_us=server_us,
        hand_off_us=median - server_us,
        limit_us=limit_us,
        ratio=(median - server_us) / limit_us,
    )


def _kib(nbytes: int) -> str:
    return f"{nbytes / 1024:.0f} KiB"


TABLE = BenchTable[DeviceRow](
    Column("signal", lambda row: row.signal, 9),
    Column("servers", lambda row: f"{row.servers}"),
    Column("rows", lambda row: f"{row.rows}", 5),
    Column("out", lambda row: _kib(row.bytes_out), 8),
    Column("back", lambda row: _kib(row.bytes_back), 8),
    Column("median", lambda row: f"{row.median_us:.1f}", 8),
    Column("p99", lambda row: f"{row.p99_us:.1f}", 8),
    Column("server", lambda row: f"{row.server_us:.1f}", 8),
    Column("hand-off", lambda row: f"{row.hand_off_us:.1f}", 9),
    Column("limit", lambda row: f"{row.limit_us:.2f}", 7),
    Column("ratio", lambda row: f"{row.ratio:.1f}", 6),
)
