"""However the experts are divided and reached, the demo model is the same model.

Real `moebius expert` processes with one, two and three unequal shares, divided by channels or by experts,
over mailbox and gRPC, against the in-process reference and against transformers' values of the original.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_service.experts.client import ExpertClient
from gpu_service.experts.factory import make_expert_client
from moebius.models.read import read_geometry
from tests.helpers.demo import WINDOW_TOKENS, golden, golden_answers, prose_ids
from tests.helpers.demo_engine import SERVING, demo_model, greedy_request, prefill_logits
from tests.helpers.demo_reference import perplexity_of_logits
from tests.helpers.demo_servers import Fleet, RunningFleet, demo_config, running_fleet, with_experts
from tests.helpers.engine_harness import running_engine

pytestmark = pytest.mark.demo

TOP_K = 16
# See test_demo_perplexity.
DENSE_TOLERANCE = 1.5e-3
SAME_WEIGHTS_TOLERANCE = 1e-5
# Logits up to 32 after 30 layers of fp32 sums in another order; measured 1e-4.
LOGITS_TOLERANCE = 5e-4

FLEETS = [
    # Servers alone and in equal parts are in other tests too.
    pytest.param(Fleet("tensor", (1,)), marks=pytest.mark.full),
    pytest.param(Fleet("tensor", (1, 1)), marks=pytest.mark.full),
    Fleet("tensor", (1, 2, 1)),
    Fleet("expert", (5, 2, 1)),
]


def logits_of(client: ExpertClient) -> torch.Tensor:
    """Returns logits [T, V] of the text window with all experts chosen."""
    return prefill_logits(demo_model(top_k=TOP_K), client, prose_ids()[:WINDOW_TOKENS])


def check_perplexity(logits: torch.Tensor) -> None:
    """The window's perplexity is the dense original's."""
    found = perplexity_of_logits(logits, prose_ids()[:WINDOW_TOKENS])
    assert found == pytest.approx(golden()["dense"]["window"], rel=DENSE_TOLERANCE)
    assert found == pytest.approx(golden()["top_16"]["window"], rel=SAME_WEIGHTS_TOLERANCE)


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    """Returns logits with the in-process reference client."""
    config = with_experts(demo_config(TOP_K), expert_transport="local")
    client = make_expert_client(config, read_geometry(config.model.model, TOP_K))
    return logits_of(client)


def test_in_process_reference_equals_the_dense_original(reference: torch.Tensor) -> None:
    """The reference that the servers are compared with is itself right."""
    check_perplexity(reference)


@pytest.mark.parametrize("fleet", FLEETS, ids=str)
def test_every_division_and_transport(fleet: Fleet, reference: torch.Tensor, tmp_path: Path) -> None:
    """Mailbox and gRPC give the same bits and the dense perplexity; the prompt takes several slots."""
    with running_fleet(fleet, tmp_path, TOP_K) as running:
        by_mailbox, by_grpc = both_transports(running)
    assert torch.equal(by_mailbox, by_grpc)
    torch.testing.assert_close(by_mailbox, reference, atol=LOGITS_TOLERANCE, rtol=0)
    check_perplexity(by_mailbox)


def both_transports(running: RunningFleet) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits over shared memory, and over gRPC from the same servers."""
    with running.client("mailbox") as client:
        by_mailbox = logits_of(client)
    with running.client("grpc") as client:
        return by_mailbox, logits_of(client)


def test_greedy_answers_over_two_servers(tmp_path: Path) -> None:
    """Engine, mailbox and two server processes together: the beginnings of transformers' answers, token for
    token. Their ends are among the tests of test_demo_greedy.py.
    """
    answers = golden_answers(1.0)
    requests = [greedy_request(str(number), answer, 20) for number, answer in enumerate(answers)]
    with (
        running_fleet(Fleet("tensor", (1, 1)), tmp_path) as running,
        running.client("mailbox") as client,
        running_engine(SERVING, model=demo_model(), experts=client) as harness,
    ):
        harness.may_fail = False
        found = harness.run(requests, together=True)
    assert found == [answer.output_ids[:20] for answer in answers]
