"""Launches of every Triton kernel at the sizes of published models, to be compiled by `compile_triton`.

Steps are planned and "run" as a service does it, so that tiles are chosen by the code under test.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from gpu_service.attention.base import grouped_queries
from gpu_service.attention.compressed.triton_backend import TritonCompressedAttention
from gpu_service.attention.flashinfer_plan import list_pages
from gpu_service.attention.mla.triton_backend import TritonMlaAttention
from gpu_service.attention.registry import compressed_dimensions, mla_dimensions
from gpu_service.attention.triton_backend import TritonAttention
from gpu_service.attention.warm_up import kinds_of_layers, warm_up_attention
from gpu_service.cache.fp8 import E4M3
from gpu_service.cache.kv_cache import CompressedCache
from gpu_service.experts.fetching.slots import make_state
from gpu_service.experts.fetching.triton_kernels import TritonFetchKernels
from gpu_service.experts.resident.experts import make_slots
from gpu_service.experts.resident.panels import layer_format
from gpu_service.experts.resident.triton_kernels.backend import TritonResidentKernels
from gpu_service.ops.example_sizes import SMALL, Sizes, sizes_of
from gpu_service.ops.examples import example
from gpu_service.ops.packed_weight import PackedPart, packed_bytes
from gpu_service.ops.panel_linear import UNPACK_FROM_ROWS, panel_parts
from gpu_service.ops.triton.table import IMPLEMENTATIONS
from moebius.models.config import ModelConfig
from moebius.models.layers.compressed import CompressedAttention
from moebius.models.layers.gqa import GQA
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import cached
from moebius.models.layers.router import RouterConfig
from moebius.models.read import read_model_config
from tests.helpers.attention_cases import Geometry, make_case, run
from tests.helpers.fused_decode import Options, attend
from tests.helpers.mla_cases import make_mla_case, run_absorbed
from tests.helpers.published_checkpoints import FIXTURES
from tests.helpers.resident_layers import EXPERT_FORMATS, MIXED_FORMATS, Shape, routed, with_down

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
# Smallest and largest of each kind: linear attention and heads of 256, most heads of latents with and
# without a choice, windows with sinks and experts with biases or without a gate, chosen blocks, states of
# channels; what of that takes most of a device.
MODELS = {
    "key": ("qwen3.5-397b-a17b", "deepseek-v3.2"),
    "covering": (
        "qwen3.5-397b-a17b",
        "deepseek-v3.2",
        "gpt-oss-120b",
        "minimax-m3",
        "jamba-1.5-mini",
        "nemotron-3-super-120b-a12b",
    ),
    "all": tuple(sorted(path.stem for path in FIXTURES.glob("*.json"))),
}
FORMATS = {
    "key": ("fp8_block",),
    "covering": (
        "bfloat16",
        "mxfp4",
        "int4_g32_ordered",
        "int5_g32_mins_products",
        "iq4_g32_products",
        MIXED_FORMATS[0],
    ),
    "all": EXPERT_FORMATS,
}
LAYERS = {
    "key": ("qwen3.5-397b-a17b",),
    "covering": ("gpt-oss-120b", "nemotron-3-super-120b-a12b"),
    "all": MODELS["all"],
}
# Rows that between them take every tile of the grouped products, with two experts of which one is chosen.
_EXPERT_ROWS = (8, 20, 60, 200, 400)


@dataclass(frozen=True)
class Case:
    """Some launches; filled by `cases`."""

    name: str
    launch: Callable[[], None]


@cache
def published(name: str) -> ModelConfig:
    """Returns the configuration of a published model."""
    with tempfile.TemporaryDirectory() as directory:
        config = json.loads((FIXTURES / f"{name}.json").read_text())["config"]
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return read_model_config(directory)


def cases(extent: str) -> Iterator[Case]:
    """`extent`: a key of `MODELS`."""
    yield Case("one row", _one_row)
    if extent != "key":
        yield Case("ops small", _small_ops)
        yield Case("pages", _pages)
        yield Case("fetching", _fetching)
        for weights in (name for name in FORMATS[extent] if name not in MIXED_FORMATS):
            yield Case(f"dense {weights}", partial(_dense, weights))
    for index, name in enumerate(MODELS[extent]):
        config = published(name)
        # "key" has what takes longest once: the ops and 8-bit pages of its first model only.
        is_short = extent == "key" and index > 0
        for storage in (None,) if is_short else (None, E4M3):
            label = name if storage is None else f"{name} fp8 KV"
            for sizes in () if is_short else sizes_of(config, config.layers, storage):
                yield Case(f"ops {label}", partial(_ops, sizes))
            attend = _ATTEND[type(cached(config.layers)[0][0])]
            yield Case(f"attention {label}", partial(attend, config, storage, extent == "key"))
    for shape in dict.fromkeys(_layer(published(name)) for name in LAYERS[extent]):
        for weights in FORMATS[extent]:
            label = f"experts {shape.hidden} x {shape.intermediate} {weights}"
            yield Case(label, partial(_experts, shape, weights))


def _dense(weights: str) -> None:
    """A dense layer in panels: one row, some, either tile, weights that are unpacked; a look-up."""
    form = (PackedPart(weights.removesuffix("_ordered"), 4096),)
    memory = torch.zeros(packed_bytes(2048, form), dtype=torch.uint8)
    parts = panel_parts(2048, form)
    for rows in (1, 2, 16, 64, UNPACK_FROM_ROWS):
        hidden_states = torch.zeros(rows, 2048, dtype=BF16)
        IMPLEMENTATIONS["panel_linear"].function(hidden_states, memory, parts, None)
    IMPLEMENTATIONS["panel_rows"].function(torch.zeros(3, dtype=torch.int64), memory, parts, BF16)


def _fetching() -> None:
    """Few experts and many, one rank and several, one row and as many as steps that fetch have."""
    kind = layer_format("int4_g32", "int4_g32", 2048, 768, False)
    for experts, top_k, ranks in ((128, 8, (0, 1)), (512, 10, (0, 1)), (128, 8, (1, 2)), (256, 8, (2, 3))):
        layer = make_state({0: [kind]}, 16, experts, {0: 7.0}, CPU, *ranks).layers[0]
        kernels = TritonFetchKernels(CPU)
        for rows in (1, 64):
            kernels.choose(layer, torch.zeros((rows, top_k), dtype=torch.int32))
        kernels.copy(layer)


def _ops(sizes: Sizes) -> None:
    for name, implementation in IMPLEMENTATIONS.items():
        arguments = example(name, CPU, BF16, sizes)
        if implementation.supports is None or implementation.supports(*arguments):
            implementation.function(*arguments)


def _one_row() -> None:
    """The largest tiles of a weight: a layer's, and the weight of logits."""
    for dtype, features, columns in (
        (BF16, 5120, 2048),
        (BF16, 151936, 2048),
        (BF16, 5120, 4096),
        (FP32, 5120, 2048),
    ):
        row, wide = torch.zeros(1, columns, dtype=dtype), torch.empty(features, columns, dtype=dtype)
        IMPLEMENTATIONS["linear"].function(row, wide, None)
        IMPLEMENTATIONS["add_norm_linear"].function(row, row.float(), row[0], 1e-6, wide, None)


