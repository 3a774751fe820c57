"""Guards which tensors GPUs add without NCCL: small, whole words, of a type and layout the kernel takes."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from gpu_service.parallel.collectives import DEFAULT_BYTES, MAX_BYTES, TorchCollectives, takes_one_shot
from gpu_service.parallel.crossover import SIZES, crossover_bytes
from gpu_service.parallel.nccl import in_effect, set_up


def test_only_what_the_kernel_takes() -> None:
    """One row and 32 rows of bfloat16; not empty, odd, strided, misplaced, large or integer ones."""
    row = torch.zeros(1, 2048, dtype=torch.bfloat16)
    assert takes_one_shot(row)
    assert takes_one_shot(torch.zeros(DEFAULT_BYTES // 4))
    assert not takes_one_shot(torch.zeros(DEFAULT_BYTES // 4 + 4))
    assert not takes_one_shot(row[:, :0])
    assert not takes_one_shot(torch.zeros(3, 3))
    assert not takes_one_shot(torch.zeros(8, 16).t())
    assert not takes_one_shot(torch.zeros(65)[1:])
    assert not takes_one_shot(row.long())
    assert not takes_one_shot(row.half())


@pytest.mark.parametrize(
    ("small_s", "nccl_s", "most"),
    [
        ([1, 2, 3, 4], [5, 5, 5, 5], 8192),
        ([1, 2, 6, 4], [5, 5, 5, 5], 2048),  # noise beyond the first size that is slower does not count
        ([5, 5, 6, 6], [5, 5, 5, 5], 2048),
        ([6, 1, 1, 1], [5, 5, 5, 5], 0),
    ],
)
def test_the_crossover_is_the_last_size_before_nccl_is_faster(
    small_s: list[float], nccl_s: list[float], most: int
) -> None:
    """Sizes of a step and those of a prompt's chunk are on one side each."""
    assert crossover_bytes((1024, 2048, 4096, 8192), small_s, nccl_s) == most


def test_the_memory_holds_all_that_is_measured() -> None:
    """Else the measurement would write behind it."""
    assert max(SIZES) <= MAX_BYTES
    assert list(SIZES) == sorted(SIZES)


@pytest.mark.parametrize("most_bytes", [0, 64, 256])
def test_each_tensor_goes_the_way_that_was_measured(monkeypatch: Any, most_bytes: int) -> None:
    """Up to the crossover the one, above it the other; with 0 nothing goes the first way."""
    ways: list[tuple[str, int]] = []

    class Small:
        """Notes what comes."""

        def __init__(self) -> None:
            self.most_bytes = most_bytes

        def add(self, tensor: torch.Tensor) -> torch.Tensor:
            """Sums nothing."""
            ways.append(("small", tensor.nbytes))
            return tensor

    def all_reduce(tensor: torch.Tensor, group: object) -> None:
        ways.append(("nccl", tensor.nbytes))

    monkeypatch.setattr("gpu_service.parallel.collectives.dist.all_reduce", all_reduce)
    group = TorchCollectives(cast(Any, None), 2, cast(Any, Small()))
    sizes = (64, 256, 512)
    for size in sizes:
        group.all_reduce(torch.zeros(size // 4))
    assert ways == [("small" if size <= most_bytes else "nccl", size) for size in sizes]


def test_nccls_variables_are_set_where_the_user_has_not() -> None:
    """On one host no adapters are looked for, and on the loopback interface no other one; all are listed."""
    environment = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth1"}
    set_up("127.0.0.1", 1, environment)
    found = in_effect(environment)
    assert found == {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth1"}
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    others = {"NCCL_IB_HCA": "mlx5_0"}
    set_up("node0", 2, others)
    assert others == {"NCCL_IB_HCA": "mlx5_0"}
