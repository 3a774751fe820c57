"""Invariant: a choice without weights answers its input times its weight, and no server computes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.core.parallel import ParallelContext
from gpu_service.layers.decoder import ShortcutLayer
from gpu_service.layers.moe import MoE
from gpu_service.loader.load import load_weights
from gpu_service.models.compose import build_model
from gpu_service.ops.router import zero_experts
from gpu_service.ops.triton.router import zero_experts as triton_zero_experts
from moebius.models.layers import ffn as specs
from moebius.models.read import read_model_config
from tests.helpers.layer_values import composition
from tests.helpers.paged_runner import PagedRunner
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.torch_experts import TorchExperts
from tests.tolerances import OP_FLOAT32

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")


def _choices(tokens: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the choices of 5 experts with weights and 4 without, and a last row that chose none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, 9, generator=generator).argsort(1)[:, :top_k].int().contiguous()
    ids[-1] = -1
    return torch.rand(tokens, top_k, generator=generator), ids


def test_the_answer_is_the_row_times_the_weights_of_such_choices() -> None:
    weights, ids = _choices(6, 4, seed=1)
    rows, chosen = torch.randn(6, 10), ids.clone()
    answer = zero_experts.reference(rows, weights, ids, 5)
    for row in range(6):
        total = sum(float(weights[row, k]) for k in range(4) if chosen[row, k] >= 5)
        torch.testing.assert_close(answer[row], rows[row] * total)
        kept = [-1 if expert >= 5 else expert for expert in chosen[row].tolist()]
        assert ids[row].tolist() == kept


@interpreted
@settings(deadline=None)
@given(
    tokens=st.integers(1, 5),
    top_k=st.integers(1, 9),
    size=st.sampled_from([1, 7, 64, 1500]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_kernel_is_the_reference(
    tokens: int, top_k: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    """The kernel agrees also for rows that lie in a wider matrix, and for more than one block."""
    weights, ids = _choices(tokens, top_k, seed)
    rows = torch.randn(tokens, size + 3, dtype=dtype)[:, 3:]
    wanted_ids, found_ids = ids.clone(), ids.clone()
    wanted = zero_experts.reference(rows, weights, wanted_ids, 5)
    found = triton_zero_experts(rows, weights, found_ids, 5)
    assert torch.equal(found_ids, wanted_ids)
    torch.testing.assert_close(found, wanted, rtol=0, atol=16 * OP_FLOAT32)


class Watched(TorchExperts):
    """Writes down what it is asked, and when."""

    def __init__(self, directory: Path, events: list[str]) -> None:
        super().__init__(directory)
        self.events = events
        self.ids: list[torch.Tensor] = []

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        self.events.append(f"submit {layer}")
        self.ids.append(topk_ids.clone())
        return super().submit(layer, hidden_states, topk_ids, topk_weights)

    def collect(self, ticket: torch.Tensor, partial: torch.Tensor | None = None) -> torch.Tensor:
        self.events.append("collect")
        return super().collect(ticket, partial)


class OwnRows:
    """The client of a rank, which brings its own rows from servers."""

    call_log = None

    def __init__(self, experts: TorchExperts, rows: slice) -> None:
        self._experts, self._rows = experts, rows

    def submit(self, *asked: Any) -> torch.Tensor:
        answer = torch.zeros_like(found := self._experts.submit(*asked))
        answer[self._rows] = found[self._rows]
        return answer

    def collect(self, ticket: torch.Tensor, partial: torch.Tensor | None = None) -> torch.Tensor:
        return self._experts.collect(ticket, partial)


def _context(experts: Any) -> Any:
    inputs = SimpleNamespace(valid_rows=None)
    absent = dict.fromkeys(("recorder", "resident", "streamed", "samples", "deferral"))
    return SimpleNamespace(inputs=inputs, experts=experts, **absent)


@pytest.fixture
def longcat(tmp_path: Path) -> tuple[PagedRunner, list[str], Watched]:
    """Returns a tiny model that says when its halves are computed, and what its client is asked."""
    make_tiny_model("longcat_flash", tmp_path)
    config = read_model_config(tmp_path)
    model = build_model(config)
    load_weights(model, tmp_path)
    events: list[str] = []
    client = Watched(tmp_path, events)

    def say(what: str) -> Any:
        return lambda *_: events.append(what)

    for module in model.modules():
        if isinstance(module, ShortcutLayer):
            for half in range(2):
                module.self_attn[half].register_forward_hook(say(f"attention {half}"))
                module.mlps[half].register_forward_hook(say(f"mlp {half}"))
    return PagedRunner(model, client), events, client


def test_servers_compute_while_the_rest_of_the_layer_does(
    longcat: tuple[PagedRunner, list[str], Watched],
) -> None:
    """They are asked after the first attention, and their answer is wanted at the layer's end."""
    runner, events, _ = longcat
    runner.prefill([3, 5, 9, 2])
    first = ["attention 0", "submit 0", "mlp 0", "attention 1", "mlp 1", "collect"]
    second = ["attention 0", "submit 1", "mlp 0", "attention 1", "mlp 1", "collect"]
    assert events == first + second


def test_servers_are_never_given_a_choice_without_weights(
    longcat: tuple[PagedRunner, list[str], Watched],
) -> None:
    """Most rows of the tests' models make some, so that the others would notice nothing of their loss."""
    runner, _, client = longcat
    blocks = [module for module in runner.model.modules() if isinstance(module, MoE)]
    asked: list[torch.Tensor] = []
    for block in blocks:
        block.gate.register_forward_hook(lambda module, given, found: asked.append(found[1].clone()))
    runner.prefill(list(range(20)))
    assert len(asked) == len(client.ids) == 2
    for before, after in zip(asked, client.ids, strict=True):
        assert torch.equal(after, torch.where(before < 7, before, -1))
        assert (before >= 7).any()
        assert (before < 7).any()


def test_ranks_count_them_once(tmp_path: Path) -> None:
    """Answers of two ranks are added; here each brings half of the rows from servers."""
    make_tiny_model("longcat_flash", tmp_path)
    config = read_model_config(tmp_path)
    model = build_model(config)
    load_weights(model, tmp_path)
    whole = next(module for module in model.modules() if isinstance(module, MoE))
    rows, size, experts = torch.randn(6, config.hidden_size), config.hidden_size, TorchExperts(tmp_path)
    answers = []
    for rank in range(2):
        parallel = ParallelContext(tp_rank=rank, tp_size=2)
        value = config.layers[0].ffn
        assert isinstance(value, specs.MoE)
        block = MoE(value, 0, composition(size, parallel=parallel))
        block.load_state_dict(whole.state_dict(), assign=True)
        answers.append(block(rows, _context(OwnRows(experts, slice(3 * rank, 3 * rank + 3)))))
    torch.testing.assert_close(answers[0] + answers[1], whole(rows, _context(experts)))