def _small_ops() -> None:
    """What no published model has: one key head, one chunk of logits, updates wider than the residual."""
    for dtype in (BF16, FP32):
        for name, implementation in IMPLEMENTATIONS.items():
            implementation.function(*example(name, CPU, dtype))
    update, residual, weight, eps = example("fused_add_rms_norm", CPU, BF16)
    IMPLEMENTATIONS["fused_add_rms_norm"].function(update.float(), residual, weight, eps)
    slots, *rest = example("append_kv", CPU, FP32, replace(SMALL, storage=E4M3))
    IMPLEMENTATIONS["append_kv"].function(slots, *rest, 0.5, 2.0)
    table = IMPLEMENTATIONS["rope_table"].function(torch.arange(64), torch.rand(1), BF16, True)
    by_pair = torch.zeros(32, 3, dtype=torch.int64).t()
    IMPLEMENTATIONS["rope_table"].function(by_pair, torch.rand(32), BF16, False)
    heads, weight = torch.zeros(64, 2, 4, dtype=BF16), torch.zeros(4, dtype=BF16)
    IMPLEMENTATIONS["qk_norm_rope"].function(heads, weight, weight, 1e-6, 1, table)
    IMPLEMENTATIONS["apply_rope"].function(heads[:, :1], table)
    logits = torch.zeros(2, 128, dtype=BF16)
    for score, post in (
        ("softmax", "renormalize"),
        ("none", "softmax"),
        ("none", "sigmoid_renormalize"),
    ):
        router = RouterConfig(128, 8, score, post=post)
        IMPLEMENTATIONS["route"].function(logits, None, router, logits[:, 0] > 0)
        IMPLEMENTATIONS["route"].function(logits, None, replace(router, logit_softcap=30.0))
    mixed = RouterConfig(128, 2, "sparse_mixer", mixer_width=0.02)
    IMPLEMENTATIONS["route"].function(logits, None, mixed, logits[:, 0] > 0)
    IMPLEMENTATIONS["route"].function(logits, None, mixed)
    IMPLEMENTATIONS["argmax_and_finite"].function(torch.zeros(1, 7))
    words = torch.zeros(1, 1, dtype=torch.int32)
    IMPLEMENTATIONS["mask_logits"].function(torch.zeros(1, 7), torch.zeros(1, dtype=torch.int64), words)


