"""Decode and prefill speeds of one engine, and the bound that the experts really touched give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from app.bench.bounds import Bandwidths, StepTraffic, WeightBytes, bound_of, expected_distinct
from lab.bench.engine.drive import DecodeWindow, EngineUnderTest, TokenEvent, decode_window
from lab.bench.engine.servers import ExpertServers, ServerCounters, ServerInfo
from moebius.errors import UserError
from moebius.models.geometry import MoeGeometry
from moebius.models.layers.layer import page_bytes
from moebius.models.served import read_served_geometry

_RECORDED_STEPS = 24


@dataclass(frozen=True)
class DecodeResult:
    """One number of streams; filled by `measure_decode`. The keys of the JSON rows."""

    streams: int
    tokens_per_second: float
    step_seconds: float
    # Different experts per MoE layer and step whose weights the expert servers read, measured.
    cpu_experts_per_layer: float
    # The same of the GPU: all that a recorded run chose, less those.
    gpu_experts_per_layer: float
    cpu_expert_bytes_per_step: float
    dense_bytes_per_step: float
    # Of the whole step, and of the expert servers' part alone.
    bound_tokens_per_second: float
    expert_bound_tokens_per_second: float | None
    fraction_of_bound: float
    fraction_of_expert_bound: float | None
    expert_busy: float  # Share of the time in which the busiest expert server computed.
    # What `fetch_experts` was, and experts per MoE layer and step that were copied for it.
    fetch_experts: str
    fetched_experts_per_layer: float


@dataclass(frozen=True)
class PrefillResult:
    """One prompt length; filled by `measure_prefill`."""

    prompt_len: int
    seconds_to_first_token: float
    tokens_per_second: float
    expert_busy: float  # Share of that time in which the busiest expert server computed.


@dataclass(frozen=True)
class Setting:
    """What does not change between rows; filled by `make_setting`."""

    geometry: MoeGeometry
    weights: WeightBytes
    bandwidths: Bandwidths
    servers: ExpertServers
    infos: Sequence[ServerInfo]
    kv_bytes_per_token: int
    vocab_size: int
    # Bytes of one routed expert as the checkpoint has it.
    expert_bytes: float
    has_resident_experts: bool


def make_setting(engine: EngineUnderTest, servers: ExpertServers, bandwidths: Bandwidths) -> Setting:
    """Reads the checkpoint's headers and asks the servers what they hold."""
    from moebius.experts.placement import make_placement

    config, model = servers.config, engine.built.model_config
    weights = WeightBytes.of(Path(config.model.model), config.model.expert_checkpoint)
    geometry = read_served_geometry(config)
    item = 1 if config.gpu.kv_cache_dtype == "fp8_e4m3" else model.dtype_bytes
    return Setting(
        geometry,
        weights,
        bandwidths,
        servers,
        servers.info(),
        page_bytes(model.layers, 1, item, model.dtype_bytes),
        model.vocab_size,
        weights.routed / max(1, len(geometry.moe_layers) * geometry.num_experts),
        make_placement(config.placement, geometry).count > 0,
    )


