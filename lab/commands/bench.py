"""`moebius bench engine|kernels|gateway|…`: one function per benchmark of a part of the system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli_options import JsonFile, log_warnings_only, parse_counts, with_settings
from app.commands.models import with_checkpoint
from lab.commands.bench_plan import plan
from lab.commands.bench_replay import replay
from moebius.config import MoebiusConfig
from moebius.errors import UserError


def register(group: typer.Typer) -> None:
    """Adds the benchmarks to `moebius bench`."""
    for command in (
        mailbox,
        kernels,
        quota,
        load,
        engine,
        masks,
        prefill,
        placement,
        topics,
        memory,
        tiers,
        speculation,
        steps,
        host,
        gateway,
        plan,
        replay,
    ):
        group.command()(command)


def mailbox(
    device: Annotated[str, typer.Option(help="Who drives it: cpu (host code) or cuda (in a graph)")] = "cpu",
    rows: Annotated[str, typer.Option(help="Token rows per layer, for cuda")] = "1,2,4,8,16,32,64,128,256",
    servers: Annotated[str, typer.Option(help="Numbers of echo processes, for cuda")] = "1,4",
    signal: Annotated[
        str, typer.Option(help="How the GPU rings and waits; host: by host functions in the stream")
    ] = "doorbell,memops,host",
    layers: Annotated[int, typer.Option(min=1, help="Layers in one graph")] = 48,
    replays: Annotated[int, typer.Option(min=10, help="Measured replays per line")] = 100,
    copy_kib: Annotated[
        int | None, typer.Option(min=0, help="KiB from which the copy engine moves rows [default: measured]")
    ] = None,
    jit_cache_dir: Annotated[str, typer.Option(help="Where compiled kernels are kept")] = "",
    json_file: JsonFile = None,
) -> None:
    """Hand-off through the shared-memory mailbox. By host code, or from a GPU's stream."""
    if device == "cpu":
        from lab.bench.mailbox import run

        run(json_file=json_file)
        return
    if device != "cuda":
        raise UserError(f"--device: {device!r} is not allowed; allowed: cpu, cuda")
    from lab.bench.mailbox_device import MAX_ROWS, DeviceOptions, parse_signals
    from lab.bench.mailbox_device import run as run_on_device

    options = DeviceOptions(
        signals=parse_signals(signal),
        servers=parse_counts(servers, "--servers", 16),
        rows=parse_counts(rows, "--rows", MAX_ROWS),
        layers=layers,
        replays=replays,
        copy_kib=copy_kib,
        jit_cache_dir=jit_cache_dir,
    )
    run_on_device(options, json_file)


def kernels(
    formats: Annotated[
        str, typer.Option("--format", help="Weight formats, comma separated")
    ] = "bfloat16,fp8_block,int8,int8_w8a8,int4_g32,mxfp4",
    shapes: Annotated[
        str,
        typer.Option("--shape", help="Names or HxIxExK (hidden, intermediate, experts, per row), or all"),
    ] = "qwen3-30b-a3b",
    rows: Annotated[str, typer.Option(help="Token rows per call")] = "1,2,4,8,16,64,256,1024,4096",
    rows_per_expert: Annotated[
        str, typer.Option(help="Instead of --rows: exactly this many rows for every expert")
    ] = "",
    threads: Annotated[int, typer.Option(help="0: one per allowed CPU")] = 0,
    isa: Annotated[str, typer.Option(help="Instruction-set level")] = "auto",
    kernel: Annotated[str, typer.Option(help="GEMM kernel to force, by name")] = "auto",
    experts: Annotated[int, typer.Option(min=0, help="Per layer; 0: the model's, or what fits")] = 0,
    layers: Annotated[int, typer.Option(min=0, help="0: more than the caches can hold")] = 0,
    memory: Annotated[float, typer.Option(min=0, help="GiB for weights; 0: half of what is free")] = 0,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Weights in memory that others can map, as expert servers have it; private memory in turn",
        ),
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.001, help="Measuring time per row")] = 1.0,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print which kernel is used for how many rows")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Milliseconds per MoE layer on the CPU. With the bandwidth and the peak of the same cores."""
    from lab.bench.kernels import KernelsOptions, run
    from lab.bench.kernels_inputs import parse_isa, parse_shapes

    options = KernelsOptions(
        shapes=parse_shapes(shapes),
        formats=formats.split(","),
        rows=parse_counts(rows, "--rows"),
        rows_per_expert=parse_counts(rows_per_expert, "--rows-per-expert") if rows_per_expert else (),
        threads=threads,
        isa=parse_isa(isa),
        kernel=kernel,
        experts=experts,
        layers=layers,
        memory_bytes=int(memory * 2**30),
        shared=shared,
        seconds=seconds,
        print_plan=plan,
    )
    run(options, json_file)


