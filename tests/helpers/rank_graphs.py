"""Lets rank processes on the CPU run as on a GPU: the device runner, and decode steps that are replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_service.assembly.build
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.request import SchedulerLimits
from gpu_service.device.graphs import CapturedGraph, GraphBackend, graph_sizes
from gpu_service.device.stream import DeviceStream, Uploader
from gpu_service.engine.decode_graphs import DecodeGraphs
from gpu_service.engine.device_runner import DeviceRunner
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.step_runner import StepRunner
from moebius.config import MoebiusConfig
from tests.helpers import host_graphs
from tests.helpers.capturable_mla import make_capturable_attention


class _Recorder(host_graphs._Recorder):
    """Also keeps collectives, whose schemas do not tell that they write to their arguments."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.calls.append((func, args, kwargs or {}, []))
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Recording(host_graphs._Recording):
    """Waits for what it sends and receives, as a stream does."""

    def replay(self) -> None:
        for func, args, kwargs, outputs in self._calls:
            result = func(*args, **kwargs)
            if func.namespace == "c10d":
                (result[-1] if isinstance(result, tuple) else result).wait()
                continue
            for output, tensor in zip(
                outputs, host_graphs.tensors_of((result,)) if outputs else [], strict=True
            ):
                output.copy_(tensor)


class RankRecordings(GraphBackend):
    """Records collectives, too."""

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        recorder = _Recorder()
        with recorder:
            work()
        return _Recording(recorder)


def _make_step_runner(
    config: MoebiusConfig,
    runner: ModelRunner,
    stream: DeviceStream,
    limits: SchedulerLimits,
    vocab_size: int,
    parallel: ParallelContext,
) -> StepRunner:
    uploader = Uploader(stream)
    graphs = DecodeGraphs(
        runner,
        RankRecordings(),
        uploader,
        sizes=graph_sizes(4),
        max_pages=-(-limits.context_limit // config.gpu.page_size),
        vocab_size=vocab_size if parallel.is_last_stage else 0,
    )
    steps = DeviceRunner(runner, stream, uploader=uploader, graphs=graphs)
    steps.prepare()
    return steps


def use_recordings() -> None:
    """From now on this process builds its engine so."""
    build: Any = gpu_service.assembly.build
    build.make_step_runner = _make_step_runner
    build.attention_that_runs = lambda gpu, *arguments: make_capturable_attention(*arguments)
