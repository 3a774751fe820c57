"""Guards that the answer does not depend on who computes it: any split, any transport, the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.experts.client import ExpertClient
from gpu_service.experts.local_client import LocalExpertClient
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.expert_cluster import (
    compute,
    random_routing,
    relative_error,
    relative_rms,
    running_cluster,
)
from tests.tolerances import EXPERTS_BFLOAT16

ROWS = (0, 1, 5, 16, 17, 70)


def reference(model: Path, dtype: torch.dtype = torch.float32) -> LocalExpertClient:
    """Returns the in-process reference."""
    return LocalExpertClient(str(model), read_geometry(model), dtype)


def check_all_layers(
    client: ExpertClient,
    expected: ExpertClient,
    tolerance: float,
    measure: Callable[[torch.Tensor, torch.Tensor], float] = relative_error,
) -> None:
    """Every MoE layer, at row counts around the slot capacity of 16 and above all slots together."""
    dtype = torch.float32
    for layer in client.geometry.moe_layers:
        for rows in ROWS:
            routing = random_routing(client.geometry, rows, seed=layer * 100 + rows, dtype=dtype)
            found, wanted = compute(client, layer, routing), compute(expected, layer, routing)
            assert found.shape == (rows, client.geometry.hidden_size)
            if rows:
                assert measure(found, wanted) < tolerance, (layer, rows)


SPLITS: list[dict[str, Any]] = [
    {"split_count": 1},
    {"split_count": 2},
    {"split_count": 3, "split_shares": (3, 1, 2)},
    {"split_count": 2, "expert_split": "expert", "split_shares": (1, 2)},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("split", SPLITS, ids=["one", "two", "three_unequal", "by_expert"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_any_split_and_transport_equals_the_reference(
    tmp_path: Path, family: Any, split: dict[str, Any]
) -> None:
    """fp32 weights: 1e-5 relative to the reference; mailbox and gRPC give the same bits."""
    model = TinyMoe(family=family).write(tmp_path / "model")
    expected = reference(model)
    with running_cluster(model, tmp_path / "run", **split) as cluster:
        mailbox, remote = cluster.client("mailbox"), cluster.client("grpc")
        check_all_layers(mailbox, expected, 1e-5)
        check_all_layers(remote, expected, 1e-5)
        routing = random_routing(cluster.geometry, 33, seed=9)
        layer = cluster.geometry.moe_layers[-1]
        assert torch.equal(compute(mailbox, layer, routing), compute(remote, layer, routing))
        remote.close()


def test_bfloat16_checkpoint_and_activations_of_16_bits(tmp_path: Path) -> None:
    """bf16 weights stay bf16 (as the checkpoint has them) and agree with fp32 math on them to 2e-3; both
    transports carry rows of any type.
    """
    model = TinyMoe(dtype="BF16").write(tmp_path / "model")
    expected = reference(model, torch.bfloat16)
    with running_cluster(model, tmp_path / "run", split_count=2) as cluster:
        mailbox, remote = cluster.client("mailbox"), cluster.client("grpc")
        check_all_layers(mailbox, expected, EXPERTS_BFLOAT16, relative_rms)
        # No more rows than a mailbox slot holds: cut in parts, experts have fewer and may take other kernels.
        routing = random_routing(cluster.geometry, 16, dtype=torch.bfloat16)
        assert torch.equal(compute(mailbox, 0, routing), compute(remote, 0, routing))
        # Rows in float16 are computed in float32, exactly as the same numbers in float32 are.
        half, *choices = random_routing(cluster.geometry, 16, dtype=torch.float16)
        for client in (mailbox, remote):
            narrow = compute(client, 0, (half, *choices))
            assert torch.equal(narrow, compute(client, 0, (half.float(), *choices)))
        remote.close()


@pytest.mark.parametrize("stored", ["BF16", "F16"])
def test_float32_packing_is_exact(tmp_path: Path, stored: Any) -> None:
    """expert_dtype float32 widens what is stored without loss, so the fp32 tolerance holds."""
    model = TinyMoe(dtype=stored).write(tmp_path / "model")
    with running_cluster(model, tmp_path / "run", dtype="float32", expert_dtype="float32") as cluster:
        check_all_layers(cluster.client("mailbox"), reference(model), 1e-5)


def test_two_layers_in_flight(tmp_path: Path) -> None:
    """Tickets of different layers may overlap; each gets its own rows back."""
    model = TinyMoe().write(tmp_path / "model")
    expected = reference(model)
    with running_cluster(model, tmp_path / "run") as cluster:
        client = cluster.client("mailbox")
        first = random_routing(cluster.geometry, 7, seed=1)
        second = random_routing(cluster.geometry, 50, seed=2)
        tickets = [client.submit(0, *first), client.submit(2, *second)]
        answers = [client.collect(ticket) for ticket in tickets]
        assert relative_error(answers[0], compute(expected, 0, first)) < 1e-5
        assert relative_error(answers[1], compute(expected, 2, second)) < 1e-5


def test_rows_beyond_one_record_go_in_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on gRPC records is no bound on steps: the rows come back in order, two layers in flight."""
    monkeypatch.setattr("gpu_service.experts.grpc_client.MOST_GRPC_ROWS", 16)
    model = TinyMoe().write(tmp_path / "model")
    with running_cluster(model, tmp_path / "run", split_count=2) as cluster:
        client, expected = cluster.client("grpc"), reference(model)
        check_all_layers(client, expected, 1e-5)
        routings = [random_routing(cluster.geometry, rows, seed=rows) for rows in (33, 70)]
        tickets = [client.submit(layer, *routing) for layer, routing in zip((0, 2), routings, strict=True)]
        for layer, routing, ticket in zip((0, 2), routings, tickets, strict=True):
            assert relative_error(client.collect(ticket), compute(expected, layer, routing)) < 1e-5
