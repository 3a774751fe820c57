"""How fast an engine computes dense layers on a CPU: products by their measured panels, attention, and calls.

`measured_products` times the kernels themselves, in the formats of one model and with the threads of its
engine; without that they are assumed to reach shares of bandwidth and peak. Formulas: docs/plan.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.planning.hardware import ASSUMED_CORE_FLOPS, Hardware
from moebius import _kernels
from moebius.config import MoebiusConfig
from moebius.host.kernel_times import PanelTimes, find_times, this_host
from moebius.kernels import isa_level
from moebius.kernels.weight_formats import PANEL_COLUMNS, panel_layout
from moebius.models.layers.gqa import GQA
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import Layer
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.recurrent import KDA, GatedDeltaNet, Lightning, Mamba2, SelectiveScan, ShortConv
from moebius.models.layers.residual import NormedStream, Sequential, Single

if TYPE_CHECKING:
    from gpu_service.assembly.forecast import RankForecast
    from moebius.models.config import ModelConfig

# Of bandwidth, of the peak of the engine's threads, and of AMX's peak, by products that were not measured
# here; by "A decode step on a CPU as one call" of docs/benchmarks.md, and for AMX as experts of many rows.
BANDWIDTH_SHARE, PEAK_SHARE, AMX_PEAK_SHARE = 0.7, 0.9, 0.3
# Of the peak of these threads without AMX, by attention; by "A GGUF file on a CPU alone".
ATTENTION_SHARE = 0.5
# Of a step: scheduling and outputs; and of each token that is sampled. Seconds, as HAND_OFF and LAYER by
# docs/plan.md, "How predictions compare".
STEP_SECONDS, SAMPLED_SECONDS = 2.1e-3, 0.35e-3
# Of a layer: what is not products, in steps of few rows by one call for many layers, else by Python; and of
# how many rows such a step has at most (decision 39).
LAYER_SECONDS, CALLED_LAYER_SECONDS, MOST_ROWS_OF_A_CALL = 20e-6, 300e-6, 16
# What products of more rows take longer among other layers than one after another, as they are measured.
AMONG_OTHERS = 1.25
# Of a layer's experts where servers sleep between layers, as they do without a core for each thread.
WOKEN_HAND_OFF_SECONDS = 45e-6
# Numbers of rows at which kernels are timed, and how much of a matrix is read for as few as the first ones
# and for more; and the number of calls of which the fastest counts.
_FEW_ROWS, _MANY_ROWS, _PASSES = (1, 2, 4, 8, 16), (32, 64, 128, 512), 8
_MANY_BYTES = 4 * 2**20
# A byte of which numbers of every format are ordinary ones: none is denormal, infinite or not a number.
_FILL = 0x3C


@dataclass(frozen=True, slots=True)
class HostEngine:
    """An engine without a GPU; filled by `host_engine`."""

    threads: int
    hidden_size: int
    layers_in_one_call: float  # Share of the layers that decode steps compute by one call for many.
    wakes_servers: bool  # Whether servers have no cores on which they may wait for the next layer.
    # By the packed format of dense weights; empty: not all of them were measured here.
    products: Mapping[str, PanelTimes]


def host_engine(
    config: MoebiusConfig, model: ModelConfig, ranks: Sequence[RankForecast], hardware: Hardware
) -> HostEngine:
    """Returns what the plan knows of the engine's kernels, from `hardware.kernel_times`."""
    threads, found = engine_threads(config, hardware), dict[str, PanelTimes]()
    formats = product_formats(ranks)
    if hardware.gpu is None and hardware.kernel_times:
        on = this_host(threads, isa_level())
        for name in formats:
            times = find_times(hardware.kernel_times, on, name, _row_type(model), model.hidden_size)
            if times is not None:
                found[name] = times
    one_call = [layer for layer in model.layers if _is_joined(layer)]
    complete = found if len(found) == len(formats) else {}
    joined = len(one_call) / len(model.layers)
    return HostEngine(threads, model.hidden_size, joined, _wakes_servers(config, hardware), complete)


def engine_threads(config: MoebiusConfig, hardware: Hardware) -> int:
    """Returns the threads of an engine on such CPUs: a core is left to what else it does."""
    return config.gpu.gpu_threads or max(1, hardware.cores - 1)


def _wakes_servers(config: MoebiusConfig, hardware: Hardware) -> bool:
    """Returns what `spin_budget` of kernels/mailbox/wait_policy.cc decides beside an engine on a CPU."""
    threads = config.experts.expert_threads * (config.experts.expert_servers or hardware.sockets)
    return 1 + (threads or hardware.cores) > hardware.cores


def product_formats(ranks: Iterable[RankForecast]) -> tuple[str, ...]:
    """Returns the packed formats of dense weights, which kernels of ours multiply."""
    names = {name for rank in ranks for held in (rank.layer_elements, rank.head_elements) for name in held}
    return tuple(sorted(names - {""}))


def _row_type(model: ModelConfig) -> str:
    return "bfloat16" if model.dtype == "bfloat16" else "float32"


def _is_joined(layer: Layer) -> bool:
    """Returns whether `_kernels.DecoderLayers` computes the layer, as far as its mixer and stream say."""
    return isinstance(layer.residual, NormedStream | Sequential | Single) and all(
        map(_is_plain, layer.mixers)
    )


