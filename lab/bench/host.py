"""`moebius bench host`: what an engine's process computes on its CPU for every decode step.

The engine, its runner, its observer and the calls that wait for tokens are those that serve; the device is
the host, and what a graph would launch there computes nothing. Left out is what depends on a GPU: its
driver's calls, and planning attention. Times are processor time of the thread; on a busy host they are
longer, too, since caches and cores are shared.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.bench.output import BenchTable, Column, write_json

if TYPE_CHECKING:
    import torch

    from gpu_service.device.graphs import CapturedGraph
    from gpu_service.engine.engine import Engine
    from gpu_service.server.servicer import EngineServicer
    from protos import engine_pb2 as pb

_VOCABULARY, _PAGE, _EXTRA_STEPS = 32, 16, 24
# Parts of a step, in the order of the columns: `calls` is the event loop's, the others the engine thread's.
PARTS = ("schedule", "inputs", "launch", "results", "commit", "metrics", "hand over", "rest", "calls")


@dataclass(frozen=True)
class HostOptions:
    """Filled by the command line."""

    streams: tuple[int, ...] = (32, 128, 256)
    steps: int = 200
    prompt_len: int = 512
    temperature: float = 0.0


@dataclass(frozen=True)
class HostRow:
    """One number of streams; filled by `run`. The keys of the JSON rows; microseconds, medians of steps."""

    streams: int
    engine_us: float  # of the engine's thread, per step
    calls_us: float  # of the event loop, per step
    engine_us_per_stream: float
    calls_us_per_stream: float
    parts_us: dict[str, float] = field(default_factory=dict)


_TABLE = BenchTable[
    HostRow
](
    Column("streams", lambda row: f"{row.streams}", 7),
    Column("engine us/step", lambda row: f"{row.engine_us:.0f}", 14),
    Column("calls us/step", lambda row: f"{row.calls_us:.0f}", 13),
    Column("us/stream", lambda row: f"{row.engine_us_per_stream + row.calls_us_per_stream:.2f}", 9),
    *(
        Column(part, lambda row, part=part: f"{row.parts_us[part]:.0f}", 8)  # type: ignore[misc]
        for part in PARTS[:-1]
    ),
)


class _Clock:
    """Adds up processor time of the calls that it was put around, less that of others within them."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def around(
        self, owner: object, method: str, part: str, made: Callable[[Any], None] = lambda result: None
    ) -> None:
        """Measures a method of an object from now on; `made` sees what it returns."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = self._enter()
            try:
                result = call(*arguments, **keywords)
            finally:
                self._leave(part, begin)
            made(result)
            return result

        setattr(owner, method, timed)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """What is done meanwhile counts for this part, but for other parts' share of it."""
        begin = self._enter()
        try:
            yield
        finally:
            self._leave(part, begin)

    def _enter(self) -> float:
        self._inner.append(0.0)
        return time.thread_time()

    def _leave(self, part: str, begin: float) -> None:
        whole = time.thread_time() - begin
        self.spent[part] += whole - self._inner.pop()
        self._inner[-1] += whole

    def taken(self) -> dict[str, float]:
        """Returns what was added up since the last call, in seconds."""
        spent, self.spent = self.spent, defaultdict(float)
        return dict(spent)


