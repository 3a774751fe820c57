"""How fast decode and prefill will be: bytes over bandwidth, operations over peaks, and hand-offs.

Formulas, where the constants come from and how predictions compared with measurements: `docs/plan.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from app.bench.bounds import expected_distinct
from app.planning.hardware import Hardware
from app.planning.host_engine import (
    WOKEN_HAND_OFF_SECONDS,
    HostEngine,
    attention_seconds,
    call_seconds,
    host_engine,
    product_seconds,
)
from app.planning.memory import Residency, StoredExperts, expert_format, num_servers
from app.planning.packed_dense import packed_seconds
from app.supervisor.core_division import known_cores
from app.supervisor.expert_placement import place_experts
from moebius.config import MoebiusConfig
from moebius.host.kernel_times import PanelTimes, find_times, this_host
from moebius.kernels import float32_isa, isa_level
from moebius.kernels.weight_formats import (
    CODEBOOKS,
    PANEL_COLUMNS,
    split_gate_up,
)
from moebius.mailbox.plan import request_rows
from moebius.models.geometry import MoeGeometry
from moebius.models.layers.gqa import GQA
from moebius.models.layers.layer import mixers

if TYPE_CHECKING:
    from app.planning.gpu_models import GpuModel
    from gpu_service.assembly.forecast import Forecast, RankForecast
    from moebius.models.config import ModelConfig

# Shares of the vendor's figures that dense products reach on a GPU: by "Qwen3-30B-A3B on one H200" and
# "Prompts whose experts are streamed" of docs/benchmarks.md, see docs/plan.md.
GPU_BANDWIDTH_SHARE = 0.8
GPU_FLOPS_SHARE = 0.4
LINK_SHARE = 0.86
# Resident experts in decode: kernels that read an expert once for each row that chose it, and those that read
# it once for all its rows, by what decoding it costs: "Grouped rows" of docs/benchmarks.md. The last is that
# of tiles, which compute what `gpu_service.ops.grouped_panels` does not.
PAIRS_BANDWIDTH_SHARE = 0.42
WIDE_BANDWIDTH_SHARE, INT4_BANDWIDTH_SHARE = 0.7, 0.6
PRODUCTS_BANDWIDTH_SHARE, TABLE_BANDWIDTH_SHARE, TILES_BANDWIDTH_SHARE = 0.42, 0.3, 0.2
# Of the peak, by kernels that multiply resident experts: they read, then multiply; tiles do both at once.
RESIDENT_FLOPS_SHARE = 0.48
# What servers lose to a link that copies from the same memory, and the divisions of a layer that are tried.
SHARED_MEMORY, STREAMED_SHARES = 1.12, 32
# Of bandwidth and peak, by the expert kernels where no server has measured them; by int4 experts in the same
# sections. AMX multiplies decoded weights, and few rows of an expert leave its tiles waiting: the share grows
# by as much again with every ASSUMED_AMX_ROWS rows, up to that of others.
ASSUMED_EXPERT_BANDWIDTH_SHARE, ASSUMED_EXPERT_PEAK_SHARE = 0.78, 0.3
ASSUMED_AMX_PEAK_SHARE, ASSUMED_AMX_ROWS = 0.085, 750
# Between the GEMMs of a layer, in a replayed graph. Seconds.
GPU_LAYER_SECONDS = 45e-6
# The same where no expert server is asked: kernels begin before the last one ends.
GPU_RESIDENT_LAYER_SECONDS = 27e-6
# Of a step with a prompt: what its kernels and the attention between pieces of its graph take, and its
# launches by the host, one by one, where no graph has as many tokens.
GPU_PROMPT_LAYER_SECONDS, GPU_LAUNCHED_LAYER_SECONDS = 250e-6, 1.25e-3
# Of an all-reduce of few rows; two a layer.
ALL_REDUCE_SECONDS = 12e-6
# "Mailbox round trip" of docs/benchmarks.md, host B: a request, a server, and bytes both ways.
HAND_OFF_SECONDS, HAND_OFF_SERVER_SECONDS, HAND_OFF_BANDWIDTH = 2.2e-6, 1e-6, 13.5e9


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """How long an expert server's kernels take, as measured on this host; filled by `make_work`."""

    # Of gate and up: of both, or of each where their formats differ.
    gate_up: tuple[PanelTimes, ...]
    down: PanelTimes
    # Of one expert, all its intermediate channels; of each in `gate_up`.
    gate_up_panels: int
    down_panels: int
    hidden_size: int
    intermediate_size: int

    def seconds(self, rows: float) -> float:
        """Returns the seconds of one expert with `rows` rows, all threads of one server at work."""
        gate_up = sum(found.seconds(rows, self.hidden_size) for found in self.gate_up)
        down = self.down.seconds(rows, self.intermediate_size)
        return self.gate_up_panels * gate_up + self.down_panels * down