def random_prompts(streams: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Returns the prompts that share no prefix."""
    rng = np.random.default_rng([seed, streams, length])
    return [rng.integers(3, vocab_size, length).tolist() for _ in range(streams)]


@dataclass(frozen=True)
class Decoded:
    """Streams that ran together and have ended; filled by `decode_together`."""

    window: DecodeWindow
    # Token ids of each.
    outputs: list[list[int]]
    # The servers' counters at two moments between which every stream decoded.
    before: Sequence[ServerCounters]
    after: Sequence[ServerCounters]
    fetched: int  # Experts that steps copied between these moments.


def decode_together(
    engine: EngineUnderTest,
    setting: Setting,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
) -> Decoded:
    """One stream per prompt, all at once. Raises UserError when they cannot run together."""
    running = engine.submit(prompts, max_tokens, temperature)
    running.wait(2)
    before, fetched = setting.servers.counters(), fetched_experts(engine)
    running.wait(max_tokens - max(2, max_tokens // 8))
    after, fetched = setting.servers.counters(), fetched_experts(engine) - fetched
    running.wait(max_tokens)
    try:
        window = decode_window(running.events, len(prompts))
    except ValueError as error:
        raise UserError(
            f"{len(prompts)} streams: {error}; max_num_seqs and the KV pool must hold all"
        ) from None
    return Decoded(window, running.outputs(), before, after, fetched)


def fetched_experts(engine: EngineUnderTest) -> int:
    """Returns the number of experts that decode steps have copied so far, as of about a tenth of a second
    ago.
    """
    fetcher = engine.built.fetcher
    return 0 if fetcher is None else fetcher.figures.experts


def measure_decode(
    engine: EngineUnderTest,
    setting: Setting,
    streams: int,
    prompt_len: int,
    max_tokens: int,
    temperature: float,
) -> DecodeResult:
    """All streams at once. Raises UserError when they cannot run together."""
    prompts = random_prompts(streams, prompt_len, setting.vocab_size, 1)
    decoded = decode_together(engine, setting, prompts, max_tokens, temperature)
    cpu_experts, cpu_bytes = touched(decoded.before, decoded.after, setting)
    gpu_experts = 0.0
    if setting.has_resident_experts or engine.built.fetcher is not None:
        chosen = recorded_experts(engine, setting, streams, prompt_len, temperature)
        gpu_experts = max(0.0, chosen - cpu_experts)
    traffic = StepTraffic(
        cpu_bytes,
        gpu_experts * len(setting.geometry.moe_layers) * setting.expert_bytes,
        setting.weights.dense + streams * (prompt_len + max_tokens / 2) * setting.kv_bytes_per_token,
    )
    return _result(streams, decoded, (cpu_experts, gpu_experts), traffic, setting)


def _result(
    streams: int, decoded: Decoded, experts: tuple[float, float], traffic: StepTraffic, setting: Setting
) -> DecodeResult:
    window, before, after = decoded.window, decoded.before, decoded.after
    speed, step = window.tokens_per_second, window.seconds_per_step
    bound = bound_of(traffic, setting.bandwidths)
    whole = streams / bound.step
    alone = streams / bound.cpu_experts if bound.cpu_experts else None
    steps = _steps(before, after, setting)
    layer_steps = steps * len(setting.geometry.moe_layers)
    return DecodeResult(
        streams=streams,
        tokens_per_second=speed,
        step_seconds=step,
        cpu_experts_per_layer=experts[0],
        gpu_experts_per_layer=experts[1],
        cpu_expert_bytes_per_step=traffic.cpu_experts,
        dense_bytes_per_step=traffic.dense,
        bound_tokens_per_second=whole,
        expert_bound_tokens_per_second=alone,
        fraction_of_bound=speed / whole,
        fraction_of_expert_bound=speed / alone if alone else None,
        expert_busy=_longest_busy(before, after) / (steps * step) if steps else 0.0,
        fetch_experts=setting.servers.config.gpu.fetch_experts,
        fetched_experts_per_layer=decoded.fetched / layer_steps if layer_steps else 0.0,
    )


def recorded_experts(
    engine: EngineUnderTest, setting: Setting, streams: int, prompt_len: int, temperature: float
) -> float:
    """Returns different experts per layer and step, wherever they are: of a run whose steps are recorded.

    A run of its own, because recording takes time and steps that no captured graph holds.
    """
    recorder = engine.built.recorder
    if recorder is None:
        return expected_distinct(setting.geometry.num_experts, setting.geometry.mean_top_k, streams)
    prompts = random_prompts(streams, prompt_len, setting.vocab_size, 2)
    running = engine.submit(prompts, _RECORDED_STEPS + 8, temperature)
    running.wait(2)
    recorder.start("stat")
    running.wait(_RECORDED_STEPS)
    recorder.stop()
    running.wait(_RECORDED_STEPS + 8)
    per_layer = recorder.dump().distinct_per_step()
    return sum(per_layer.values()) / max(1, len(per_layer))


def _steps(before: Sequence[ServerCounters], after: Sequence[ServerCounters], setting: Setting) -> float:
    """Steps between two looks, from one server's calls over those of a step."""
    if not after or not after[0].calls:
        return 0.0
    calls = sum(after[0].calls.values()) - sum(before[0].calls.values())
    return calls / _calls_per_step(after[0], setting)


def _calls_per_step(found: ServerCounters, setting: Setting) -> int:
    """One of every layer that asks the server, and with late experts another of all but the last layer."""
    late = 0
    if setting.servers.config.experts.defer_experts:
        late = len(found.calls.keys() - {max(setting.geometry.moe_layers)})
    return len(found.calls) + late


def touched(
    before: Sequence[ServerCounters], after: Sequence[ServerCounters], setting: Setting
) -> tuple[float, float]:
    """Returns the experts per layer and step that the servers read, and bytes of weights that is per step.

    Servers that divide every expert count the same ones; servers that divide whole experts count their own.
    """
    layers = len(setting.geometry.moe_layers)
    experts, nbytes = [], 0.0
    for early, late, info in zip(before, after, setting.infos, strict=True):
        calls = sum(late.calls.values()) - sum(early.calls.values())
        read = sum(late.experts.values()) - sum(early.experts.values())
        # Steps whose layer had no expert here are calls without experts, or no calls at all.
        steps = calls / _calls_per_step(late, setting) if calls else 0.0
        per_layer = read / (steps * len(late.calls)) if steps else 0.0
        active = len(late.calls) / layers
        experts.append(per_layer * active)
        slice_bytes = info.packed_bytes / (layers * max(1, info.num_experts))
        nbytes += per_layer * active * layers * slice_bytes
    split_by_expert = setting.servers.config.experts.expert_split == "expert"
    found = sum(experts) if split_by_expert else max(experts, default=0.0)
    return found, nbytes


def measure_prefill(
    engine: EngineUnderTest, setting: Setting, prompt_len: int, repeats: int = 3
) -> PrefillResult:
    """Returns the time from a prompt's submission to its first token; the best of several prompts."""
    best, busy = float("inf"), 0.0
    for repeat in range(repeats):
        [prompt] = random_prompts(1, prompt_len, setting.vocab_size, 100 + repeat)
        before = setting.servers.counters()
        running = engine.submit([prompt], 1, 0.0)
        seconds = running.wait(1) - running.submitted
        if seconds < best:
            best, busy = seconds, _longest_busy(before, setting.servers.counters())
    return PrefillResult(prompt_len, best, prompt_len / best, busy / best)


@dataclass(frozen=True)
class DuringDecodeResult:
    """A prompt that prefills while streams decode; filled by `measure_during_decode`. The keys of the
    JSON rows.
    """

    prompt_len: int
    streams: int
    # Of the streams together, before the prompt came and until its first token.
    idle_decode_tokens_per_second: float
    decode_tokens_per_second: float
    fraction_of_idle_decode: float
    # Of the prompt, alone and while the streams decode.
    idle_prefill_tokens_per_second: float
    prefill_tokens_per_second: float
    fraction_of_idle_prefill: float
    # Longest time between two tokens of one stream, before and meanwhile.
    idle_longest_wait_seconds: float
    longest_wait_seconds: float


def measure_during_decode(
    engine: EngineUnderTest, setting: Setting, idle: PrefillResult, streams: int, idle_seconds: float = 2.0
) -> DuringDecodeResult:
    """`idle`: the same prompt length alone. Raises UserError when the context is too short for both."""
    max_tokens = min(engine.built.context_limit - 64, 16384)
    running = engine.submit(random_prompts(streams, 32, setting.vocab_size, 7), max_tokens, 0.0)
    begin = running.wait(16)
    # A third of the tokens at most: the others are for the time with the prompt.
    while time.perf_counter() < begin + idle_seconds and len(running.events) < streams * max_tokens // 3:
        time.sleep(0.01)
    [prompt] = random_prompts(1, idle.prompt_len, setting.vocab_size, 300)
    submitted = time.perf_counter()
    long = engine.submit([prompt], 1, 0.0)
    end = long.wait(1)
    if any(event.ended for event in running.events):
        raise UserError(
            f"--decoding: streams of {max_tokens} tokens ended before a prompt of {idle.prompt_len} was "
            "prefilled; a larger max_model_len allows longer ones"
        )
    engine.abort(running)
    before, meanwhile = span(running.events, begin, submitted), span(running.events, submitted, end)
    prefill = idle.prompt_len / (end - submitted)
    return DuringDecodeResult(
        idle.prompt_len,
        streams,
        before[0],
        meanwhile[0],
        meanwhile[0] / before[0],
        idle.tokens_per_second,
        prefill,
        prefill / idle.tokens_per_second,
        before[1],
        meanwhile[1],
    )


def span(events: Sequence[TokenEvent], begin: float, end: float) -> tuple[float, float]:
    """Tokens per second of all streams within a time, and the longest wait of one of them in it."""
    within = [event for event in events if begin < event.at <= end and event.tokens]
    waits = [
        later - earlier
        for stream in {event.stream for event in events}
        for earlier, later in pairwise(
            [begin, *(event.at for event in within if event.stream == stream), end]
        )
    ]
    return sum(event.tokens for event in within) / (end - begin), max(waits, default=end - begin)


def _longest_busy(before: Sequence[ServerCounters], after: Sequence[ServerCounters]) -> float:
    """Returns the seconds that the busiest server computed between two looks; 0 without servers."""
    busy = [late.busy_seconds - early.busy_seconds for early, late in zip(before, after, strict=True)]
    return max(busy, default=0.0)
