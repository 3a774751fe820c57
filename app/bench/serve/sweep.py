"""The rows of a sweep: requests that arrive at a rate or wait for a free place, and what they add up to."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from app.bench.bounds import WeightBytes
from app.bench.limit_doubts import print_doubts
from app.bench.limits import read_bandwidth
from app.bench.output import BenchTable, Column, write_json
from app.bench.serve.client import Endpoint, EndpointOptions, Sample, measure_scale
from app.bench.serve.dataset import Dataset, LengthOptions, PromptRequest
from app.bench.serve.plot import write_plot
from app.client import ApiClient
from moebius.errors import UserError

# Names of the latencies, as vLLM's and SGLang's benchmarks have them.
LATENCIES = ("ttft", "tpot", "itl", "e2el")
_BANDWIDTH = "memory bandwidth, output tokens/s"
_LIMITED = ("ttft", "tpot", "e2el")
# A client that sends this much later than planned measures itself.
_LATE_S = 0.1


@dataclass(frozen=True)
class SweepOptions:
    """Filled by the command line."""

    # Requests per second; infinite: all at once.
    request_rates: tuple[float, ...] = (math.inf,)
    # None: no bound.
    max_concurrencies: tuple[int | None, ...] = (None,)
    num_prompts: int = 100
    num_warmups: int = 1
    # Shape of the gamma distribution of the pauses between arrivals; 1: a Poisson process.
    burstiness: float = 1.0
    seed: int = 0
    # Milliseconds by latency that a good request stays within; empty: goodput is not computed.
    goodput: dict[str, float] = field(default_factory=dict)
    percentiles: tuple[float, ...] = (50, 90, 99)
    # Whose weights a decode step has to read: with it the memory bandwidth of this machine is a limit.
    checkpoint: Path | None = None
    json_file: Path | None = None
    plot_file: Path | None = None


@dataclass(frozen=True)
class SweepRow:
    """One rate with one concurrency; filled by `measure_row`."""

    request_rate: float
    max_concurrency: int | None
    samples: list[Sample]
    duration: float  # seconds, from the first request to the last end
    goodput: dict[str, float]
    # What bounds this row: a name, its value, and our figure; None where nothing known does.
    limit: tuple[str, float, float] | None = None

    @property
    def good(self) -> list[Sample]:
        """Completed requests."""
        return [sample for sample in self.samples if not sample.error]

    @property
    def name(self) -> str:
        """For plots and lines about this row."""
        rate = "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} requests/s"
        return rate if self.max_concurrency is None else f"{rate}, at most {self.max_concurrency}"

    def values(self, latency: str) -> list[float]:
        """Returns milliseconds, of all completed requests."""
        found: list[float] = []
        for sample in self.good:
            if latency == "itl":
                found += sample.itl
            elif (value := getattr(sample, latency)) is not None:
                found.append(value)
        return [1e3 * value for value in found]

    def percentile(self, latency: str, percent: float) -> float | None:
        """Returns milliseconds; None: nothing was measured."""
        values = self.values(latency)
        return float(np.percentile(values, percent)) if values else None

    @property
    def errors(self) -> dict[str, int]:
        """Returns how often each thing went wrong, the most frequent first."""
        return dict(Counter(sample.error for sample in self.samples if sample.error).most_common())

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return sum(sample.output_tokens for sample in self.good) / self.duration

    @property
    def request_goodput(self) -> float | None:
        """Requests per second that stay within every limit; None without limits."""
        if not self.goodput:
            return None
        kept = sum(all(_within(sample, *limit) for limit in self.goodput.items()) for sample in self.good)
        return kept / self.duration

    @property
    def late(self) -> float:
        """Seconds that 1 % of the requests were sent later than planned by at least."""
        return float(np.percentile([sample.late for sample in self.samples], 99))

    def to_json(self, percentiles: Sequence[float]) -> dict[str, Any]:
        """Keys as in the JSON files of `vllm bench serve`, and `limit`, `ratio`."""
        inputs = sum(sample.input_tokens for sample in self.good)
        outputs = sum(sample.output_tokens for sample in self.good)
        row: dict[str, Any] = {
            "request_rate": "inf" if math.isinf(self.request_rate) else self.request_rate,
            "max_concurrency": self.max_concurrency,
            "num_prompts": len(self.samples),
            "completed": len(self.good),
            "failed": len(self.samples) - len(self.good),
            "errors": self.errors,
            "duration": self.duration,
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "request_throughput": len(self.good) / self.duration,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": (inputs + outputs) / self.duration,
        }
        for latency in LATENCIES:
            values = self.values(latency)
            row[f"mean_{latency}_ms"] = float(np.mean(values)) if values else None
            row[f"median_{latency}_ms"] = float(np.median(values)) if values else None
            row[f"std_{latency}_ms"] = float(np.std(values)) if values else None
            for percent in percentiles:
                row[f"p{percent:g}_{latency}_ms"] = self.percentile(latency, percent)
        row["p99_late_ms"] = 1e3 * self.late
        name, limit, ours = self.limit or (None, None, None)
        row |= {"limit_of": name, "limit": limit, "ratio": ours / limit if ours and limit else None}
        return row


def _within(sample: Sample, latency: str, limit_ms: float) -> bool:
    value = getattr(sample, latency)
    # An output of one token has no time per further token: nothing of it was late.
    return value is None or 1e3 * value <= limit_ms


def parse_goodput(text: str) -> dict[str, float]:
    """Returns "ttft:500 tpot:50", separated by blanks or commas. Raises UserError."""
    limits = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in _LIMITED or not limits[name] > 0:
            allowed = ", ".join(f"{each}:MILLISECONDS" for each in _LIMITED)
            raise UserError(f"--goodput: {part!r} is not allowed; allowed: {allowed}")
    return limits


def parse_rates(text: str) -> tuple[float, ...]:
    """Returns numbers above 0 or "inf", separated by commas. Raises UserError."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (math.nan,)
    if not all(rate > 0 for rate in rates):
        raise UserError(
            f"--request-rate: {text!r} is not allowed; allowed: numbers > 0 or inf, comma separated"
        )
    return rates


