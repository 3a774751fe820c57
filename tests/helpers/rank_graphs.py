"""Lets rank processes on the CPU run as on a GPU: the device runner, and decode steps that are replayed."""

from __future__ import annotations

from typing import Any

import gpu_service.assembly.build
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.request import SchedulerLimits
from gpu_service.device.graphs import graph_sizes
from gpu_service.device.stream import DeviceStream, Uploader
from gpu_service.engine.decode_graphs import DecodeGraphs
from gpu_service.engine.device_runner import DeviceRunner
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.step_runner import StepRunner
from moebius.config import MoebiusConfig
from tests.helpers.capturable_mla import make_capturable_attention
from tests.helpers.host_graphs import RecordedOperations


def _make_step_runner(
    config: MoebiusConfig,
    runner: ModelRunner,
    stream: DeviceStream,
    limits: SchedulerLimits,
    vocab_size: int,
    parallel: ParallelContext,
    captures_later: bool,
) -> StepRunner:
    assert not captures_later, "several ranks capture before they serve"
    uploader = Uploader(stream)
    graphs = DecodeGraphs(
        runner,
        RecordedOperations(),
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