def _pages() -> None:
    inputs = make_case(Geometry(), [(900, 1), (3, 7)]).inputs
    list_pages(inputs.block_table, inputs.seq_lens_tensor, torch.zeros(999, dtype=torch.int32), 4)


def _attend(config: ModelConfig, storage: torch.dtype | None, is_key: bool) -> None:
    """Decodes in one piece and in splits, and a chunk, for each kind of the model's layers.

    `is_key`: pages of 8 bits have the chunk only, which takes more shared memory.
    """
    for _, kind, _ in kinds_of_layers(grouped_queries(config.layers), BF16, CPU):
        geometry = Geometry(
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            16,
            BF16,
            storage,
            window=kind.window,
            sinks=kind.has_sinks,
            chunk=kind.chunk,
            block_size=0 if kind.blocks is None else kind.blocks.block_size,
        )
        for shape in ([(900, 1)], [(30, 1), (3, 7)])[is_key and storage is not None :]:
            case = make_case(geometry, shape)
            attention = TritonAttention(geometry.config().layers, case.cache)
            run(case, attention)
            if case.inputs.is_uniform_decode:
                attend(attention, case, Options())


def _attend_latents(config: ModelConfig, storage: torch.dtype | None, is_key: bool) -> None:
    """Few rows, whose keys are divided, and enough that a program has 64 heads; all tokens and a choice.

    `is_key`: few rows choose, many see all; otherwise each does both.
    """
    dimensions = mla_dimensions(config.layers)
    choices = [None, dimensions.index] if dimensions.index is not None and storage is None else [None]
    for index in choices:
        chosen = replace(dimensions, index=None if index is None else replace(index, top_k=256))
        for new in (1, 200):
            if is_key and (new == 1) == (index is None):
                continue
            case = make_mla_case(chosen, [(900, new)], 64, BF16, storage)
            run_absorbed(case, TritonMlaAttention(chosen, case.cache))


def _attend_compressed(config: ModelConfig, storage: torch.dtype | None, is_key: bool) -> None:
    """A layer of each kind, all entries and a choice; pages of 8 bits are refused before."""
    if storage is not None:
        return
    dimensions = replace(compressed_dimensions(config.layers), top_k=256)
    cache = CompressedCache(config.layers, 2, 16, BF16)
    warm_up_attention(TritonCompressedAttention(dimensions, cache), 2048)


_ATTEND = {GQA: _attend, MLA: _attend_latents, CompressedAttention: _attend_compressed}


def _layer(config: ModelConfig) -> Shape:
    """The routed experts of a model; of them two, because their number changes nothing."""
    moe = next(iter(config.routed.values()))
    experts, hidden = moe.experts, moe.expert_input_size(config.hidden_size)
    return Shape(hidden, experts.intermediate_size, 2, 1, experts.activation, has_bias=experts.has_bias)


def _experts(shape: Shape, weights: str) -> None:
    sizes = shape.hidden, shape.intermediate, shape.has_bias, shape.geometry.is_gated
    kind = layer_format(*with_down(weights), *sizes)
    slots = make_slots(kind, 1, shape.experts, CPU, shape.limit)
    kernels = TritonResidentKernels(shape.geometry)
    for rows in _EXPERT_ROWS:
        hidden_states, ids, factors = routed(shape, rows, dtype=BF16)
        kernels.forward(slots, hidden_states, kernels.cpu_ids(slots, ids), factors, None)
