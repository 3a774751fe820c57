"""The demo model's experts reached by the doorbell kernels (on the host) are the same experts, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_service.experts.client import ExpertClient
from moebius.mailbox import Mailbox
from tests.helpers.demo import WINDOW_TOKENS, prose_ids
from tests.helpers.demo_engine import demo_model, prefill_logits
from tests.helpers.demo_servers import Fleet, running_fleet
from tests.helpers.doorbell_host import doorbell_client

pytestmark = pytest.mark.demo

TOP_K = 16
WINDOW = WINDOW_TOKENS // 4


def logits_of(client: ExpertClient) -> torch.Tensor:
    """Returns logits [T, V] of a text window with all experts chosen; the prompt takes several slots."""
    return prefill_logits(demo_model(top_k=TOP_K), client, prose_ids()[:WINDOW])


def test_doorbell_kernels_and_grpc_give_the_same_bits(tmp_path: Path) -> None:
    """Real expert processes, both halves of every expert, through every layer of the model."""
    with running_fleet(Fleet("tensor", (1, 1)), tmp_path, TOP_K) as running:
        mailbox = Mailbox.attach(running.config.experts.mailbox, 5)
        with doorbell_client(mailbox, running.geometry, deadline_ms=60_000) as (client, _):
            client.wait_ready(120)
            client.begin_step()
            by_doorbell = logits_of(client)
            assert client.failure() is None
            assert client.stats().calls >= len(running.geometry.moe_layers)
        with running.client("grpc") as remote:
            assert torch.equal(by_doorbell, logits_of(remote))
