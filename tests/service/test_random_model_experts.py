"""Guards that expert servers take random checkpoints of every format and compute what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.experts.local_client import LocalExpertClient
from lab.random_model import RandomModelOptions, write_random_model
from lab.random_model.values import FORMATS
from tests.helpers.expert_cluster import compute, random_routing, relative_rms, running_cluster
from tests.tolerances import EXPERTS_BFLOAT16_FEW_ROWS


@pytest.mark.parametrize("weight_format", FORMATS)
def test_servers_compute_like_the_reference(tmp_path: Path, weight_format: str) -> None:
    """Two servers, each with its slice of the random experts, against torch in float32."""
    model = tmp_path / "model"
    write_random_model(model, RandomModelOptions("tiny", weight_format, threads=1))
    # Blocks of 128 weights cannot be divided at this size.
    split: dict[str, Any] = {
        "split_count": 2,
        "expert_split": "expert" if weight_format == "fp8_block" else "tensor",
    }
    with running_cluster(model, tmp_path / "run", calibrate_kernels=False, **split) as cluster:
        client = cluster.client("mailbox")
        reference = LocalExpertClient(str(model), cluster.geometry, torch.bfloat16)
        for layer in (0, 1):
            routing = random_routing(cluster.geometry, 5, seed=layer, dtype=torch.bfloat16)
            found, expected = compute(client, layer, routing), compute(reference, layer, routing)
            assert expected.abs().max() > 0.1
            assert relative_rms(found, expected) < EXPERTS_BFLOAT16_FEW_ROWS
        client.close()