def _is_plain(mixer: Mixer) -> bool:
    if isinstance(mixer, GQA):
        return mixer.blocks is None and (mixer.rope is not None or mixer.qk_norm is None)
    if isinstance(mixer, MLA):
        return mixer.is_plain
    return isinstance(mixer, GatedDeltaNet | KDA | Lightning | Mamba2 | SelectiveScan | ShortConv)


def product_seconds(
    engine: HostEngine,
    hardware: Hardware,
    elements: tuple[Mapping[str, int], Mapping[str, int]],
    nbytes: float,
    rows: int,
    outputs: int,
) -> float:
    """Returns the seconds of a step's dense products.

    `elements`: of layers, with which `rows` are multiplied, and of the head, with which `outputs` are, by
    packed format. `nbytes`: of all of them.
    """
    layers, head = elements
    if engine.products:
        longer = AMONG_OTHERS if rows > MOST_ROWS_OF_A_CALL else 1.0
        return longer * _panel_seconds(engine, layers, rows) + _panel_seconds(engine, head, outputs)
    share = AMX_PEAK_SHARE if hardware.isa == "amx" else PEAK_SHARE
    peak = hardware.cpu_flops * min(1.0, engine.threads / hardware.cores) * share
    operations = 2 * (rows * sum(layers.values()) + outputs * sum(head.values()))
    return max(nbytes / (hardware.bandwidth * BANDWIDTH_SHARE), operations / peak)


def _panel_seconds(engine: HostEngine, elements: Mapping[str, int], rows: int) -> float:
    """Returns the time of all panels as one wide matrix; values that no kernel multiplies are few."""
    panels = {name: count / (PANEL_COLUMNS * engine.hidden_size) for name, count in elements.items() if name}
    return sum(
        count * engine.products[name].seconds(rows, engine.hidden_size) for name, count in panels.items()
    )


def attention_seconds(engine: HostEngine, hardware: Hardware, kv_bytes: float, operations: float) -> float:
    """Returns the seconds in which queries attend: reading the cache, or their products."""
    threads = min(1.0, engine.threads / hardware.cores) * hardware.cores
    core = hardware.cpu_flops / hardware.cores
    # Its kernels use no tiles.
    core = min(core, ASSUMED_CORE_FLOPS["avx512_bf16"]) if hardware.isa == "amx" else core
    peak = core * threads * ATTENTION_SHARE
    return max(kv_bytes / (hardware.bandwidth * BANDWIDTH_SHARE), operations / peak)


def call_seconds(engine: HostEngine, num_layers: int, rows: int, outputs: int) -> float:
    """Returns the seconds of a step in which neither products nor experts are computed."""
    joined = engine.layers_in_one_call if rows <= MOST_ROWS_OF_A_CALL else 0.0
    step = STEP_SECONDS + outputs * SAMPLED_SECONDS
    return step + num_layers * (joined * LAYER_SECONDS + (1 - joined) * CALLED_LAYER_SECONDS)


def measured_products(
    config: MoebiusConfig, model: ModelConfig, ranks: Sequence[RankForecast], hardware: Hardware
) -> tuple[PanelTimes, ...]:
    """Times products of every packed format of dense weights, as such an engine computes them on this host.

    A matrix is as large as all the model's of its format, or twice the caches, so that as much of it comes
    from memory as in a decode step.
    """
    from app.bench.limits import cache_bytes
    from moebius.host.topology import Topology

    count = engine_threads(config, hardware)
    on, threads = this_host(count, isa_level()), _kernels.DenseThreads(count)
    caches = cache_bytes(Topology.detect().usable_cpus())
    found = []
    for name in product_formats(ranks):
        elements = sum(rank.layer_elements.get(name, 0) + rank.head_elements.get(name, 0) for rank in ranks)
        most = (
            panel_layout(name, model.hidden_size).panel_bytes
            * elements
            // (PANEL_COLUMNS * model.hidden_size)
        )
        few = _timed(threads, name, model, _FEW_ROWS, min(most, max(2 * caches, 2**28)))
        many = _timed(threads, name, model, _MANY_ROWS, min(most, _MANY_BYTES))
        found.append(PanelTimes(on, name, _row_type(model), model.hidden_size, (*few, *many)))
    return tuple(found)


def _timed(
    threads: _kernels.DenseThreads, name: str, model: ModelConfig, counts: Sequence[int], nbytes: int
) -> list[tuple[int, float]]:
    """Returns (rows, nanoseconds of a panel) for products with a matrix of about `nbytes`."""
    import torch

    from gpu_service.device.stream import own_pages
    from gpu_service.ops.packed_weight import PackedPart, PackedWeight, packed_bytes

    k = model.hidden_size
    panels = max(1, nbytes // panel_layout(name, k).panel_bytes)
    parts = (PackedPart(name, panels * PANEL_COLUMNS),)
    memory = own_pages((packed_bytes(k, parts),), torch.uint8).fill_(_FILL)
    weight = PackedWeight(threads, k, parts, memory)
    weight.calibrate()
    dtype = torch.bfloat16 if _row_type(model) == "bfloat16" else torch.float32
    points = []
    for count in counts:
        rows, best = torch.ones(count, k, dtype=dtype), math.inf
        for _ in range(_PASSES):
            begin = time.perf_counter()
            weight.linear(rows, None)
            best = min(best, time.perf_counter() - begin)
        points.append((count, best * 1e9 / panels))
    return points
