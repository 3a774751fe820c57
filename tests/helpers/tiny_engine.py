"""The whole engine on a tiny model with the device runner: graphs or none, on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.attention.registry import Attention
from gpu_service.cache.kv_cache import PagedCache, make_cache
from gpu_service.cache.request_cache import make_request_cache
from gpu_service.cache.request_states import allocate_states
from gpu_service.core.request import SchedulerLimits
from gpu_service.core.step import StepPlan, TokenPool
from gpu_service.device.graphs import GraphBackend, graph_sizes
from gpu_service.device.stream import DeviceStream, Uploader
from gpu_service.engine.decode_graphs import DecodeGraphs
from gpu_service.engine.device_runner import DeviceLane, DeviceRunner
from gpu_service.engine.engine import Engine
from gpu_service.engine.input_builder import InputBuilder
from gpu_service.engine.late_graphs import LateGraphs
from gpu_service.engine.model_runner import LaneModelRunner, ModelRunner
from gpu_service.engine.pacing import LanePace
from gpu_service.engine.prefill_lane import PrefillLane
from gpu_service.engine.prompt_graphs import PromptGraph, PromptGraphs
from gpu_service.engine.sampler import Sampler
from gpu_service.loader.load import load_weights
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from gpu_service.scheduler.scheduler import Scheduler
from gpu_service.speculation.drafter import DeviceDrafter, HostDrafter
from gpu_service.speculation.mtp import MtpDrafter
from gpu_service.speculation.policy import Speculation
from gpu_service.vision.features import ImageEncoder
from moebius.config import GpuConfig
from moebius.models.config import ModelOverrides
from moebius.models.layers.layer import Layers, divided
from moebius.models.read import read_model_config
from tests.helpers.engine_outputs import EngineOutputs

PAGE_SIZE = 4
CONTEXT_LIMIT = 96


@dataclass(frozen=True)
class Setup:
    """How the engine runs; `largest_graph` 0: none is captured."""

    largest_graph: int = 0
    # Tokens of steps with prompts that have graphs; empty: none has.
    prompt_graphs: tuple[int, ...] = ()
    # Whether these are captured once `BEGIN_GRAPHS` has run.
    captures_later: bool = False
    overlap: bool = True
    num_pages: int = 256
    max_num_seqs: int = 8
    budget: int = 32
    # Tokens of a step of the prefill lane, and of a prompt that it takes; 0: there is no lane.
    prefill_chunk_max: int = 0
    lane_min_tokens: int = 12
    # Drafts of a request at most, from either drafter; 0: no speculation.
    num_drafts: int = 0
    drafter: HostDrafter | None = None
    device_drafter: Callable[[CausalLM, TokenPool], DeviceDrafter] | None = None


class TinyEngine(EngineOutputs):
    """A running engine and what is behind it."""

    def __init__(
        self,
        graphs: DecodeGraphs | None,
        kv_cache: PagedCache,
        stream: DeviceStream,
        speculation: Speculation | None,
    ) -> None:
        super().__init__()
        self.graphs, self.kv_cache, self.stream, self.speculation = graphs, kv_cache, stream, speculation


# Tokens and requests of a step, and the size of the graph that it replays.
Replay = tuple[int, int, int]


def noted_replays(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """Returns tokens, requests and the graph's size of each replayed step with prompts from now on."""
    found: list[Replay] = []
    original = PromptGraphs.replay

    def replay(graphs: PromptGraphs, graph: PromptGraph, plan: StepPlan, staged: StepPlan) -> Any:
        found.append((plan.query_start_loc[-1], plan.num_requests, graph.size))
        return original(graphs, graph, plan, staged)

    monkeypatch.setattr(PromptGraphs, "replay", replay)
    return found


def tiny_model(
    directory: Path,
    device: torch.device,
    dtype: str = "float32",
    mtp_heads: int = 0,
    draft_model: str = "",
) -> CausalLM:
    """Returns the checkpoint's model without its routed experts; `draft_model`: with an EAGLE-3 head."""
    overrides = ModelOverrides(dtype=dtype, mtp_heads=mtp_heads, draft_model=draft_model)
    model = build_model(read_model_config(directory, overrides), device=device)
    load_weights(model, directory)
    return model