def parse_concurrencies(text: str) -> tuple[int | None, ...]:
    """Returns whole numbers above 0 or "none", separated by commas. Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part == "none" or (part.isdecimal() and int(part) > 0) for part in parts):
        raise UserError(
            f"--max-concurrency: {text!r} is not allowed; allowed: numbers >= 1 or none, comma separated"
        )
    return tuple(None if part == "none" else int(part) for part in parts)


def parse_extra_body(text: str) -> dict[str, Any]:
    """Returns a JSON object; empty: none. Raises UserError."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"--extra-body: {text!r} is not allowed; allowed: a JSON object")
    return found


def run(target: EndpointOptions, lengths: LengthOptions, options: SweepOptions) -> None:
    """Measures every rate with every concurrency and prints a row for each.

    Raises UserError when the server cannot be reached, or completes no request of a whole row.
    """
    target.check()
    lengths.check()
    client = ApiClient(target.url, target.api_key, tls=target.tls)
    model = target.model or client.first_model().name
    client.close()
    weights = WeightBytes.of(options.checkpoint) if options.checkpoint else None
    bandwidth = read_bandwidth() if weights else None
    rows: list[SweepRow] = []
    try:
        with asyncio.Runner() as runner:
            runner.run(_sweep(target, model, lengths, options, rows, weights, bandwidth))
        if weights and bandwidth:
            limits = [row.limit for row in rows if row.limit and row.limit[0] == _BANDWIDTH]
            print_doubts(target.url, weights.per_step(1), [ours / limit for _, limit, ours in limits])
    finally:
        write_json([row.to_json(options.percentiles) for row in rows], options.json_file)
        if options.plot_file is not None and rows:
            write_plot(rows, options.plot_file)


async def _sweep(
    target: EndpointOptions, model: str, lengths: LengthOptions, options: SweepOptions,
    rows: list[SweepRow], weights: WeightBytes | None, bandwidth: float | None,
) -> None:  # fmt: skip
    async with Endpoint(target, model) as endpoint:
        scale = await measure_scale(endpoint)
        dataset = Dataset(lengths, scale, options.seed)
        if warm_ups := dataset.draw(options.num_warmups, 0):
            # As the first row's: a server warms up with what it is going to be asked.
            most = options.max_concurrencies[0]
            await measure_row(endpoint, warm_ups, [0.0] * len(warm_ups), math.inf, most, {})
        print(f"{model} at {target.url}{target.endpoint}: {options.num_prompts} requests per row", flush=True)
        _TABLE.print_header()
        pairs = [(rate, most) for rate in options.request_rates for most in options.max_concurrencies]
        for part, (rate, most) in enumerate(pairs, 1):
            requests = dataset.draw(options.num_prompts, part)
            begins = arrivals(rate, options.num_prompts, options.burstiness, options.seed + part)
            row = await measure_row(endpoint, requests, begins, rate, most, options.goodput)
            row = _bounded(row, weights, bandwidth)
            rows.append(row)
            _TABLE.print_row(row)
            _explain(row)
            if not row.good:
                raise UserError(f"no request of this row was completed: {next(iter(row.errors))}")


