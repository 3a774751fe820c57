"""The command: each number of streams in turn, then prefill; an engine for each value of `fetch_experts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from app.bench.bounds import Bandwidths, facts, measure_bandwidths
from app.bench.output import BenchTable, Column, or_dash, write_json
from lab.bench.engine.drive import EngineUnderTest, running_engine, wait_until_streaming
from lab.bench.engine.measure import (
    DecodeResult,
    PrefillResult,
    Setting,
    make_setting,
    measure_decode,
    measure_prefill,
)
from lab.bench.engine.servers import running_servers
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import UserError


def _experts(row: DecodeResult) -> str:
    on_gpu = f"+{row.gpu_experts_per_layer:.1f}" if row.gpu_experts_per_layer else ""
    return f"{row.cpu_experts_per_layer:.1f}{on_gpu}"


def _gigabytes(row: DecodeResult) -> str:
    return f"{(row.cpu_expert_bytes_per_step + row.dense_bytes_per_step) / 1e9:.3f}"


_DECODE = BenchTable[DecodeResult](
    Column("streams", lambda row: f"{row.streams}"),
    Column("tokens/s", lambda row: f"{row.tokens_per_second:.1f}", 9),
    Column("step ms", lambda row: f"{row.step_seconds * 1e3:.2f}", 8),
    Column("experts/layer", _experts),
    Column("GB/step", _gigabytes, 8),
    Column("limit", lambda row: f"{row.bound_tokens_per_second:.1f}", 8),
    Column("ratio", lambda row: f"{row.fraction_of_bound:.3f}", 6),
    Column("experts only", lambda row: or_dash(row.expert_bound_tokens_per_second, 1)),
    Column("ratio", lambda row: or_dash(row.fraction_of_expert_bound, 3), 6),
    Column("servers busy", lambda row: f"{row.expert_busy:.2f}"),
    Column("fetch", lambda row: row.fetch_experts, 5),
    Column("fetched/layer", lambda row: f"{row.fetched_experts_per_layer:.2f}"),
)


@dataclass(frozen=True)
class EngineBenchOptions:
    """Filled by the command line."""

    streams: Sequence[int] = (1, 4, 8, 16, 32)
    prompt_len: int = 64
    max_tokens: int = 96
    prefill: Sequence[int] = (512, 2048)  # Prompt lengths whose prefill is measured; empty: none.
    # 0: greedy, which graphs hold; above: sampled by kernels after them. Greedy output of random weights may
    # repeat itself, and with it the experts it chooses: the number of different ones is measured.
    temperature: float = 0.0
    probe_bytes: int = 0  # Of the buffer that bandwidth is measured with; 0: several times the caches.
    # Values of `fetch_experts`, one engine each, the first of which prompts are measured with; empty: the one
    # that is set.
    fetch: Sequence[str] = ()


@dataclass(frozen=True)
class EngineBench:
    """Everything measured on one set of expert servers; filled by `run`."""

    decode: list[DecodeResult]
    prefill: list[PrefillResult]
    bandwidths: Bandwidths
    device: str

    def document(self) -> dict[str, Any]:
        """Returns the result as the JSON file has it."""
        return asdict(self)


def run(config: MoebiusConfig, options: EngineBenchOptions, json_file: Path | None = None) -> EngineBench:
    """Starts expert servers, builds the engine, measures and prints; all is stopped at the end.

    Raises UserError, and what `moebius serve` would refuse.
    """
    from gpu_service.assembly.process import resolve_device

    config = with_room(config, options)
    device = resolve_device(config.gpu)
    bandwidths = measure_bandwidths(device, options.probe_bytes, config.parallel.tensor_parallel_size)
    found = EngineBench([], [], bandwidths, str(device))
    with running_servers(config) as servers:
        for number, mode in enumerate(options.fetch or (config.gpu.fetch_experts,)):
            gpu = servers.config.gpu.model_copy(update={"fetch_experts": mode})
            own = type(servers)(servers.config.model_copy(update={"gpu": gpu}))
            with running_engine(own.config) as engine:
                setting = make_setting(engine, own, bandwidths)
                measured = replace(options, prefill=() if number else options.prefill)
                one = measure_all(engine, setting, measured, str(device))
            found.decode.extend(one.decode)
            found.prefill.extend(one.prefill)
    if json_file is not None:
        write_json({"host": facts(device)} | found.document(), json_file)
    return found


def measure_all(
    engine: EngineUnderTest, setting: Setting, options: EngineBenchOptions, device: str
) -> EngineBench:
    """Returns every row, printed as it is measured."""
    if engine.built.fetcher is not None and engine.built.streamer is not None:
        wait_until_streaming(engine.built.streamer)
    _DECODE.print_header()
    # The first run pays for kernels that are compiled, and graphs that are loaded, at first use.
    measure_decode(
        engine, setting, 1, options.prompt_len, max(8, options.max_tokens // 4), options.temperature
    )
    decode = []
    for streams in options.streams:
        decode.append(
            measure_decode(
                engine, setting, streams, options.prompt_len, options.max_tokens, options.temperature
            )
        )
        _DECODE.print_row(decode[-1])
    prefill = []
    for length in options.prefill:
        if length + 1 > engine.built.context_limit:
            print(f"prefill {length:6d}: longer than the context of {engine.built.context_limit} tokens")
            continue
        prefill.append(measure_prefill(engine, setting, length))
        last = prefill[-1]
        print(
            f"prefill {length:6d} tokens: {last.tokens_per_second:9.1f} tokens/s, first token after "
            f"{last.seconds_to_first_token * 1e3:.1f} ms, servers busy {last.expert_busy:.2f}",
            flush=True,
        )
    return EngineBench(decode, prefill, setting.bandwidths, device)


def with_room(config: MoebiusConfig, options: EngineBenchOptions) -> MoebiusConfig:
    """Enough slots for the most streams, and graphs for them; the user's own larger settings stay.

    Raises UserError naming an option that is not allowed.
    """
    modes = get_args(GpuConfig.model_fields["fetch_experts"].annotation)
    unknown = [mode for mode in options.fetch if mode not in modes]
    if unknown:
        raise UserError(f"--fetch: {unknown} are not allowed; allowed: {', '.join(modes)}")
    most = max(options.streams)
    if options.max_tokens < 16:
        raise UserError(f"--max-tokens: {options.max_tokens} is not allowed; allowed: 16 or more")
    gpu = config.gpu.model_copy(
        update={
            "max_num_seqs": max(config.gpu.num_seqs, most),
            "cuda_graph_max_batch_size": max(config.gpu.cuda_graph_max_batch_size, most),
        }
    )
    return config.model_copy(update={"gpu": gpu})
