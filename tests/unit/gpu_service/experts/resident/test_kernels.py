"""Invariant: resident experts' Triton kernels compute what the torch reference says, for every packed format.

They run in Triton's interpreter here, in float32; tests/gpu repeats this on a device in bfloat16.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.device.host_virtual_memory import HostVirtualMemory
from gpu_service.device.virtual_memory import PhysicalPool
from gpu_service.experts.resident import grouped
from gpu_service.experts.resident.experts import (
    ELSEWHERE,
    LayerSlots,
    ResidentKernels,
    TorchResidentKernels,
)
from gpu_service.experts.resident.grouped import GroupedKernels
from gpu_service.experts.resident.make import warmed_up
from gpu_service.experts.resident.panels import UNPACK_FROM, layer_format, pair_bytes
from gpu_service.experts.resident.triton_kernels import backend, launch
from gpu_service.experts.resident.triton_kernels.backend import TritonResidentKernels
from gpu_service.experts.resident.triton_kernels.pairs import align
from gpu_service.experts.resident.unpack import unpack_expert
from gpu_service.ops.grouped_panels import GroupedPanels, GroupedShape
from gpu_service.ops.triton import panel_sizes
from moebius.kernels.weight_formats import WEIGHT_FORMATS
from tests import tolerances
from tests.helpers.numpy_unpack import unpack_expert as unpack_with_numpy
from tests.helpers.resident_layers import EXPERT_FORMATS, Shape, resident_layer, routed

# Row kernels, then tiles.
FEW, MANY = 100, 0
# With scales, mins, products of these, zero points, an order of columns, and a codebook.
PARTS = (
    "int4_g32",
    "int4_g32_mins",
    "int4_g32_mins_products",
    "int4_g64_zeros_f16",
    "int4_g32_ordered",
    "mxfp4",
)


def error(kernels: ResidentKernels, shape: Shape, slots: LayerSlots, rows: int) -> float:
    """Returns largest difference from the reference over the largest wanted magnitude."""
    hidden_states, ids, weights = routed(shape, rows)
    partial = torch.randn(rows, shape.hidden)
    reference = TorchResidentKernels(shape.geometry)
    assert torch.equal(kernels.cpu_ids(slots, ids), reference.cpu_ids(slots, ids))
    expected = reference.forward(slots, hidden_states, ids, weights, partial.clone())
    found = partial.clone()
    assert kernels.forward(slots, hidden_states, ids, weights, found) is found
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.covering(1)
@pytest.mark.parametrize("few_rows", [FEW, MANY], ids=["rows", "tiles"])
@pytest.mark.parametrize("weight_format", EXPERT_FORMATS)
def test_every_format(weight_format: str, few_rows: int) -> None:
    """Sizes with padding in every dimension; ids of resident, other and no experts.

    Both kinds of kernels read a format by the same functions, so `make test` has each format in one of them.
    """
    shape = Shape()
    slots = resident_layer(shape, weight_format, (4, 1, 2))
    kernels = TritonResidentKernels(shape.geometry, few_rows)
    assert error(kernels, shape, slots, 2) < tolerances.RESIDENT_FLOAT32


@pytest.mark.parametrize("weight_format", PARTS)
def test_tiles_of_codes(weight_format: str) -> None:
    """Codes multiplied part by part, and scaled, are bfloat16 rows times the weights: exact but for what lies
    between the two products, which is rounded to bfloat16.
    """
    shape = Shape()
    slots = resident_layer(shape, weight_format, (4, 1, 2))
    assert all(map(panel_sizes.has_parts, slots.kind.panels))
    hidden_states, ids, weights = routed(shape, 5)
    rows = hidden_states.bfloat16()
    found = TritonResidentKernels(shape.geometry, MANY).forward(slots, rows, ids, weights, None)
    expected = TorchResidentKernels(shape.geometry).forward(slots, rows.float(), ids, weights, None)
    assert float((found - expected).abs().max() / expected.abs().max()) < 2**-7


@pytest.mark.parametrize("few_rows", [FEW, MANY], ids=["rows", "tiles"])
def test_experts_of_other_ranks(few_rows: int) -> None:
    """They are no server's, and add nothing here."""
    shape = Shape()
    slots = resident_layer(shape, "int8", (4, 1, 2))
    others = [expert for expert in range(shape.geometry.num_experts) if expert not in (4, 1, 2)][:2]
    slots.slot_of_expert[others] = ELSEWHERE
    kernels = TritonResidentKernels(shape.geometry, few_rows)
    assert error(kernels, shape, slots, 3) < tolerances.RESIDENT_FLOAT32
    ids = torch.tensor([[4, others[0]], [others[1], -1]], dtype=torch.int32)
    assert kernels.cpu_ids(slots, ids).tolist() == [[-1, -1], [-1, -1]]
    hidden_states, weights = torch.randn(2, shape.hidden), torch.ones(2, 2)
    found = kernels.forward(slots, hidden_states, ids, weights, None)
    assert found[0].any()
    assert not found[1].any()