@dataclass(frozen=True, slots=True)
class ColdReads:
    """Experts that steps read from disk; filled by `cold.with_cold_experts`."""

    bandwidth: float
    # Rows of a request -> share of its different experts that is read.
    missed: Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Work:
    """What a step asks for; filled by `capacity`.

    Of the dense part that of each stage's busiest rank, summed over the stages, which a token passes in turn.
    """

    num_layers: int  # Those that attend twice count twice.
    moe_layers: int
    num_experts: int
    top_k: float  # Experts of a token, choices without weights left out: `MoeGeometry.mean_top_k`.
    hidden_size: int
    dense_bytes: int
    # By the packed format in which they are kept, "" for values; the head's only tokens pass that are sampled
    # after.
    layer_elements: Mapping[str, int]
    head_elements: Mapping[str, int]
    kv_token_bytes: float
    # Of a rank, over all layers: elements of a score, and of a weighted sum, of each token attended to.
    attention_width: int
    # Window -> share of the cache that layers have which see that many latest tokens at most.
    windows: Mapping[int, float] = field(default_factory=dict, kw_only=True)
    # Of one expert: in the servers' RAM, on a rank's GPU, and its weights.
    expert_bytes: float
    resident_expert_bytes: float
    packed_bytes: int = field(default=0, kw_only=True)  # Of the dense bytes, in packed formats.
    # Of a GPU's bandwidth, by the kernels that read an expert once for all its rows.
    grouped_share: float = field(default=TILES_BANDWIDTH_SHARE, kw_only=True)
    # Tokens of the largest step with a prompt that is a graph; 0: none is.
    prompt_graph_tokens: int = field(default=0, kw_only=True)
    expert_weights: int
    expert_times: ExpertTimes | None  # None: not measured on this host, or planned for another one.
    # Of all experts; routing is taken to be even.
    resident_share: float
    servers: int
    ranks: int
    # Rows that one request to the expert servers carries at most.
    request_rows: int
    item_bytes: int
    engine: HostEngine  # How it computes where there is no GPU.
    cold: ColdReads | None = None  # None: all experts are in memory.


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Parts of one step; filled by `step_seconds`."""

    dense: float
    cpu_experts: float
    gpu_experts: float
    hand_off: float
    overhead: float

    @property
    def total(self) -> float:
        """Resident experts are computed while the servers compute theirs; all else is sequential."""
        return self.dense + max(self.cpu_experts, self.gpu_experts) + self.hand_off + self.overhead

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part by name, in the order of a step."""
        return {
            "dense weights and KV": self.dense,
            "experts in RAM": self.cpu_experts,
            "experts on GPUs": self.gpu_experts,
            "hand-off": self.hand_off,
            "launches": self.overhead,
        }

    @property
    def bound_by(self) -> str:
        """The name of the part that takes longest."""
        return max(self.parts, key=self.parts.__getitem__)


@dataclass(frozen=True, slots=True)
class Speed:
    """One row of the prediction; filled by `predict_decode` and `predict_prefill`."""

    # Streams that decode, or tokens of one chunk of a prompt.
    rows: int
    tokens_per_second: float
    seconds: StepSeconds
    distinct_experts: float  # Different experts of a layer that a step touches.


