"""`moebius bench memory`: a long prompt that comes while streams decode and experts hold most of the memory.

Two engines on the same expert servers: one whose KV pages and experts lend each other memory, and one with
a fixed split of as many bytes, whose KV cache has what the first one's had at most, and experts the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from app.bench.bounds import facts
from app.bench.output import BenchTable, Column, or_dash, write_json
from lab.bench.engine.drive import EngineUnderTest, Streams, running_engine
from lab.bench.engine.measure import random_prompts, span
from lab.bench.engine.servers import ExpertServers, running_servers
from moebius.config import MoebiusConfig
from moebius.errors import UserError

_STREAM_PROMPT, _MOST_TOKENS = 32, 16384
# How often a row of the time series is taken, and until when the experts of before must be back, seconds.
_EVERY_S, _BACK_WITHIN_S = 0.1, 30.0
# Of the experts of before, those that count as all.
_ALL = 0.98


@dataclass(frozen=True)
class MemoryOptions:
    """Filled by the command line."""

    prompt_len: int = 100_000
    streams: int = 8
    # Seconds in which streams decode before the prompt comes, and after it has ended.
    before_s: float = 5.0
    after_s: float = 8.0


@dataclass(frozen=True)
class MemoryPoint:
    """One moment of an engine; filled by `run`. The keys of the JSON rows."""

    split: str  # elastic, or fixed
    seconds: float  # Since the first point.
    decode_tokens_per_second: float  # Of all streams, since the last moment.
    experts: int  # In slots, over all layers.
    kv_bytes: int
    prompt_is_running: bool


@dataclass(frozen=True)
class MemoryResult:
    """One engine; filled by `run`. The keys of the JSON rows."""

    split: str
    experts_before: int
    least_experts: int
    kv_bytes_before: int
    most_kv_bytes: int
    # Of the streams together: before the prompt, until its first token, and after it.
    decode_before: float
    decode_during: float
    decode_after: float
    longest_wait_seconds: float  # Between two tokens of a stream, until the prompt's first token.
    prompt_seconds: float  # From its submission to its first token.
    # From then on until 98 % of the experts were in slots again; None: they were not.
    seconds_until_experts_are_back: float | None
    preemptions: int


_TABLE = BenchTable[MemoryResult](
    Column("split", lambda row: row.split, 8, left=True),
    Column("experts", lambda row: f"{row.experts_before}", 7),
    Column("least", lambda row: f"{row.least_experts}", 7),
    Column("KV GiB", lambda row: f"{row.kv_bytes_before / 2**30:.2f}", 7),
    Column("most", lambda row: f"{row.most_kv_bytes / 2**30:.2f}", 7),
    Column("decode tokens/s", lambda row: f"{row.decode_before:.1f}"),
    Column("with prompt", lambda row: f"{row.decode_during:.1f}"),
    Column("after", lambda row: f"{row.decode_after:.1f}", 7),
    Column("longest wait ms", lambda row: f"{row.longest_wait_seconds * 1e3:.0f}"),
    Column("prompt s", lambda row: f"{row.prompt_seconds:.2f}"),
    Column("experts back s", lambda row: or_dash(row.seconds_until_experts_are_back, 2)),
    Column("preempted", lambda row: f"{row.preemptions}"),
)


def run(config: MoebiusConfig, options: MemoryOptions, json_file: Path | None = None) -> list[MemoryResult]:
    """Prints a row for each engine and what streams keep of a fixed split's rate. Raises UserError."""
    from gpu_service.assembly.process import resolve_device

    device = resolve_device(config.gpu)
    results, points = list[MemoryResult](), list[MemoryPoint]()
    placement = config.placement.model_copy(update={"drop_resident": "keep"})
    gpu = config.gpu.model_copy(update={"elastic_memory": "on"})
    config = config.model_copy(update={"placement": placement, "gpu": gpu})
    with running_servers(config) as servers:
        _TABLE.print_header()
        own, page_bytes = servers, 0
        for split in ("elastic", "fixed"):
            with running_engine(own.config) as engine:
                if split == "elastic":
                    page_bytes = _page_bytes(engine)
                result, series = measure(engine, split, options, page_bytes)
                if split == "elastic":
                    own = _fixed(engine, own, result.most_kv_bytes // page_bytes)
            results.append(result)
            points += series
            _TABLE.print_row(result)
            # After each engine: an interrupted run keeps what it has.
            write_json(
                {"rows": [asdict(row) for row in results], "series": [asdict(point) for point in points]}
                | {"host": facts(device), "fraction_of_fixed": _kept(results)},
                json_file,
            )
    print(f"streams keep {_kept(results):.0%} of what the fixed split gives while the prompt is computed")
    return results


def _kept(results: Sequence[MemoryResult]) -> float | None:
    """Returns the streams' rate with the prompt, elastic over fixed; None: fixed was not measured yet."""
    return results[0].decode_during / results[1].decode_during if len(results) > 1 else None


def _page_bytes(engine: EngineUnderTest) -> int:
    """Returns the bytes of a page over all layers. Raises UserError where memory is not shared."""
    if engine.built.elastic is None:
        raise UserError(
            "memory is not shared here: it needs experts on the GPU that follow traffic "
            "(`gpu_experts_ratio`), and no num_pages"
        )
    return engine.built.elastic.page_bytes


def _fixed(engine: EngineUnderTest, servers: ExpertServers, pages: int) -> ExpertServers:
    """Returns the settings of a fixed split of as many bytes, with `pages` pages."""
    from gpu_service.experts.resident.experts import Share

    elastic, resident, config = engine.built.elastic, engine.built.resident, servers.config
    assert elastic is not None
    assert resident is not None
    moving = [slots for layer, slots in resident.slots.items() if resident.share(layer) is Share.SOME]
    left = elastic.pool.nbytes - pages * elastic.page_bytes
    count = max(1, left // sum(slots.kind.expert_bytes for slots in moving))
    gpu = config.gpu.model_copy(update={"elastic_memory": "off", "num_pages": pages, "kv_cache_gib": None})
    placement = config.placement.model_copy(update={"gpu_experts": int(count), "gpu_experts_ratio": None})
    return ExpertServers(config.model_copy(update={"gpu": gpu, "placement": placement}))


def stream_tokens(engine: EngineUnderTest) -> int:
    """Returns the number of tokens that a stream is allowed to make."""
    return min(engine.built.context_limit - _STREAM_PROMPT - 1, _MOST_TOKENS)


def measure(
    engine: EngineUnderTest, split: str, options: MemoryOptions, page_bytes: int
) -> tuple[MemoryResult, list[MemoryPoint]]:
    """One engine, and its time series. `page_bytes`: of a page over all layers.

    Raises UserError when a request fails or streams end early.
    """
    vocab_size = engine.built.model_config.vocab_size
    if options.prompt_len + 1 > engine.built.context_limit:
        raise UserError(
            f"--prompt-len: {options.prompt_len} is not allowed; allowed: up to "
            f"{engine.built.context_limit - 1}, the context of this engine"
        )
    prompts = random_prompts(options.streams, _STREAM_PROMPT, vocab_size, 7)
    running = engine.submit(prompts, stream_tokens(engine), 0.0)
    begin = running.wait(16)
    preemptions = engine.built.engine.load.num_preemptions
    watch = _Watch(engine, split, running, page_bytes)
    watch.until(lambda: time.perf_counter() > begin + options.before_s)
    experts, kv = watch.points[-1].experts, watch.points[-1].kv_bytes
    [prompt] = random_prompts(1, options.prompt_len, vocab_size, 300)
    watch.prompt = long = engine.submit([prompt], 1, 0.0)
    watch.until(lambda: bool(long.events))
    end = long.wait(1)
    back: list[float] = []

    def is_over() -> bool:
        now = time.perf_counter()
        if not back and watch.points[-1].experts >= _ALL * experts:
            back.append(now - end)
        return now > end + (options.after_s if back else _BACK_WITHIN_S)

    watch.until(is_over)
    over = time.perf_counter()
    if any(event.ended for event in running.events):
        raise UserError(
            "streams ended before the experts were back: a larger max_model_len allows longer ones"
        )
    engine.abort(running)
    during = span(running.events, long.submitted, end)
    return MemoryResult(
        split,
        experts,
        min(point.experts for point in watch.points),
        kv,
        max(point.kv_bytes for point in watch.points),
        span(running.events, begin, long.submitted)[0],
        during[0],
        span(running.events, end, over)[0],
        during[1],
        end - long.submitted,
        back[0] if back else None,
        engine.built.engine.load.num_preemptions - preemptions,
    ), watch.points


class _Watch:
    """Takes the time series of one engine."""

    def __init__(self, engine: EngineUnderTest, split: str, running: Streams, page_bytes: int) -> None:
        self.points: list[MemoryPoint] = []
        self.prompt: Streams | None = None
        self._engine, self._split, self._running, self._page_bytes = engine, split, running, page_bytes
        self._last, self._events = time.perf_counter(), len(running.events)
        self._begin = self._last

    def until(self, is_over: Callable[[], bool]) -> None:
        """Takes a point whenever it is due, until `is_over()`."""
        while True:
            time.sleep(_EVERY_S)
            self._take()
            if is_over():
                return

    def _take(self) -> None:
        now, events = time.perf_counter(), list(self._running.events)
        built, prompt = self._engine.built, self.prompt
        error = self._running.error or ("" if prompt is None else prompt.error)
        if error:
            raise UserError(f"a request failed: {error}")
        tokens = sum(event.tokens for event in events[self._events :])
        kv = built.num_pages * self._page_bytes if built.elastic is None else built.elastic.kv_bytes
        self.points.append(
            MemoryPoint(
                self._split,
                now - self._begin,
                tokens / (now - self._last),
                0 if built.resident is None else built.resident.num_experts,
                kv,
                prompt is not None and not prompt.events,
            )
        )
        self._last, self._events = now, len(events)