@pytest.mark.parametrize("few_rows", [FEW, MANY], ids=["rows", "tiles"])
@pytest.mark.parametrize(
    ("activation", "bias"),
    [
        (name, name in ("gpt_oss", "silu"))
        for name in ("silu_clamped", "gpt_oss", "silu", "gelu_tanh", "clamped_silu", "relu2")
    ],
)
def test_activations_and_biases(activation: str, bias: bool, few_rows: int) -> None:
    """Clamped and gpt-oss activations at values beyond the clamp, relu2 without a gate; biases."""
    shape = Shape(hidden=96, intermediate=48, activation=activation, has_bias=bias, limit=0.3)
    slots = resident_layer(shape, "int4_g32", (0, 3))
    kernels = TritonResidentKernels(shape.geometry, few_rows)
    assert error(kernels, shape, slots, 2) < tolerances.RESIDENT_FLOAT32


# Of each way to scale one, and of those that are not unpacked one; `test_every_format` has the others' codes.
UNPACKED = (
    "float16",
    "fp8_block",
    "int8_g32_mins",
    "int4_g32_mins_products",
    "int2_g16_mins_products",
    "int6_g16_products",
    "iq2_xxs_grid_products",
    "int4_g128_zeros",
    "int4_g32_ordered",
    "mxfp4",
    "iq2_xxs_grid_products+int6_g16_products",
)