def quota(
    share: Annotated[float, typer.Option(help="CPU time allowed, as a share of all CPUs")] = 0.5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measuring time per row")] = 3.0,
    json_file: JsonFile = None,
) -> None:
    """Speed of an MoE layer under a CPU quota (needs root)."""
    from lab.bench.quota import run

    run(share, seconds, json_file)


def load(
    formats: Annotated[
        str, typer.Option("--format", help="Formats of the checkpoint, comma separated")
    ] = "bfloat16,fp8_block,int4_g32",
    dtypes: Annotated[str, typer.Option("--expert-dtype", help="Packed as")] = "keep,int8,int4",
    shape: Annotated[str, typer.Option(help="HxIxE: hidden, intermediate, experts")] = "2048x768x128",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the checkpoint")] = 2,
    threads: Annotated[int, typer.Option(min=0, help="0: as many as cores and quota allow")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Loads per line; the best counts")] = 3,
    directory: Annotated[Path, typer.Option(help="Where the checkpoint is written")] = Path("/dev/shm"),
    json_file: JsonFile = None,
) -> None:
    """Loading experts, compared with reading the files. Reading, requantising and packing."""
    from lab.bench.load import LoadOptions, parse_shape, run

    sizes = parse_shape(shape, layers)
    options = LoadOptions(
        sizes, tuple(formats.split(",")), tuple(dtypes.split(",")), threads, repeats, directory
    )
    run(options, json_file)


Streams = Annotated[str, typer.Option(help="Numbers of concurrent streams, comma separated")]
PromptLen = Annotated[int, typer.Option(min=1, help="Tokens of each stream's prompt")]
MaxTokens = Annotated[int, typer.Option(min=16, help="Tokens computed per stream")]
Temperature = Annotated[
    float, typer.Option(min=0, help="0: greedy, which graphs hold; above: sampled after them")
]

ProbeMib = Annotated[int, typer.Option(min=0, help="Buffer for measuring bandwidth; 0: several caches")]


@with_settings("model", "gpu", "experts", "parallel", "placement", needs_device=True)
def engine(
    config: MoebiusConfig,
    streams: Streams = "1,4,8,16,32",
    prompt_len: PromptLen = 64,
    max_tokens: MaxTokens = 96,
    prefill: Annotated[str, typer.Option(help="Prompt lengths whose prefill is timed; 0: none")] = "512,2048",
    temperature: Temperature = 0.0,
    fetch: Annotated[
        str, typer.Option(help="Values of fetch_experts, comma separated; empty: the one that is set")
    ] = "",
    probe_mib: ProbeMib = 0,
    json_file: JsonFile = None,
) -> None:
    """Decode and prefill speed of the engine. With the bound of what its experts really read."""
    from lab.bench.engine.run import EngineBenchOptions, run

    log_warnings_only("bench")
    options = EngineBenchOptions(
        streams=parse_counts(streams, "--streams"),
        prompt_len=prompt_len,
        max_tokens=max_tokens,
        prefill=() if prefill == "0" else parse_counts(prefill, "--prefill"),
        temperature=temperature,
        fetch=tuple(fetch.split(",")) if fetch else (),
        probe_bytes=probe_mib * 2**20,
    )
    run(with_checkpoint(config), options, json_file)


@with_settings("model", "gpu", "experts", "parallel", "placement", needs_device=True)
def masks(
    config: MoebiusConfig,
    streams: Streams = "1,8,32",
    prompt_len: PromptLen = 64,
    max_tokens: MaxTokens = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each kind; their median counts")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Cost per token of outputs bound to a JSON schema. Next to the same outputs without."""
    from lab.bench.masks import MaskOptions, run

    log_warnings_only("bench")
    options = MaskOptions(parse_counts(streams, "--streams"), prompt_len, max_tokens, rounds)
    run(with_checkpoint(config), options, json_file)


@with_settings("model", "gpu", "experts", "parallel", "placement", needs_device=True)
def prefill(
    config: MoebiusConfig,
    lengths: Annotated[str, typer.Option(help="Prompt lengths, comma separated")] = "512,4096,16384",
    modes: Annotated[
        str, typer.Option(help="Values of prefill_experts, comma separated; empty: the one that is set")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length; the best counts")] = 3,
    decoding: Annotated[
        str, typer.Option(help="Numbers of streams that decode while each length prefills; 0: none")
    ] = "1",
    json_file: JsonFile = None,
) -> None:
    """Prefill speed by prompt length. With the limit of the link for what was streamed."""
    from lab.bench.prefill import PrefillOptions, run

    log_warnings_only("bench")
    chosen = tuple(modes.split(",")) if modes else (config.gpu.prefill_experts,)
    others = () if decoding == "0" else parse_counts(decoding, "--decoding")
    options = PrefillOptions(parse_counts(lengths, "--lengths"), chosen, repeats, others)
    run(with_checkpoint(config), options, json_file)


@with_settings("model", "gpu", "experts", "parallel", "placement", needs_device=True)
def placement(
    config: MoebiusConfig,
    strategies: Annotated[
        str, typer.Option(help="Placement strategies, comma separated")
    ] = "uniform,frequency,front-loading,random,adaptive",
    ratios: Annotated[
        str, typer.Option(help="Percent of experts on the GPU, comma separated")
    ] = "0,10,20,30,40,50,60,70,80,90,100",
    streams: Streams = "1",
    prompt_len: PromptLen = 64,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    probe_mib: ProbeMib = 0,
    json_file: JsonFile = None,
) -> None:
    """Decode speed by share of experts on the GPU. For each placement strategy."""
    from lab.bench.engine.run import EngineBenchOptions
    from lab.bench.placement import PlacementOptions, parse_ratios, run

    log_warnings_only("bench")
    options = PlacementOptions(
        tuple(strategies.split(",")),
        parse_ratios(ratios),
        EngineBenchOptions(
            parse_counts(streams, "--streams"), prompt_len, max_tokens, (), temperature, probe_mib * 2**20
        ),
    )
    run(with_checkpoint(config), options, json_file)


@with_settings("model", "gpu", "experts", "parallel", "placement", needs_device=True)
def topics(
    config: MoebiusConfig,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams")] = 1,
    count: Annotated[int, typer.Option("--topics", min=1, help="Topics, one after another")] = 3,
    seconds: Annotated[float, typer.Option(min=3.0, help="Seconds that each lasts")] = 40.0,
    prompt_len: PromptLen = 64,
    json_file: JsonFile = None,
) -> None:
    """Decode speed after the topic changes. Until the experts on the GPU have followed it."""
    from lab.bench.topics import TopicsOptions, run

    log_warnings_only("bench")
    run(with_checkpoint(config), TopicsOptions(streams, count, seconds, prompt_len), json_file)


@with_settings("model", "gpu", "experts", "parallel", "placement", needs_device=True)
def memory(
    config: MoebiusConfig,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that comes")] = 100_000,
    streams: Annotated[int, typer.Option(min=1, help="Streams that decode meanwhile")] = 8,
    before: Annotated[float, typer.Option(min=0, help="Seconds of decoding before it comes")] = 5.0,
    after: Annotated[float, typer.Option(min=0, help="Seconds of decoding after its end")] = 8.0,
    json_file: JsonFile = None,
) -> None:
    """A long prompt while experts hold most of a GPU's memory. Next to a fixed split of as many bytes."""
    from lab.bench.memory import MemoryOptions, run

    log_warnings_only("bench")
    run(with_checkpoint(config), MemoryOptions(prompt_len, streams, before, after), json_file)


@with_settings("model", "gpu", "experts", "parallel", "placement", needs_device=True)
def tiers(
    config: MoebiusConfig,
    lengths: Annotated[str, typer.Option(help="Tokens of prompts, comma separated")] = "1024,4096",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length")] = 3,
    tier_gib: Annotated[float, typer.Option(min=0.001, help="Size of each tier")] = 4.0,
    directory: Annotated[Path, typer.Option(help="Where the disk tier's files are made for now")] = Path(),
    json_file: JsonFile = None,
) -> None:
    """Prompts that come back from RAM and disk. Next to computing them, and to what their bytes take."""
    from lab.bench.tiers import TiersOptions, run

    log_warnings_only("bench")
    options = TiersOptions(parse_counts(lengths, "--lengths"), repeats, tier_gib, directory)
    run(with_checkpoint(config), options, json_file)


@with_settings("model", "gpu", "experts", "parallel", "placement", needs_device=True)
def speculation(
    config: MoebiusConfig,
    streams: Streams = "1,4",
    changed: Annotated[
        str, typer.Option(help="Percent of the prompt's text that outputs do not repeat, comma separated")
    ] = "0,10",
    text_len: Annotated[int, typer.Option(min=128, help="Tokens of the text that outputs repeat")] = 256,
    probe_mib: ProbeMib = 0,
    json_file: JsonFile = None,
) -> None:
    """Decode speed with draft tokens and without. Of outputs that repeat what their prompts hold."""
    from lab.bench.speculation import SpeculationOptions, parse_percents, run

    log_warnings_only("bench")
    options = SpeculationOptions(
        parse_counts(streams, "--streams"), parse_percents(changed, "--changed"), text_len, probe_mib * 2**20
    )
    run(with_checkpoint(config), options, json_file)


@with_settings("model", "gpu", "experts", "parallel", "placement", needs_device=True)
def steps(
    config: MoebiusConfig,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams")] = 1,
    count: Annotated[int, typer.Option("--steps", min=1, help="Decode steps that are looked at")] = 10,
    prompt_len: PromptLen = 64,
    temperature: Temperature = 0.0,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the profiler's trace there")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """What the GPU and the host do in decode steps. Kernels, gaps between graphs, host functions."""
    from lab.bench.steps import StepsOptions, run

    log_warnings_only("bench")
    run(with_checkpoint(config), StepsOptions(streams, count, prompt_len, temperature, trace), json_file)


def host(
    streams: Annotated[str, typer.Option(help="Concurrent streams, a row each")] = "32,128,256",
    steps: Annotated[int, typer.Option(min=10, help="Decode steps that are measured")] = 200,
    prompt_len: PromptLen = 512,
    temperature: Temperature = 0.0,
    json_file: JsonFile = None,
) -> None:
    """What a decode step costs the CPU. By part of the engine, on a device that computes nothing."""
    from lab.bench.host import HostOptions, run

    log_warnings_only("bench")
    counts = parse_counts(streams, "--streams", 1024)
    run(HostOptions(tuple(counts), steps, prompt_len, temperature), json_file)


def gateway(
    streams: Annotated[int, typer.Option(min=1, help="Streams whose cost is measured")] = 64,
    step_ms: Annotated[float, typer.Option(min=1, help="Time between two tokens of a stream")] = 10.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measuring time per figure")] = 4.0,
    arrivals: Annotated[int, typer.Option(min=1, help="Streams that arrive together")] = 256,
    connections: Annotated[int, typer.Option(min=1, help="Connections of requests not streamed")] = 32,
    workers: Annotated[int, typer.Option(min=1, help="Gateway processes")] = 1,
    engine: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Another engine [default: a scripted one]")
    ] = "",
    heavy: Annotated[
        str, typer.Option(help="Requests whose effect on another stream is measured, or all, or none")
    ] = "all",
    json_file: JsonFile = None,
) -> None:
    """What the HTTP process costs. Per streamed token, at the first byte, and next to heavy requests."""
    from lab.bench.gateway.run import GatewayOptions, run
    from lab.bench.gateway.stalls import HEAVY

    names = {"all": tuple(HEAVY), "none": ()}.get(heavy, tuple(heavy.split(",")))
    options = GatewayOptions(streams, step_ms, seconds, arrivals, connections, workers, engine, names)
    run(options, json_file)