@contextmanager
def tiny_engine(
    model: CausalLM,
    experts: Any,
    stream: DeviceStream,
    attention: Callable[[Layers, Any], Attention],
    setup: Setup,
    backend: GraphBackend | None = None,
    encoder: ImageEncoder | None = None,
    lane_stream: DeviceStream | None = None,
) -> Iterator[TinyEngine]:
    """Runs an engine; at the end stops it and checks its books. A lane takes `experts`, too."""
    limits = SchedulerLimits(
        setup.max_num_seqs,
        setup.budget,
        CONTEXT_LIMIT,
        1,
        frozenset(),
        prefill_chunk_max=setup.prefill_chunk_max,
        max_rows=4 * setup.max_num_seqs,
    )
    gpu = GpuConfig(page_size=PAGE_SIZE, max_num_seqs=setup.max_num_seqs)
    states = allocate_states(gpu, model.config.layers, model.dtype, stream.device)
    cache = make_request_cache(gpu, states, setup.num_pages)
    kv_cache = make_cache(model.config.layers, setup.num_pages, PAGE_SIZE, model.dtype, stream.device)
    token_pool = TokenPool(setup.max_num_seqs, CONTEXT_LIMIT + 1, stream.device)
    runner = ModelRunner(
        model,
        kv_cache,
        attention(model.config.layers, kv_cache),
        experts,
        token_pool,
        Sampler(model.config.vocab_size, stream.device, setup.max_num_seqs),
        encoder=encoder,
        has_mrope=model.config.has_mrope,
        states=states,
        is_float16=model.dtype == torch.float16,
        drafter=None if setup.device_drafter is None else setup.device_drafter(model, token_pool),
    )
    if kv_cache.beside is not None:
        assert isinstance(runner.drafter, MtpDrafter)
        _, apart = divided(model.config.layers)
        runner.drafter = runner.drafter.with_attention(attention(apart, kv_cache.beside))
    uploader = Uploader(stream)
    graphs = None
    if setup.largest_graph:
        assert backend is not None
        graphs = DecodeGraphs(
            runner,
            backend,
            uploader,
            sizes=graph_sizes(setup.largest_graph),
            max_pages=-(-CONTEXT_LIMIT // PAGE_SIZE),
            vocab_size=model.config.vocab_size,
        )
    prompts = None
    if setup.prompt_graphs:
        assert backend is not None
        prompts = PromptGraphs(runner, backend, uploader, sizes=[*setup.prompt_graphs])
    # What was made so far may be on its way on another stream.
    if stream.device.type == "cuda":
        torch.cuda.synchronize()
    both = {"graphs": graphs, "prompt_graphs": prompts}
    timeout_s, later = 60, setup.captures_later
    steps = DeviceRunner(
        runner, stream, uploader=uploader, recovery_timeout_s=timeout_s, captures_later=later, **both
    )
    steps.prepare()
    speculation = None
    if setup.num_drafts:
        on_device = setup.device_drafter is not None
        speculation = Speculation(limits, setup.num_drafts, setup.drafter, has_device_drafter=on_device)
    scheduler = Scheduler(limits, cache, speculation)
    builder = InputBuilder(limits, PAGE_SIZE, has_mrope=runner.has_mrope)
    lane = None
    if setup.prefill_chunk_max:
        lane = _lane(runner, attention, experts, lane_stream or stream, stream, setup.lane_min_tokens)
    tiny = TinyEngine(graphs, kv_cache, stream, speculation)
    late = LateGraphs(steps, lambda: tiny.engine.settle())
    shared = {"overlap": setup.overlap, "lane": lane, "operations": late.operations}
    tiny.engine = Engine(scheduler, builder, steps, tiny.on_output, **shared)
    tiny.engine.between_steps = late.due
    tiny.engine.start()
    try:
        yield tiny
    finally:
        tiny.engine.stop()
    scheduler.check_integrity()


def _lane(
    runner: ModelRunner,
    attention: Callable[[Layers, Any], Attention],
    experts: Any,
    stream: DeviceStream,
    main: DeviceStream,
    min_tokens: int,
) -> PrefillLane:
    assert isinstance(runner.model, CausalLM)
    with stream.active():
        own_attention = attention(runner.model.config.layers, runner.kv_cache)
    own = LaneModelRunner(
        runner.model,
        runner.kv_cache,
        own_attention,
        experts,
        runner.token_pool,
        runner.sampler.for_another_stream(),
        has_mrope=runner.has_mrope,
        states=runner.states,
    )
    device = DeviceLane(own, stream, main, is_ready=lambda: True, min_tokens=lambda: (min_tokens, min_tokens))
    return PrefillLane(device, LanePace(None))