@pytest.mark.parametrize(
    "weight_format",
    [pytest.param(name, marks=[] if name in UNPACKED else pytest.mark.full) for name in EXPERT_FORMATS],
)
def test_unpacked_once(weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many 16-bit rows: some experts at a time, some rows at a time; the last of each are fewer."""
    activation = "relu2" if weight_format == "fp8_block" else "silu"
    shape = Shape(activation=activation, has_bias=weight_format in ("fp8_channel", "mxfp4", "bfloat16"))
    slots = resident_layer(shape, weight_format, (4, 1, 2))
    kernels = TritonResidentKernels(shape.geometry, MANY)
    # The interpreter multiplies no bfloat16.
    hidden_states, ids, weights = routed(shape, 45, dtype=torch.float16)
    monkeypatch.setattr(launch, "UNPACK_FROM", 0)
    monkeypatch.setattr(launch, "UNPACKED_BYTES", 3 * launch.unpacked_bytes(slots.kind))
    monkeypatch.setattr(launch, "PAIRS_BYTES", 20 * 2 * pair_bytes(32, shape.hidden, 2))
    called: list[int] = []
    monkeypatch.setattr(kernels, "_unpacked", counted(kernels._unpacked, called))
    reference = TorchResidentKernels(shape.geometry)
    partials = [torch.randn(45, shape.hidden)] + [None] * (weight_format in ("float16", "mxfp4"))
    for partial in partials:
        expected = reference.forward(
            slots, hidden_states, ids, weights, None if partial is None else partial.clone()
        )
        found = kernels.forward(slots, hidden_states, ids, weights, partial)
        assert (found - expected).abs().max() / expected.abs().max() < tolerances.RESIDENT_BFLOAT16
    # What bfloat16 does not hold exactly is multiplied as it is stored.
    assert called == ([] if weight_format in ("float32", "float16") else [0, 3] * len(partials))


def test_a_graph_holds_no_slots_whose_memory_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture unpacks it would go on reading when the memory has gone; other captures unpack."""
    shape = Shape()
    kernels = TritonResidentKernels(shape.geometry, MANY)
    inputs = routed(shape, 45, dtype=torch.float16)
    monkeypatch.setattr(launch, "UNPACK_FROM", 0)
    monkeypatch.setattr(backend, "is_capturing", lambda device: True)
    called: list[int] = []
    monkeypatch.setattr(kernels, "_unpacked", counted(kernels._unpacked, called))
    pool = PhysicalPool(HostVirtualMemory(), 4096)
    kernels.forward(resident_layer(shape, "int4_g32", (4, 1, 2), pool=pool), *inputs, None)
    assert called == []
    kernels.forward(resident_layer(shape, "int4_g32", (4, 1, 2)), *inputs, None)
    assert called == [0]


@pytest.mark.parametrize("weight_format", ["float16", "bfloat16", "fp8_block", "int4_g128_zeros"])
def test_tiles_multiply_float16_rows_in_float16(weight_format: str) -> None:
    """Tiles do not multiply in bfloat16, of which a float16 row has three bits more."""
    shape = Shape()
    slots = resident_layer(shape, weight_format, (4, 1, 2))
    inputs = routed(shape, 5, dtype=torch.float16)
    expected = TorchResidentKernels(shape.geometry).forward(slots, *inputs, None)
    found = TritonResidentKernels(shape.geometry, MANY).forward(slots, *inputs, None)
    assert (found - expected).abs().max() / expected.abs().max() < tolerances.RESIDENT_FLOAT16


def counted(call: Any, firsts: list[int]) -> Any:
    """Returns the same, noting the first slot of each call."""

    def forward(slots: LayerSlots, first: int, *rest: Any) -> None:
        firsts.append(first)
        call(slots, first, *rest)

    return forward


def test_a_layer_clamps_where_its_slots_say() -> None:
    """Slots decide, not the geometry for all layers; an infinite limit is none, as for expert servers."""
    answers = []
    for limit in (0.1, 0.3, math.inf):
        shape = Shape(hidden=96, intermediate=48, activation="silu_clamped", limit=limit)
        slots = resident_layer(shape, "float32", tuple(range(shape.experts)))
        hidden_states, ids, weights = routed(shape, 7)
        answers.append(TorchResidentKernels(shape.geometry).forward(slots, hidden_states, ids, weights, None))
        engine = shape.engine("float32")
        expected = torch.from_numpy(engine.forward(0, hidden_states.numpy(), ids.numpy(), weights.numpy()))
        torch.testing.assert_close(answers[-1], expected, rtol=1e-5, atol=1e-6)
    assert (answers[0] - answers[1]).abs().max() > 0.01
    assert (answers[1] - answers[2]).abs().max() > 0.01


@pytest.mark.parametrize("few_rows", [FEW, MANY], ids=["rows", "tiles"])
def test_partial_sums_of_any_kind(few_rows: int) -> None:
    """None counts as zeros; bfloat16 is widened and left alone; no rows and no resident choice are fine."""
    shape = Shape(hidden=64, intermediate=32)
    slots = resident_layer(shape, "bfloat16", (2,))
    kernels = TritonResidentKernels(shape.geometry, few_rows)
    hidden_states, ids, weights = routed(shape, 4)
    zeros = torch.zeros(4, shape.hidden)
    added = kernels.forward(slots, hidden_states, ids, weights, zeros)
    assert torch.equal(kernels.forward(slots, hidden_states, ids, weights, None), added)
    empty = kernels.forward(slots, hidden_states[:0], ids[:0], weights[:0], None)
    assert empty.shape == (0, shape.hidden)
    no_choices = torch.full_like(ids, -1)
    partial = torch.randn(4, shape.hidden)
    assert torch.equal(kernels.forward(slots, hidden_states, no_choices, weights, partial.clone()), partial)


def test_rows_do_not_depend_on_their_batch() -> None:
    """Each way of computing gives a row the same bits alone and among others."""
    shape = Shape(hidden=64, intermediate=32)
    slots = resident_layer(shape, "int4_g32", (0, 1, 2, 3))
    hidden_states, ids, weights = routed(shape, 3)
    for few_rows in (FEW, MANY):
        kernels = TritonResidentKernels(shape.geometry, few_rows)
        whole = kernels.forward(slots, hidden_states, ids, weights, None)
        alone = kernels.forward(slots, hidden_states[2:], ids[2:], weights[2:], None)
        assert torch.equal(whole[2:], alone)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("rows", [1, 37])
def test_pairs_are_grouped_by_slot(rows: int, block: int) -> None:
    """Every resident pair stands once, in a block of its slot, in order; the rest is padding."""
    shape = Shape(experts=9, top_k=3)
    slots = resident_layer(shape, "int4_g32", (7, 0, 3, 5))
    _, ids, _ = routed(shape, rows, seed=2)
    pairs, block_slots = align(slots, ids, block, 0, slots.count)
    map_, flat = slots.slot_of_expert.tolist(), ids.flatten().tolist()
    wanted: dict[int, list[int]] = {}
    for pair, expert in enumerate(flat):
        if expert >= 0 and map_[expert] >= 0:
            wanted.setdefault(map_[expert], []).append(pair)
    found: dict[int, list[int]] = {}
    for place, slot in enumerate(block_slots.tolist()):
        held = [pair for pair in pairs[place * block : (place + 1) * block].tolist() if pair < len(flat)]
        assert (slot >= 0) == bool(held)
        if held:
            found.setdefault(slot, []).extend(held)
    assert found == wanted
    assert block_slots.shape[0] == launch.max_blocks(len(flat), slots.count, block)


def test_replacing_a_slot_is_seen_at_once() -> None:
    """The same tensors serve before and after: what a captured graph relies on."""
    shape = Shape(hidden=64, intermediate=32)
    slots = resident_layer(shape, "int4_g32", (0, 1))
    pointers = [slots.weights.data_ptr(), slots.slot_of_expert.data_ptr()]
    other = resident_layer(shape, "int4_g32", (4,))
    slots.put(1, 4, other.weights[0])
    assert [slots.weights.data_ptr(), slots.slot_of_expert.data_ptr()] == pointers
    assert slots.experts == (0, 4)
    kernels = TritonResidentKernels(shape.geometry, FEW)
    assert error(kernels, shape, slots, 2) < tolerances.RESIDENT_FLOAT32


@pytest.mark.parametrize("weight_format", [*WEIGHT_FORMATS, "int4_g32_ordered"])
def test_reference_unpacks_bit_by_bit(weight_format: str) -> None:
    """The torch unpacking gives the weights and biases that the documented layout means."""
    for shape in (Shape(hidden=96, intermediate=160), Shape(has_bias=True), Shape(activation="relu2")):
        slots = resident_layer(shape, weight_format, (1,))
        packed = slots.weights[0]
        plain = unpack_with_numpy(slots.kind.layout, packed.numpy())
        wanted = [matrix for matrix in plain if matrix is not None]
        for found, expected in zip(unpack_expert(slots.kind, packed), wanted, strict=True):
            np.testing.assert_array_equal(found.weight.numpy(), expected)
            assert (found.bias is not None) == shape.has_bias


class _DoNotFit(TritonResidentKernels):
    def forward(self, *arguments: Any) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")


def test_kernels_that_do_not_run_here_leave_experts_to_torch() -> None:
    """One warning at start, with the reason and what it costs, and no crash at the first request."""
    shape = Shape()
    slots = {0: resident_layer(shape, "bfloat16", (0, 1))}
    source: Any = SimpleNamespace(geometry=shape.geometry)
    with capture_logs() as logs:
        experts = warmed_up(source, slots, _DoNotFit(shape.geometry), 32, torch.float32)
    (warning,) = logs
    assert (warning["log_level"], warning["error"]) == (
        "warning",
        "RuntimeError: out of resource: shared memory",
    )
    assert "slower" in warning["cost"]
    assert not experts.captures
    hidden_states, ids, weights = routed(shape, 4)
    expected = TorchResidentKernels(shape.geometry).forward(slots[0], hidden_states, ids, weights, None)
    assert torch.equal(experts.forward(0, hidden_states, ids, weights), expected)


@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("max_rows", [1, 8, 9, 100, 4096])
def test_warm_up_meets_every_tile(max_rows: int, by_parts: bool) -> None:
    """No batch within the limit launches a kernel that was not compiled before readiness."""
    kind = layer_format("int4_g32", "int4_g32", 64, 32, False)
    for experts, top_k in ((8, 2), (128, 8), (256, 1)):
        few = launch.few_rows(kind, experts, top_k)
        sizes = launch.sizes_to_warm_up(experts, top_k, few, max_rows, by_parts)
        assert all(1 <= rows <= max_rows for rows in sizes)
        met = {launch.tile(rows * top_k, experts, by_parts) for rows in sizes if rows > few}
        many = range(few + 1, max_rows + 1)
        assert {launch.tile(rows * top_k, experts, by_parts) for rows in many} == met
        assert any(rows <= few for rows in sizes)


def test_few_rows_are_those_that_share_hardly_any_expert() -> None:
    """Rows are few up to as many pairs as experts, twice as many of 16 bits, which cost nothing to decode; 8
    rows always.
    """
    formats = [layer_format(name, name, 64, 32, False) for name in ("int4_g32", "fp8_block", "bfloat16")]
    assert [launch.few_rows(kind, 128, 8) for kind in formats] == [16, 16, 32]
    assert [launch.few_rows(kind, 8, 2) for kind in formats] == [8, 8, 8]


def test_what_cannot_be_compiled_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler or driver that refuses costs a warning, once, and no start; other rows never ask it."""
    asked: list[torch.device] = []

    def refuse(shape: GroupedShape, device: torch.device) -> GroupedPanels:
        asked.append(device)
        raise RuntimeError("cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(grouped, "is_available", lambda _: True)
    monkeypatch.setattr(grouped, "GroupedPanels", refuse)
    shape = Shape()
    experts = grouped.GroupedExperts(shape.geometry)
    with capture_logs() as logs:
        for _ in range(2):
            assert experts.of(resident_layer(shape, "int4_g32", (0,)), torch.bfloat16) is None
    assert experts.of(resident_layer(shape, "int4_g32", (0,)), torch.float32) is None
    assert experts.of(resident_layer(shape, "int3_g16_products", (0,)), torch.bfloat16) is None
    assert asked == [torch.device("cpu")]
    assert [entry["because"] for entry in logs] == ["cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION"]


def test_grouped_rows_are_unpacked_later_and_in_higher_blocks_of_wide_codes() -> None:
    """Shapes alone decide, by what was measured: few rows, heights of blocks, when weights are unpacked."""
    names = ("int4_g32", "int4_g32_mins_products", "fp8_block", "bfloat16")
    narrow, products, float8, wide = (layer_format(name, name, 64, 32, False) for name in names)
    assert [launch.few_grouped_rows(kind) for kind in (narrow, products, float8, wide)] == [6, 6, 8, 8]
    assert [launch.row_tiles(rows * 8, 128, 4) for rows in (4, 128, 256, 512, 513)] == [1, 1, 2, 2, 4]
    assert [launch.row_tiles(rows * 8, 128, 8) for rows in (128, 192, 256)] == [1, 2, 4]
    pairs = [UNPACK_FROM * 128, launch.UNPACK_GROUPED_FROM * 128]
    for is_grouped, expected in ((False, [True, True]), (True, [False, True])):
        found = [launch.unpacks(narrow, torch.bfloat16, count, 128, is_grouped) for count in pairs]
        assert found == expected


def test_warpgroups_are_chosen_by_pairs_of_an_expert() -> None:
    """Blocks of 64 rows, then of 128, earlier where decoding costs more; every choice is warmed up."""
    names = ("int4_g32", "int6_g16_products", "fp8_block", "bfloat16")
    kinds = [layer_format(name, name, 64, 32, False) for name in names]
    kernels: Any = GroupedKernels(few="few", some="some", many="many")  # type: ignore[arg-type]
    found = [
        [launch.chosen_warpgroups(kind, kernels, pairs) for pairs in (4, 12, 16, 32, 48, 80)]
        for kind in kinds
    ]
    assert found[0] == found[2] == [None, None, "some", "some", "some", "many"]
    assert found[1] == [None, "some", "some", "some", "many", "many"]
    assert found[3] == [None, None, None, "many", "many", "many"]
    rows = launch.sizes_to_warm_up(128, 8, 3, 8192, False)
    for kind, made in zip(kinds, ({"some", "many"},) * 3 + ({"many"},), strict=True):
        assert {launch.chosen_warpgroups(kind, kernels, count * 8 / 128) for count in rows} - {None} == made
