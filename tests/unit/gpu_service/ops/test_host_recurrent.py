"""Invariant: the CPU's kernels of layers with states, and of gates, are the torch references, at every
instruction-set level, for any number of rows and threads.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from gpu_service.ops import activation, kimi_delta, linear_attention, norm, selective_scan, state_space
from gpu_service.ops.host_recurrent import HostRecurrent, implementations
from moebius import _kernels
from moebius.kernels import supported_isas
from tests.tolerances import OP_ROUNDINGS

# Higher levels add products of matrices only.
OWN = ("scalar", "avx2", "avx512")
LEVELS = pytest.mark.parametrize("isa", [isa for isa in supported_isas() if isa in OWN])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def kernels(isa: str) -> HostRecurrent:
    return HostRecurrent(_kernels.DenseThreads(2, isa))


def assert_same(found: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """Within a number of roundings of the largest value, since sums cancel."""
    assert found.dtype == expected.dtype
    allowed = roundings * OP_ROUNDINGS[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed * float(expected.abs().max()))


def same_with_states(
    ours: Callable[..., Any], theirs: Callable[..., Any], rows: tuple[Any, ...], states: torch.Tensor, at: int
) -> None:
    """Both get copies of the states, as the argument `at`; slots that are not written keep their values."""
    own, expected = states.clone(), states.clone()
    found = ours(*rows[:at], own, *rows[at:])
    assert_same(found, theirs(*rows[:at], expected, *rows[at:]), 2)
    assert_same(own, expected, 2)


@LEVELS
@DTYPES
@pytest.mark.parametrize("channels", [16, 100, 2100])
def test_convolution(isa: str, dtype: torch.dtype, channels: int) -> None:
    """Rows may be columns of a wider product; with a bias and without, activated or not."""
    weight, bias = torch.randn(channels, 4).to(dtype), torch.randn(channels).to(dtype)
    states = torch.randn(6, 3, channels).to(dtype)
    rows = torch.randn(2, channels + 12).to(dtype)[:, 5 : 5 + channels]
    reads, writes = torch.tensor([0, 3]), torch.tensor([4, 1])
    for offset, activates in product((None, bias), (True, False)):
        same_with_states(
            kernels(isa).causal_conv_update,
            linear_attention.causal_conv_update.reference,
            (rows, weight, reads, writes, offset, activates),
            states,
            1,
        )


@LEVELS
@DTYPES
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"), [(2, 4, 8, 16), (1, 3, 36, 48), (2, 2, 128, 128)]
)
def test_gated_delta_rule(
    isa: str, dtype: torch.dtype, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> None:
    """Gates are columns of one product; decays reach from nearly 1 to nearly 0."""
    keys = key_heads * key_dim
    qkv = torch.randn(2, 2 * keys + heads * value_dim).to(dtype)
    b, a = (torch.randn(2, 2 * heads) * 4).to(dtype).chunk(2, dim=1)
    constants = torch.randn(heads), torch.randn(heads) * 3
    states = torch.randn(6, heads, key_dim, value_dim)
    rows = (qkv, a, b, *constants, torch.tensor([5, 0]), torch.tensor([2, 3]))
    theirs = linear_attention.gated_delta_update.reference
    same_with_states(kernels(isa).gated_delta_update, theirs, rows, states, 5)


@LEVELS
@DTYPES
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 16), (36, 48), (128, 128)])
def test_delta_rule_with_decays_of_elements(
    isa: str, dtype: torch.dtype, bound: float | None, key_dim: int, value_dim: int
) -> None:
    """Columns of decays and of changes lie in different products; decays reach from nearly 1 to nearly 0."""
    heads = 3
    qkv = torch.randn(2, heads * (2 * key_dim + value_dim)).to(dtype)
    a = (torch.randn(2, heads * key_dim + 5) * 4).to(dtype)[:, 5:]
    b = torch.randn(2, 40).to(dtype)[:, 7 : 7 + heads]
    constants = torch.randn(heads), torch.randn(heads * key_dim) * 3, bound
    states = torch.randn(6, heads, key_dim, value_dim)
    rows = (qkv, a, b, *constants, torch.tensor([5, 0]), torch.tensor([2, 3]))
    theirs = kimi_delta.kimi_delta_update.reference
    same_with_states(kernels(isa).kimi_delta_update, theirs, rows, states, 6)


@LEVELS
@DTYPES
@pytest.mark.parametrize(
    ("groups", "heads", "state_dim", "head_dim"), [(2, 4, 8, 16), (1, 3, 37, 48), (2, 2, 128, 64)]
)
def test_state_space(
    isa: str, dtype: torch.dtype, groups: int, heads: int, state_dim: int, head_dim: int
) -> None:
    """Steps are columns of a wider product; outputs are float32, as the norm reads them."""
    xbc = torch.randn(2, heads * head_dim + 2 * groups * state_dim).to(dtype)
    dt = (torch.randn(2, heads + 7) * 4).to(dtype)[:, 7:]
    constants = torch.randn(heads), torch.randn(heads) * 3, torch.randn(heads)
    states = torch.randn(6, heads, state_dim, head_dim)
    rows = (xbc, dt, *constants, torch.tensor([5, 0]), torch.tensor([2, 3]))
    theirs = state_space.state_space_update.reference
    same_with_states(kernels(isa).state_space_update, theirs, rows, states, 5)


@LEVELS
@DTYPES
@pytest.mark.parametrize(("channels", "state_dim"), [(48, 16), (300, 8), (530, 21), (7, 64)])
def test_selective_scan(isa: str, dtype: torch.dtype, channels: int, state_dim: int) -> None:
    """All rows are columns of wider products; steps reach from nearly 0 to ones that keep nothing."""
    x, gate = torch.randn(2, 2 * channels).to(dtype).chunk(2, dim=1)
    dt = (torch.randn(2, channels + 3) * 6).to(dtype)[:, 3:]
    b, c = torch.randn(2, 2 * state_dim).to(dtype).chunk(2, dim=1)
    constants = torch.randn(channels, state_dim), torch.randn(channels)
    states = torch.randn(6, channels, state_dim, 1)
    rows = (x, dt, b, c, gate, *constants, torch.tensor([5, 0]), torch.tensor([2, 3]))
    theirs = selective_scan.selective_scan_update.reference
    same_with_states(kernels(isa).selective_scan_update, theirs, rows, states, 7)


@LEVELS
@DTYPES
@pytest.mark.parametrize("groups", [1, 3])
def test_norms_of_groups(isa: str, dtype: torch.dtype, groups: int) -> None:
    """Gates are columns of a wider product; groups need not be whole vectors."""
    for size in (16, 40, 21):
        columns = groups * size
        values, weight = torch.randn(3, columns), (torch.rand(columns) + 0.5).to(dtype)
        gates = (torch.randn(3, columns + 9) * 4).to(dtype)[:, 9:]
        arguments = (values, gates, weight, groups, 1e-5)
        found = kernels(isa).gated_group_rms_norm(*arguments)
        assert_same(found, norm.gated_group_rms_norm.reference(*arguments), 2)


@LEVELS
def test_decays_of_long_memories_are_exact(isa: str) -> None:
    """A state that nothing is added to shows its decay: also steps of 2^-20 and less are not rounded away."""
    steps = torch.linspace(-30.0, 30.0, 61)
    size = len(steps)
    qkv, b, states = torch.ones(1, 2 * size + 16), torch.full((1, 1), -200.0), torch.ones(2, 1, size, 16)
    constants = torch.zeros(1), torch.zeros(size), None
    slots = torch.tensor([0]), torch.tensor([1])
    kernels(isa).kimi_delta_update(qkv, steps[None], b, *constants, states, *slots)
    wide = steps.double()
    # What is lost of the state: of slow decays the state itself tells little.
    expected = -torch.expm1(-torch.nn.functional.softplus(wide, threshold=100))
    lost = 1 - states[1, 0, :, 0].double()
    torch.testing.assert_close(lost, expected, rtol=1e-6, atol=1.2e-7)


def test_rows_of_drafts_follow_one_another() -> None:
    """A row may read what the row before it wrote, as depths of draft tokens do."""
    qkv, gates = torch.randn(3, 2 * 16 + 32), torch.randn(3, 4)
    constants, states = (torch.randn(2), torch.randn(2)), torch.randn(5, 2, 8, 16)
    reads, writes = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])
    own, one_by_one = states.clone(), states.clone()
    update = kernels("auto").gated_delta_update
    found = update(qkv, gates[:, :2], gates[:, 2:], *constants, own, reads, writes)
    for row in range(3):
        at = slice(row, row + 1)
        rows = qkv[at], gates[at, :2], gates[at, 2:]
        assert torch.equal(update(*rows, *constants, one_by_one, reads[at], writes[at]), found[at])
    assert torch.equal(own, one_by_one)


@LEVELS
@DTYPES
def test_gated_norms(isa: str, dtype: torch.dtype) -> None:
    """By SiLU and by sigmoid; gates are columns of a wider product."""
    for size in (16, 40):
        values, weight = torch.randn(3, 2, size).to(dtype), (torch.rand(size) + 0.5).to(dtype)
        gates = (torch.randn(3, 3 * size) * 4).to(dtype)[:, size:]
        for is_sigmoid, theirs in enumerate((norm.gated_rms_norm, norm.sigmoid_gated_rms_norm)):
            found = kernels(isa).gated_norm(bool(is_sigmoid), values, gates, weight, 1e-5)
            assert_same(found, theirs.reference(values, gates, weight, 1e-5), 2)


@LEVELS
@DTYPES
@pytest.mark.parametrize("kind", ["sigmoid", "softplus"])
def test_gates(isa: str, dtype: torch.dtype, kind: Any) -> None:
    """One of each element, of each head, of each row; also where heads are no whole vectors."""
    for size, count in ((64, 64), (60, 60), (64, 4), (60, 3), (100, 1)):
        values, gates = torch.randn(3, size).to(dtype), (torch.randn(3, count + 2) * 8).to(dtype)[:, 2:]
        expected = activation.apply_gate.reference(values.clone(), gates, kind)
        assert_same(kernels(isa).apply_gate(values.clone(), gates, kind), expected, 2)


def test_other_arguments_are_left_to_torch() -> None:
    """Types and sizes that the kernels do not know."""
    found = implementations(_kernels.DenseThreads(1))
    rows = torch.randn(2, 8).half()
    gates = found["apply_gate"].supports
    updates = found["gated_delta_update"].supports
    assert gates is not None
    assert updates is not None
    assert not gates(rows, rows)
    qkv, a, constant = torch.randn(1, 24), torch.randn(1, 1), torch.randn(1)
    assert updates(qkv, a, a, constant, constant, torch.randn(3, 1, 4, 16))
    assert not updates(qkv, a, a, constant, constant, torch.randn(3, 1, 4, 8))
