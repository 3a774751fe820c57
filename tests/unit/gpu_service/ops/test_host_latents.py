"""Invariant: the CPU's kernels of latent attention are their formulas in float64, at every instruction-set
level, and a row's bits depend on no other row.
"""

from __future__ import annotations

import pytest
import torch

from gpu_service.ops import latent
from gpu_service.ops.host_kernels import MOST_HEAD_ROWS, HostKernels, implementations
from gpu_service.ops.rope import apply_rope, rope_table
from moebius import _kernels
from moebius.kernels import supported_isas

# Higher levels add products of matrices only.
OWN = ("scalar", "avx2", "avx512")
LEVELS = pytest.mark.parametrize("isa", [isa for isa in supported_isas() if isa in OWN])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# One rounding of sums about as large as 4.
ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}


@LEVELS
@DTYPES
def test_products_of_heads(isa: str, dtype: torch.dtype) -> None:
    """Sizes with whole pieces, parts of one and single outputs; rows and matrices lie apart."""
    own = HostKernels(_kernels.DenseThreads(3, isa))
    for heads, nope, value, size in ((3, 10, 7, 48), (2, 128, 130, 272), (5, 1, 4, 16)):
        weight = (torch.randn(heads, nope + value, size) * size**-0.5).to(dtype)
        keys, values = weight[:, :nope], weight[:, nope:]
        query = torch.randn(17, heads, nope + 6).to(dtype)[..., :nope]
        attended = torch.randn(17, heads, size + 2).to(dtype)[..., :size]
        absorbed, projected = own.absorb_query(query, keys), own.project_values(attended, values)
        expected = torch.einsum("thd,hdc->thc", query.double(), keys.double())
        torch.testing.assert_close(absorbed.double(), expected, rtol=1e-2, atol=ALLOWED[dtype])
        expected = torch.einsum("thc,hvc->thv", attended.double(), values.double())
        torch.testing.assert_close(projected.double(), expected, rtol=1e-2, atol=ALLOWED[dtype])
        for rows in (slice(0, 1), slice(3, 6), slice(2, 9)):
            assert torch.equal(own.absorb_query(query[rows], keys), absorbed[rows])
            assert torch.equal(own.project_values(attended[rows], values), projected[rows])


def test_what_the_products_do_not_know_is_left_to_the_reference() -> None:
    """More rows than are read together, latents that fill no vector, and other types."""
    found = implementations(_kernels.DenseThreads(1))
    query, weight = torch.randn(4, 2, 6), torch.randn(2, 6, 32)
    for op in (latent.absorb_query, latent.project_values):
        supports = found[op.name].supports
        assert supports is not None
        assert supports(query, weight)
        assert not supports(torch.randn(MOST_HEAD_ROWS + 1, 2, 6), weight)
        assert not supports(query, weight[..., :24].contiguous())
        assert not supports(query, weight.bfloat16())
        assert not supports(query.half(), weight.half())


def naive(query: torch.Tensor, tokens: torch.Tensor, latent_dim: int, sinks: torch.Tensor) -> torch.Tensor:
    """Returns attention of `[H, latent + rope]` to `[K, latent + rope]` in float64."""
    keys = tokens.double()
    scores = torch.cat((query.double() @ keys.T * 0.3, sinks.double()[:, None]), dim=1)
    return scores.softmax(1)[:, :-1] @ keys[:, :latent_dim]


@LEVELS
@DTYPES
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("heads", "latent_dim", "rope_dim"), [(3, 32, 16), (9, 144, 16), (20, 64, 48)])
def test_attention(
    isa: str, dtype: torch.dtype, page_size: int, heads: int, latent_dim: int, rope_dim: int
) -> None:
    """Lengths around blocks and parts, also where parts grow with the length; heads in groups that are
    full and not; queries' rotated parts among others.
    """
    own = _kernels.DenseThreads(3, isa)
    lengths = (1, 64, 65, 257, 513, 4097)
    count = -(-max(lengths) // page_size)
    pages = (torch.randn(2 * count + 1, page_size, latent_dim + rope_dim) * 0.5).to(dtype)
    table = (torch.randperm(2 * count).view(2, count) + 1).int()
    requests = torch.tensor([row % 2 for row in range(len(lengths))], dtype=torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32)
    query = torch.randn(len(lengths), heads, latent_dim).to(dtype)
    rotated = torch.randn(len(lengths), heads, rope_dim + 10).to(dtype)[..., 10:]
    sinks = torch.randn(heads)

    def attend(first: int, rows: int) -> torch.Tensor:
        output = torch.empty_like(query[:rows])
        own.attend_latents(
            *(dtype == torch.bfloat16, query[first].data_ptr(), rotated[first].data_ptr()),
            *(rotated.stride(0), rotated.stride(1), pages.data_ptr(), page_size, table.data_ptr(), count),
            *(requests[first:].data_ptr(), ends[first:].data_ptr(), sinks.data_ptr(), output.data_ptr()),
            *(0.3, rows, heads, latent_dim, rope_dim),
        )
        return output

    output = attend(0, len(lengths))
    for row, length in enumerate(lengths):
        tokens = pages[table[requests[row]].long()].flatten(0, 1)[:length]
        expected = naive(torch.cat((query[row], rotated[row]), dim=1), tokens, latent_dim, sinks)
        torch.testing.assert_close(output[row].double(), expected, rtol=1e-2, atol=ALLOWED[dtype])
        assert torch.equal(attend(row, 1)[0], output[row])


@LEVELS
@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_the_ends_of_heads(isa: str, dtype: torch.dtype, interleaved: bool) -> None:
    """What of a head lies before the part that is rotated stays as it is."""
    table = rope_table.reference(torch.arange(3, 8), torch.rand(8), dtype, interleaved)
    ours = torch.randn(5, 3, 26).to(dtype)
    theirs, before = ours.clone(), ours.clone()
    kernels = HostKernels(_kernels.DenseThreads(2, isa))
    kernels.apply_rope(ours[..., 10:], table)
    apply_rope.reference(theirs[..., 10:], table)
    allowed = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed)
    assert torch.equal(ours[..., :10], before[..., :10])