def run(options: HostOptions, json_file: Path | None = None) -> list[HostRow]:
    """Measures and prints a row for each number of streams; also writes them to `json_file` when given."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    _TABLE.print_header()
    try:
        for streams in options.streams:
            rows.append(_measure(options, streams))
            _TABLE.print_row(rows[-1])
    finally:
        torch.set_num_threads(threads)
    write_json(rows, json_file)
    return rows


def _measure(options: HostOptions, streams: int) -> HostRow:
    steps = asyncio.run(_decode(options, streams))
    parts = {part: statistics.median(step.get(part, 0.0) for step in steps) * 1e6 for part in PARTS}
    engine = statistics.median(sum(step.values()) - step["calls"] for step in steps) * 1e6
    return HostRow(streams, engine, parts["calls"], engine / streams, parts["calls"] / streams, parts)


async def _decode(options: HostOptions, streams: int) -> list[dict[str, float]]:
    """Returns the processor time of each decode step, by part, of the engine driven by hand."""
    clock, tokens = _Clock(), options.steps + _EXTRA_STEPS
    engine, servicer = _make_engine(streams, options.prompt_len + tokens, clock)
    requests: asyncio.Queue[pb.GenerateManyRequest] = asyncio.Queue()
    requests.put_nowait(_calls(options, streams, tokens))
    updates = servicer.GenerateMany(_queued(requests), None)  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(anext(updates))
    while not engine.scheduler.has_work:
        await asyncio.sleep(0)
        engine.receive(wait=False)
    found: list[dict[str, float]] = []
    while len(found) < options.steps:
        decoding = engine.scheduler.running
        is_counted = len(decoding) == streams and all(r.output_token_ids for r in decoding)
        clock.taken()
        with clock.measure("rest"):
            engine.receive(wait=False)
            engine.turn()
        with clock.measure("calls"):
            for _ in range(4):  # the router, the calls, the stream's writer
                await asyncio.sleep(0)
            while waiting.done():
                waiting.result().SerializeToString()
                waiting = asyncio.ensure_future(anext(updates))
                await asyncio.sleep(0)
        if is_counted:
            found.append(clock.taken())
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await updates.aclose()  # type: ignore[attr-defined]
    engine.finish()
    return found


async def _queued(queue: asyncio.Queue[pb.GenerateManyRequest]) -> AsyncIterator[pb.GenerateManyRequest]:
    while True:
        yield await queue.get()


def _calls(options: HostOptions, streams: int, tokens: int) -> pb.GenerateManyRequest:
    from protos import engine_pb2 as pb

    message = pb.GenerateManyRequest(takes_tokens=True)
    for number in range(streams):
        request = pb.GenerateRequest(request_id=f"bench-{number}", stream=True)
        request.tokenized.input_ids.extend([number // 32 % 32, number % 32] * (options.prompt_len // 2))
        request.sampling_params.temperature = options.temperature
        request.sampling_params.max_tokens = tokens
        request.sampling_params.ignore_eos = True
        message.requests.append(pb.CallRequest(call=number, start=request))
    return message


def _make_engine(streams: int, context: int, clock: _Clock) -> tuple[Engine, EngineServicer]:
    """Returns an engine that is not started, and who answers its calls; `clock` is put around their parts."""
    from prometheus_client import CollectorRegistry

    from gpu_service.cache.radix_cache import RadixCache
    from gpu_service.cache.request_cache import PagePool, RequestCache
    from gpu_service.core.request import SchedulerLimits
    from gpu_service.engine.engine import Engine
    from gpu_service.engine.input_builder import InputBuilder
    from gpu_service.scheduler.scheduler import Scheduler
    from gpu_service.server.responses import OutputRouter
    from gpu_service.server.servicer import EngineServicer, Service
    from gpu_service.server.validation import Bounds
    from gpu_service.telemetry.metrics import EngineMetrics, EngineTelemetry
    from protos import engine_pb2 as pb

    num_pages = 2 + streams * (-(-context // _PAGE) + 1)
    limits = SchedulerLimits(
        max_num_seqs=streams, max_num_batched_tokens=8192, context_limit=context + 1, watermark_pages=1
    )
    scheduler = Scheduler(limits, RequestCache(PagePool(num_pages), RadixCache(_PAGE), prefix_caching=True))
    builder, runner = InputBuilder(limits, _PAGE), _make_runner(streams, context + 1, num_pages)
    telemetry = EngineTelemetry(EngineMetrics("bench", CollectorRegistry()))
    telemetry.enabled = True
    router = OutputRouter(asyncio.get_running_loop())
    engine = Engine(scheduler, builder, runner, router.on_output, observer=telemetry)
    clock.around(scheduler, "schedule", "schedule")
    clock.around(builder, "build", "inputs")
    clock.around(runner, "launch", "launch", lambda step: clock.around(step, "wait", "results"))
    clock.around(scheduler, "commit", "commit")
    clock.around(scheduler, "commit_tokens", "commit")
    clock.around(telemetry, "committed", "metrics")
    clock.around(telemetry, "loaded", "metrics")
    clock.around(engine, "on_output", "hand over")
    servicer = EngineServicer()
    info = pb.GetModelInfoResponse(served_model_name="bench")
    servicer.service = Service(engine, router, telemetry, Bounds(_VOCABULARY, context + 1), info, _PAGE)
    return engine, servicer


def _make_runner(streams: int, max_len: int, num_pages: int) -> Any:
    """Returns the runner of a GPU on the host's null stream, with graphs that launch nothing."""
    import torch

    from gpu_service.core.step import TokenPool
    from gpu_service.device.graphs import CapturedGraph, GraphBackend, graph_sizes
    from gpu_service.device.stream import HostDeviceStream, Uploader
    from gpu_service.engine.decode_graphs import DecodeGraphs
    from gpu_service.engine.device_runner import DeviceRunner
    from gpu_service.engine.model_runner import ModelRunner
    from gpu_service.engine.sampler import Sampler

    class Nothing(CapturedGraph):
        def replay(self) -> None:
            pass

        def close(self) -> None:
            pass

    class Nothings(GraphBackend):
        def capture(self, work: Callable[[], None]) -> CapturedGraph:
            return Nothing()

    device, stream = torch.device("cpu"), HostDeviceStream()
    pool, sampler = TokenPool(streams, max_len, device), Sampler(_VOCABULARY, device)
    model: Any = _NoModel()
    runner = ModelRunner(model, model, model, None, pool, sampler)
    uploader = Uploader(stream)
    graphs = DecodeGraphs(
        runner,
        Nothings(),
        uploader,
        sizes=graph_sizes(streams),
        max_pages=-(-max_len // _PAGE),
        vocab_size=_VOCABULARY,
    )
    steps = DeviceRunner(runner, stream, uploader=uploader, graphs=graphs)
    steps.prepare()
    graphs._finite.fill_(True)
    return steps


class _NoModel:
    """Stands for model, cache and attention: every token is the first one."""

    def forward(self, context: Any) -> torch.Tensor:
        positions: torch.Tensor = context.inputs.positions
        return positions.new_zeros((positions.shape[0], 1)).float()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.new_zeros((hidden_states.shape[0], _VOCABULARY))

    def plan(self, inputs: Any) -> None:
        """There is nothing to attend to."""

    plan_capture = plan_replay = plan
