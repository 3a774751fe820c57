"""`moebius bench decode`: tokens per second of a running server, and the memory-bandwidth limit.

Every decode step has to read the dense weights once and the experts its rows chose, so with B bytes per
step and a bandwidth of W no server makes more than `streams * W / B` tokens per second.
"""

from __future__ import annotations

import concurrent.futures
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from app.bench.bounds import WeightBytes
from app.bench.limit_doubts import print_doubts
from app.bench.limits import read_bandwidth
from app.bench.output import BenchTable, Column, or_dash, write_json
from app.client import ApiClient, ClientTls
from moebius.errors import UserError


@dataclass(frozen=True)
class StreamTimes:
    """One stream; filled by `_one_stream`. Seconds since the common start of its row."""

    first_token: float
    last_token: float
    tokens: int
    time_to_first_token: float  # From this stream's own request to its first token.

    @property
    def inter_token(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.last_token - self.first_token) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class DecodeRow:
    """Figures at one number of concurrent streams; filled by `measure`. The keys of the JSON rows."""

    streams: int
    tokens: int
    # Output tokens of all streams over the wall time from the first request to the last token.
    tokens_per_second: float
    ttft_p50_s: float
    ttft_p95_s: float
    inter_token_p50_s: float
    inter_token_p95_s: float
    # Unset when the checkpoint is not known.
    limit_tokens_per_second: float | None
    fraction_of_limit: float | None
    bandwidth_bytes_per_second: float | None


def run(
    base_url: str, model: str, api_key: str, streams: Sequence[int], max_tokens: int,
    checkpoint: Path | None, json_file: Path | None, tls: ClientTls | None = None,
) -> None:  # fmt: skip
    """Measures each number of streams in turn and prints a row per number. Raises UserError."""
    client = ApiClient(base_url, api_key, tls=tls)
    served = client.first_model()
    name = model or served.name
    directory = checkpoint or served.local_directory
    weights = WeightBytes.of(directory) if directory else None
    bandwidth = read_bandwidth() if weights else None
    if weights and bandwidth:
        print(f"memory read bandwidth {bandwidth / 1e9:.1f} GB/s; bytes per token at 1 stream ", end="")
        print(f"{weights.per_step(1) / 1e6:.1f} MB")
    _one_stream(client, name, 0, 8, time.perf_counter())  # the server's first request pays for warm-up
    _TABLE.print_header()
    rows = []
    for number, count in enumerate(streams, 1):
        # Nothing but on a terminal, where a row that takes minutes should move.
        what = f"row {number} of {len(streams)}: {count} streams of {max_tokens} tokens"
        with Console(stderr=True).status(what):
            rows.append(measure(client, name, count, max_tokens, weights, bandwidth))
        _TABLE.print_row(rows[-1])
    if weights and bandwidth:
        ratios = [row.fraction_of_limit for row in rows if row.fraction_of_limit is not None]
        print_doubts(base_url, weights.per_step(1), ratios)
    write_json(rows, json_file)


def measure(
    client: ApiClient, model: str, streams: int, max_tokens: int,
    weights: WeightBytes | None, bandwidth: float | None,
) -> DecodeRow:  # fmt: skip
    """Runs `streams` completions of `max_tokens` tokens at once."""
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        futures = [
            pool.submit(_one_stream, client, model, number, max_tokens, begin) for number in range(streams)
        ]
        times = [future.result() for future in futures]
    tokens = sum(stream.tokens for stream in times)
    speed = tokens / max(stream.last_token for stream in times)
    limit = streams * bandwidth / weights.per_step(streams) if weights and bandwidth else None
    first = [stream.time_to_first_token for stream in times]
    between = [stream.inter_token for stream in times]
    return DecodeRow(
        streams=streams,
        tokens=tokens,
        tokens_per_second=speed,
        ttft_p50_s=quantile(first, 0.5),
        ttft_p95_s=quantile(first, 0.95),
        inter_token_p50_s=quantile(between, 0.5),
        inter_token_p95_s=quantile(between, 0.95),
        limit_tokens_per_second=limit,
        fraction_of_limit=speed / limit if limit else None,
        bandwidth_bytes_per_second=bandwidth,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which `share` of the values lie, interpolated linearly."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def _one_stream(client: ApiClient, model: str, number: int, max_tokens: int, begin: float) -> StreamTimes:
    """Measures one greedy completion; prompts differ in their first words, so no prefix is shared."""
    body = {
        "model": model,
        "prompt": f"{number}. Report number {number} of this series tells how the following came about:",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    asked = time.perf_counter()
    first: float | None = None
    last, tokens = asked, 0
    for piece in client.stream("/v1/completions", body):
        if piece.text:
            last = time.perf_counter()
            first = first if first is not None else last
        tokens = piece.completion_tokens if piece.completion_tokens is not None else tokens
    if first is None or not tokens:
        raise UserError("the server's stream had no text or no usage; is it an OpenAI-compatible server?")
    return StreamTimes(first - begin, last - begin, tokens, first - asked)


_TABLE = BenchTable[DecodeRow](
    Column("streams", lambda row: f"{row.streams}"),
    Column("tokens/s", lambda row: f"{row.tokens_per_second:.1f}", 9),
    Column("limit", lambda row: or_dash(row.limit_tokens_per_second, 1, "unknown"), 9),
    Column("ratio", lambda row: or_dash(row.fraction_of_limit, 3), 6),
    Column("TTFT p50", lambda row: f"{row.ttft_p50_s * 1e3:.0f} ms", 9),
    Column("p95", lambda row: f"{row.ttft_p95_s * 1e3:.0f} ms", 8),
    Column("inter-token p50", lambda row: f"{row.inter_token_p50_s * 1e3:.1f} ms"),
    Column("p95", lambda row: f"{row.inter_token_p95_s * 1e3:.1f} ms", 8),
)