def _bounded(row: SweepRow, weights: WeightBytes | None, bandwidth: float | None) -> SweepRow:
    """Returns the row with its limit: no more is answered than is asked, and no token is made without reading
    weights.
    """
    limit: tuple[str, float, float] | None = None
    if not math.isinf(row.request_rate):
        limit = ("request rate", row.request_rate, len(row.good) / row.duration)
    elif weights and bandwidth:
        streams = min(row.max_concurrency or len(row.samples), len(row.samples))
        fastest = streams * bandwidth / weights.per_step(streams)
        limit = (_BANDWIDTH, fastest, row.output_throughput)
    return SweepRow(row.request_rate, row.max_concurrency, row.samples, row.duration, row.goodput, limit)


def arrivals(rate: float, count: int, burstiness: float, seed: int) -> list[float]:
    """Returns the seconds from the start at which requests arrive, the first at 0.

    The pauses are drawn from a gamma distribution (exponential with `burstiness` 1), then stretched so that
    the requests together take count / rate seconds: short runs, too, have the rate that was asked for.
    """
    if math.isinf(rate):
        return [0.0] * count
    pauses = np.random.default_rng(seed).gamma(burstiness, 1.0, count)
    pauses *= count / rate / pauses.sum()
    return [0.0, *np.cumsum(pauses)[:-1].tolist()]


async def measure_row(
    endpoint: Endpoint, requests: Sequence[PromptRequest], begins: Sequence[float],
    rate: float, most: int | None, goodput: dict[str, float],
) -> SweepRow:  # fmt: skip
    """Sends request i `begins[i]` seconds after the start, or as soon as fewer than `most` are under way."""
    slots = asyncio.Semaphore(most or len(requests))
    done = 0
    # Nothing here but on a terminal, where a row that takes minutes should move.
    status = Console(stderr=True).status(f"0 of {len(requests)} requests")

    async def one(request: PromptRequest, planned: float) -> Sample:
        nonlocal done
        async with slots:
            sample = await endpoint.ask(request, planned if most is None else None)
        done += 1
        status.update(f"{done} of {len(requests)} requests")
        return sample

    begin = time.perf_counter()
    with status:
        tasks = []
        for request, after in zip(requests, begins, strict=True):
            pause = begin + after - time.perf_counter()
            if pause > 0:
                await asyncio.sleep(pause)
            tasks.append(asyncio.create_task(one(request, begin + after)))
        samples = list(await asyncio.gather(*tasks))
    duration = max(sample.end for sample in samples) - begin
    return SweepRow(rate, most, samples, duration, goodput)


def _explain(row: SweepRow) -> None:
    for error, count in list(row.errors.items())[:5]:
        print(f"    {count} of {len(row.samples)} failed: {error}", flush=True)
    if row.late > _LATE_S:
        print(f"    this client sent requests {row.late:.1f} s late; its machine is too busy for this rate")


def _ms(row: SweepRow, latency: str, percent: float) -> str:
    value = row.percentile(latency, percent)
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


_TABLE = BenchTable[SweepRow](
    Column("rate", lambda row: f"{row.request_rate:g}", 5),
    Column("at once", lambda row: str(row.max_concurrency or "-")),
    Column("ok", lambda row: f"{len(row.good)}", 5),
    Column("failed", lambda row: f"{len(row.samples) - len(row.good)}"),
    Column("req/s", lambda row: f"{len(row.good) / row.duration:.2f}", 6),
    Column("good/s", lambda row: "-" if row.request_goodput is None else f"{row.request_goodput:.2f}"),
    Column("tok/s", lambda row: f"{row.output_throughput:.1f}", 7),
    Column("TTFT p50", lambda row: _ms(row, "ttft", 50)),
    Column("p99 ms", lambda row: _ms(row, "ttft", 99)),
    Column("ITL p50", lambda row: _ms(row, "itl", 50)),
    Column("p99 ms", lambda row: _ms(row, "itl", 99)),
    Column("E2E p50", lambda row: _ms(row, "e2el", 50)),
    Column("p99 ms", lambda row: _ms(row, "e2el", 99)),
    Column("ratio", lambda row: "-" if row.limit is None else f"{row.limit[2] / row.limit[1]:.3f}", 5),
)