def predict_decode(work: Work, hardware: Hardware, streams: Sequence[int], context: int) -> tuple[Speed, ...]:
    """Returns one row per number of streams, each of them `context` tokens long."""
    found = []
    for count in streams:
        seconds = step_seconds(work, hardware, count, count * context)
        distinct = expected_distinct(work.num_experts, work.top_k, count)
        found.append(Speed(count, count / seconds.total, seconds, distinct))
    return tuple(found)


def predict_prefill(
    work: Work, hardware: Hardware, chunk: int, context: int, streamed_chunk: int = 0
) -> Speed:
    """Returns the speed of a prompt of `context` tokens in chunks; each attends to half of the prompt on
    average.

    With a `streamed_chunk` steps may be that long, with experts streamed as the engine divides them.
    """
    found = [_prefill(work, chunk, context, _prompt(work, hardware, min(chunk, context), context // 2))]
    if streamed_chunk and hardware.gpu is not None and work.resident_share < 1.0:
        rows = min(streamed_chunk, context)
        seconds = _streamed(work, hardware, rows, _prompt(work, hardware, rows, context // 2))
        found.append(_prefill(work, streamed_chunk, context, seconds))
    return max(found, key=lambda speed: speed.tokens_per_second)


def _prefill(work: Work, chunk: int, context: int, seconds: StepSeconds) -> Speed:
    rows = min(chunk, context)
    distinct = expected_distinct(work.num_experts, work.top_k, min(rows, work.request_rows))
    return Speed(rows, rows / seconds.total, seconds, distinct)


def _prompt(work: Work, hardware: Hardware, rows: int, attended: int) -> StepSeconds:
    """Returns a step of a prompt; the host launches it ahead of the GPU, and may be what takes longest."""
    # One token follows the prompt, and only what it needs passes the head.
    seconds = step_seconds(work, hardware, rows, attended, attended, outputs=1)
    if hardware.gpu is None:
        return seconds
    more = work.num_layers * (GPU_PROMPT_LAYER_SECONDS - _layer_seconds(work))
    if rows > work.prompt_graph_tokens:
        launched = work.num_layers * GPU_LAUNCHED_LAYER_SECONDS
        more = max(more, launched - seconds.total)
    return replace(seconds, overhead=seconds.overhead + more)


def _streamed(work: Work, hardware: Hardware, rows: int, whole: StepSeconds) -> StepSeconds:
    """Returns `whole` with the share of each layer streamed that takes least (decision 13).

    Copies run ahead of everything that the GPU does; in "experts in RAM" is what that does not hide.
    """
    assert hardware.gpu is not None
    kept = (1.0 - work.resident_share) * work.num_experts * work.moe_layers
    copy = kept * work.expert_bytes / (hardware.gpu.link * LINK_SHARE * work.ranks)
    others = whole.dense + whole.overhead
    found = []
    for step in range(1, STREAMED_SHARES + 1):
        share = step / STREAMED_SHARES
        resident = work.resident_share + share * (1.0 - work.resident_share)
        on_gpu = _gpu_expert_seconds(replace(work, resident_share=resident), hardware, rows)
        rest = SHARED_MEMORY * (1 - share) * whole.cpu_experts
        hand_off = whole.hand_off if share < 1 else 0.0
        in_ram = max(rest, copy * share - others - hand_off)
        found.append(StepSeconds(whole.dense, max(0.0, in_ram), on_gpu, hand_off, whole.overhead))
    return min(found, key=lambda seconds: seconds.total)


def step_seconds(
    work: Work,
    hardware: Hardware,
    rows: int,
    kv_tokens: int,
    attended: int | None = None,
    outputs: int | None = None,
) -> StepSeconds:
    """Returns a step of `rows` tokens that reads the KV of `kv_tokens`, each row attending to `attended` of
    them, and after `outputs` of which a token is sampled; None: after each.
    """
    per_row = kv_tokens / rows if attended is None else attended
    outputs = rows if outputs is None else outputs
    in_ram = work.moe_layers and work.resident_share < 1.0
    return StepSeconds(
        _dense_seconds(work, hardware, rows, kv_tokens, per_row, outputs),
        _cpu_expert_seconds(work, hardware, rows) if in_ram else 0.0,
        _gpu_expert_seconds(work, hardware, rows),
        _hand_off_seconds(work, hardware, rows) if in_ram else 0.0,
        _overhead_seconds(work, hardware, rows, outputs),
    )


def _dense_seconds(
    work: Work, hardware: Hardware, rows: int, kv_tokens: int, attended: float, outputs: int
) -> float:
    seen = _seen_share(work, attended)
    kv_bytes = seen * kv_tokens * work.kv_token_bytes
    attention = rows * 4 * seen * attended * work.attention_width
    if hardware.gpu is None:
        elements = work.layer_elements, work.head_elements
        products = product_seconds(work.engine, hardware, elements, work.dense_bytes, rows, outputs)
        return products + attention_seconds(work.engine, hardware, kv_bytes, attention)
    gpu, nbytes = hardware.gpu, work.dense_bytes - work.packed_bytes + kv_bytes
    layers, head = work.layer_elements.get("", 0), work.head_elements.get("", 0)
    seconds = _plain_seconds(gpu, nbytes, 2 * (rows * layers + outputs * head) + attention)
    for count, by_format in ((rows, work.layer_elements), (outputs, work.head_elements)):
        for name, number in by_format.items():
            if name:
                plain = _plain_seconds(gpu, number * work.item_bytes, 2 * count * number)
                seconds += packed_seconds(name, count, number, gpu.bandwidth, plain)
    return seconds


def _plain_seconds(gpu: GpuModel, nbytes: float, operations: float) -> float:
    """Returns the time of reading weights in a type that is multiplied as it is, and of the products."""
    return max(nbytes / (gpu.bandwidth * GPU_BANDWIDTH_SHARE), operations / (gpu.flops * GPU_FLOPS_SHARE))


def _seen_share(work: Work, tokens: float) -> float:
    """Returns the share of the cache of `tokens` tokens that a query reads, over all layers, 0 to 1."""
    unseen = (
        share * (1.0 - window / tokens) for window, share in work.windows.items() if 0 < window < tokens
    )
    return 1.0 - sum(unseen)


def windows_of(model: ModelConfig) -> dict[int, float]:
    """Returns window -> share of all keys' and queries' products that layers with it have."""
    found: dict[int, float] = {}
    everything = sum(mixer.score_width for mixer in mixers(model.layers))
    for mixer in mixers(model.layers):
        if isinstance(mixer, GQA) and mixer.window is not None:
            found[mixer.window] = found.get(mixer.window, 0.0) + mixer.score_width / everything
    return found


def _cpu_expert_seconds(work: Work, hardware: Hardware, rows: int) -> float:
    """Rows go in requests of at most `request_rows`, each of which reads its own experts."""
    whole, rest = divmod(rows, work.request_rows)
    seconds = whole * _request_seconds(work, hardware, work.request_rows) if whole else 0.0
    return work.moe_layers * (seconds + (_request_seconds(work, hardware, rest) if rest else 0.0))


def _request_seconds(work: Work, hardware: Hardware, rows: int) -> float:
    """Experts that are missed are read while the others are computed, and computed then."""
    seconds = _computed_seconds(work, hardware, rows)
    if work.cold is None:
        return seconds
    missed = work.cold.missed(rows)
    distinct = expected_distinct(work.num_experts, work.top_k, rows)
    reading = missed * distinct * work.expert_bytes / work.cold.bandwidth
    return max((1.0 - missed) * seconds, reading) + missed * seconds


def _computed_seconds(work: Work, hardware: Hardware, rows: int) -> float:
    kept = 1.0 - work.resident_share
    distinct = expected_distinct(work.num_experts, work.top_k, rows)
    if work.expert_times is not None:
        return kept * distinct * work.expert_times.seconds(rows * work.top_k / distinct) / work.servers
    nbytes = kept * distinct * work.expert_bytes
    operations = kept * rows * work.top_k * 2 * work.expert_weights
    share = assumed_peak_share(hardware.isa, rows * work.top_k / distinct)
    return nbytes / (hardware.bandwidth * ASSUMED_EXPERT_BANDWIDTH_SHARE) + operations / (
        hardware.cpu_flops * share
    )


def grouped_share(formats: tuple[str, str] | None) -> float:
    """Returns the share of a GPU's bandwidth that rows of an expert reach together, by the packed formats of
    gate and up, and of down: the least of theirs.
    """
    if formats is None:
        return TILES_BANDWIDTH_SHARE
    gate, up = split_gate_up(formats[0])
    return TILES_BANDWIDTH_SHARE if gate != up else min(map(_format_share, (up, formats[1])))


def _format_share(name: str) -> float:
    from gpu_service.ops.grouped_panels import multiplies
    from gpu_service.ops.panels import panel_format

    length = 256  # of rows; any in whole blocks would do
    kind = panel_format(name, length)
    if not multiplies(kind, length):
        return TILES_BANDWIDTH_SHARE
    if kind.code in CODEBOOKS:
        return TABLE_BANDWIDTH_SHARE
    if kind.bits >= 8:
        return WIDE_BANDWIDTH_SHARE
    return PRODUCTS_BANDWIDTH_SHARE if kind.scale == "products" else INT4_BANDWIDTH_SHARE


def assumed_peak_share(isa: str, rows: float) -> float:
    """Returns what kernels are taken to reach of the peak of an instruction set, with `rows` rows
    per expert.
    """
    if isa != "amx":
        return ASSUMED_EXPERT_PEAK_SHARE
    return min(ASSUMED_EXPERT_PEAK_SHARE, ASSUMED_AMX_PEAK_SHARE * (1 + rows / ASSUMED_AMX_ROWS))


def _gpu_expert_seconds(work: Work, hardware: Hardware, rows: int) -> float:
    """Returns the time row by row, in tiles, or bound by operations."""
    if hardware.gpu is None or not work.resident_share:
        return 0.0
    pairs = work.resident_share * rows * work.top_k
    distinct = work.resident_share * expected_distinct(work.num_experts, work.top_k, rows)
    operations = pairs * 2 * work.expert_weights / work.ranks
    gpu = hardware.gpu
    reading = min(pairs / PAIRS_BANDWIDTH_SHARE, distinct / work.grouped_share)
    reading *= work.resident_expert_bytes / gpu.bandwidth
    if work.grouped_share == TILES_BANDWIDTH_SHARE:
        return work.moe_layers * max(reading, operations / (gpu.flops * GPU_FLOPS_SHARE))
    return work.moe_layers * (reading + operations / (gpu.flops * RESIDENT_FLOPS_SHARE))


def _hand_off_seconds(work: Work, hardware: Hardware, rows: int) -> float:
    """Returns the time of rows to all servers and of float32 sums back, over the links of all ranks
    at once.
    """
    requests = -(-rows // work.request_rows)
    nbytes = rows * work.hidden_size * (work.item_bytes + 4 * work.servers)
    speed = HAND_OFF_BANDWIDTH
    if hardware.gpu is not None:
        speed = hardware.gpu.link * LINK_SHARE * work.ranks
    woken = hardware.gpu is None and work.engine.wakes_servers
    each = WOKEN_HAND_OFF_SECONDS if woken else HAND_OFF_SECONDS + HAND_OFF_SERVER_SECONDS * work.servers
    return work.moe_layers * (requests * each + nbytes / speed)


def _overhead_seconds(work: Work, hardware: Hardware, rows: int, outputs: int) -> float:
    if hardware.gpu is None:
        return call_seconds(work.engine, work.num_layers, rows, outputs)
    reduces = 2 * ALL_REDUCE_SECONDS if work.ranks > 1 else 0.0
    return work.num_layers * (_layer_seconds(work) + reduces)


def _layer_seconds(work: Work) -> float:
    return GPU_RESIDENT_LAYER_SECONDS if work.resident_share >= 1.0 else GPU_LAYER_SECONDS


def make_work(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    stored: Mapping[int, StoredExperts],
    forecast: Forecast,
    residency: Residency,
    hardware: Hardware,
) -> Work:
    """Counts experts of layers in several formats with their mean size and the layout of most."""
    formats, expert_bytes = expert_format(config, geometry, stored)
    ranks, model = config.parallel.tensor_parallel_size, forecast.model_config
    busiest = _busiest_of_stages(forecast)
    mailbox = config.experts.expert_transport == "mailbox"
    return Work(
        num_layers=sum(max(1, len(layer.mixers)) for layer in model.layers),
        moe_layers=len(geometry.moe_layers),
        num_experts=geometry.num_experts,
        top_k=geometry.mean_top_k,
        hidden_size=geometry.hidden_size,
        dense_bytes=sum(
            rank.read_bytes + (0 if hardware.multiplies_bfloat16 else rank.widened_bytes) for rank in busiest
        ),
        packed_bytes=sum(rank.packed_bytes for rank in busiest),
        layer_elements=_sum_of(rank.layer_elements for rank in busiest),
        head_elements=_sum_of(rank.head_elements for rank in busiest),
        kv_token_bytes=sum(rank.page_bytes for rank in busiest) / config.gpu.page_size,
        windows=windows_of(model),
        attention_width=sum(mixer.score_width for mixer in mixers(model.layers)) // ranks,
        expert_bytes=expert_bytes,
        resident_expert_bytes=expert_bytes / ranks,
        grouped_share=grouped_share(formats if hardware.multiplies_bfloat16 else None),
        prompt_graph_tokens=config.gpu.prompt_graph_tokens,
        expert_weights=sum(rows * columns for rows, columns in geometry.matrices.values()),
        expert_times=measured_times(config, geometry, formats, model.dtype, hardware),
        resident_share=residency.share,
        servers=num_servers(config, hardware.sockets),
        ranks=ranks,
        request_rows=request_rows(config) if mailbox else config.gpu.num_batched_tokens,
        item_bytes=model.dtype_bytes,
        engine=host_engine(config, model, busiest, hardware),
    )


def measured_times(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    formats: tuple[str, str] | None,
    dtype: str,
    hardware: Hardware,
) -> ExpertTimes | None:
    """Returns the measured times from `hardware.kernel_times`; None: no server of as many threads has
    measured both matrices' formats.

    `dtype`: of the model's activations.
    """
    experts = config.experts
    if formats is None or not hardware.kernel_times or experts.expert_addresses:
        return None
    threads = server_threads(config, hardware)[0]
    on = this_host(threads, float32_isa() if experts.batch_invariant_experts else isa_level())
    rows = "bfloat16" if dtype == "bfloat16" else "float32"
    hidden, inner = geometry.hidden_size, geometry.moe_intermediate_size
    names = dict.fromkeys(split_gate_up(formats[0]))
    gate_up = [find_times(hardware.kernel_times, on, name, rows, hidden) for name in names]
    known = tuple(found for found in gate_up if found is not None)
    down = find_times(hardware.kernel_times, on, formats[1], rows, inner)
    if len(known) < len(gate_up) or down is None:
        return None
    gate_up_panels = (1 + geometry.is_gated) // len(known) * -(-inner // PANEL_COLUMNS)
    down_panels = -(-hidden // PANEL_COLUMNS)
    return ExpertTimes(known, down, gate_up_panels, down_panels, hidden, inner)


def server_threads(config: MoebiusConfig, hardware: Hardware) -> tuple[int, ...]:
    """Compute threads of each expert server that `serve` starts on this host while it is alone there."""
    engines = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    cores, threads = known_cores(config.experts), config.experts.expert_threads
    count = num_servers(config, hardware.sockets)
    placed = place_experts(cores.nodes, count, cores.quota, engines if hardware.gpu else 0, threads)
    return tuple(server.threads for server in placed)


def _sum_of(elements: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    found: Counter[str] = Counter()
    for counted in elements:
        found.update(counted)
    return found


def _busiest_of_stages(forecast: Forecast) -> list[RankForecast]:
    stages: dict[int, RankForecast] = {}
    for rank in forecast.ranks:
        if rank.stage not in stages or rank.read_bytes > stages[rank.stage].read_bytes:
            stages[rank.stage] = rank
    return list(stages.values())
