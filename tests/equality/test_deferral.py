"""Guards `defer_experts`: answers follow the rule, however an engine schedules and wherever experts are.

The reference is transformers with a dense computation of all experts in place of each MoE layer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.layers.deferral import deferral_rule, late_choices
from gpu_service.models.common import CausalLM
from moebius.config import ExpertConfig, MoebiusConfig, ParallelConfig, PlacementConfig
from moebius.errors import UserError
from moebius.models.read import read_model_config
from tests.equality import test_mtp_drafts
from tests.equality.test_doorbell_graphs import client_of, run
from tests.equality.test_engine_real_model import config_for, engine_tokens, prompts
from tests.helpers.deferred_reference import defer_in
from tests.helpers.expert_cluster import running_cluster
from tests.helpers.mtp_models import cached_mtp_models
from tests.helpers.paged_runner import load_runner
from tests.helpers.rank_group import rank_config, run_group
from tests.helpers.rank_models import MODELS as RANK_MODELS
from tests.helpers.tiny_engine import Setup, tiny_model
from tests.helpers.tiny_models import make_tiny_model, write_tiny_model
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

MODELS = ["qwen3_moe", "glm4_moe"]
TOKENS = 24


def deferring(config: MoebiusConfig, count: int, **experts: Any) -> MoebiusConfig:
    """Returns the configuration with late experts."""
    changed = {"defer_experts": count} | experts
    return config.model_copy(update={"experts": config.experts.model_copy(update=changed)})


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Returns a model with all layers MoE, and with a dense first layer and shared experts; the directory and
    transformers'.
    """
    directory = tmp_path_factory.mktemp("deferral") / request.param
    return directory, make_tiny_model(request.param, directory)


@pytest.fixture(scope="module")
def wanted(model: tuple[Path, Any]) -> tuple[Path, list[list[int]]]:
    """Returns greedy tokens of the reference with two late experts."""
    directory, reference = model
    defer_in(reference, 2)
    found = []
    for prompt in prompts(reference.config.vocab_size):
        with torch.inference_mode():
            output = reference.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS
            )
        found.append(output[0, len(prompt) :].tolist())
    return directory, found


@pytest.mark.parametrize("count", [1, 2])
def test_logits_follow_the_rule(tmp_path: Path, count: int) -> None:
    """Logits follow the rule in one step and in chunks; without the rule, and with another number, they
    differ.
    """
    reference = make_tiny_model("qwen3_moe", tmp_path)
    tokens = prompts(reference.config.vocab_size)[1]
    defer_in(reference, count)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    runner = load_runner(tmp_path)
    config = config_for(tmp_path)
    rule = deferral_rule(deferring(config, count), runner.model.config)
    assert rule is not None
    assert rule.layers == {0, 1}
    for chunk in (None, 7):
        runner.model.model.deferral = rule
        torch.testing.assert_close(runner.prefill(tokens, chunk)[1], expected, rtol=1e-4, atol=1e-4)
    for other in (0, 3 - count):
        runner.model.model.deferral = deferral_rule(deferring(config, other), runner.model.config)
        assert (runner.prefill(tokens)[1] - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    "gpu",
    [{"overlap_scheduling": False}, {"max_num_batched_tokens": 16, "num_pages": 20}],
    ids=["together", "chunked-preempted"],
)
def test_tokens_are_those_of_the_reference(wanted: tuple[Path, list[list[int]]], gpu: dict[str, Any]) -> None:
    """Batches of several requests, chunks of prompts and preemption: each token has the rule of its own."""
    directory, expected = wanted
    assert engine_tokens(deferring(config_for(directory, **gpu), 2), prompts(211)) == expected


@pytest.mark.parametrize(
    "placement",
    [{"gpu_experts": 3}, {"gpu_layers": "2"}, {"gpu_experts_ratio": 0.5}, {"gpu_experts_ratio": 1.0}],
    ids=lambda placement: "-".join(map(str, placement.values())),
)
def test_tokens_do_not_depend_on_the_placement(
    wanted: tuple[Path, list[list[int]]], placement: dict[str, Any]
) -> None:
    """What is resident is computed at once and added as late as what servers answer."""
    directory, expected = wanted
    config = deferring(config_for(directory), 2)
    config = config.model_copy(update={"placement": PlacementConfig(**placement)})
    assert engine_tokens(config, prompts(211)) == expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("transport", ["mailbox", "grpc"])
def test_servers_answer_late_parts(
    wanted: tuple[Path, list[list[int]]], tmp_path: Path, transport: str
) -> None:
    """Real servers, with prompts of more rows than all slots of the mailbox hold together."""
    directory, expected = wanted
    placement = PlacementConfig(gpu_experts=2)
    options: dict[str, Any] = {"mailbox_slots": 3, "mailbox_rows": 4}
    with running_cluster(
        directory, tmp_path, dtype="float32", placement=placement, split_count=2, **options
    ) as cluster:
        config = config_for(directory).model_copy(
            update={"experts": cluster.config.experts, "placement": placement}
        )
        config = deferring(config, 2, expert_transport=transport)
        assert engine_tokens(config, prompts(211)) == expected


@pytest.fixture(scope="module")
def doorbell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A model with a rule, and two servers whose slots hold fewer rows than its prompts have."""
    directory = tmp_path_factory.mktemp("deferral_graphs")
    make_tiny_model("qwen3_moe", directory / "model")
    options: dict[str, Any] = {"split_count": 2, "mailbox_deadline_ms": 20000, "mailbox_rows": 4}
    with running_cluster(directory / "model", directory, dtype="float32", **options) as cluster:
        found = tiny_model(directory / "model", torch.device("cpu"))
        found.model.deferral = deferral_rule(deferring(config_for(directory), 2), found.config)
        yield found, cluster


def test_captured_steps_defer_like_eager_ones(doorbell: tuple[Any, Any], tmp_path: Path) -> None:
    """Doorbell kernels in replayed graphs, eager ones, and the experts in this process: the same tokens."""
    model, cluster = doorbell
    with client_of(cluster) as client:
        eager = run(model, client, Setup())
        assert run(model, client, Setup(largest_graph=4)) == eager
    local = LocalExpertClient(cluster.config.model.model, cluster.geometry, torch.float32)
    assert run(model, local, Setup()) == eager  # type: ignore[arg-type]
    rule, model.model.deferral = model.model.deferral, None
    assert run(model, local, Setup()) != eager  # type: ignore[arg-type]
    model.model.deferral = rule


def test_a_lost_server_does_not_show(doorbell: tuple[Any, Any]) -> None:
    """A step with a late part under way is run again as a whole, in graphs too."""
    model, cluster = doorbell
    with client_of(cluster) as client:
        expected = run(model, client, Setup(largest_graph=4))
    with client_of(cluster) as client:
        cluster.replace_at_step(18, 0, client)
        assert run(model, client, Setup(largest_graph=4)) == expected
        assert client.stats().recoveries == 1


def test_ranks_do_not_show(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, each with its rows of servers' answers and its channels of residents."""
    write_tiny_model(RANK_MODELS["glm4_shared"], tmp_path, seed=11)
    write_tokenizer(tmp_path, byte_level_tokenizer(300))
    alone, plain = (run_group(deferring(rank_config(tmp_path, 1, 1), count)) for count in (1, 0))
    divided = run_group(deferring(rank_config(tmp_path, 2, 1, gpu_experts_ratio=0.5), 1))
    found, expected, without = (
        {case: [outcome.token_ids for outcome in outcomes] for case, outcomes in run.items()}
        for run in (divided, alone, plain)
    )
    assert found == expected
    assert found != without


def test_drafts_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of multi-token prediction have no late part, and steps that verify drafts have the model's."""
    directory, _ = cached_mtp_models(tmp_path)("glm4_moe", 1)
    rules = []

    def made(*arguments: Any, **options: Any) -> CausalLM:
        found = tiny_model(*arguments, **options)
        found.model.deferral = deferral_rule(deferring(config_for(directory), 2), found.config)
        rules.append(found.model.deferral)
        return found

    plain, _, _ = test_mtp_drafts.run(directory, 0, 0, test_mtp_drafts.GREEDY)
    monkeypatch.setattr(test_mtp_drafts, "tiny_model", made)
    expected, _, _ = test_mtp_drafts.run(directory, 0, 0, test_mtp_drafts.GREEDY)
    tokens, drafters, _ = test_mtp_drafts.run(directory, 1, 2, test_mtp_drafts.GREEDY)
    assert tokens == expected != plain
    assert len(drafters[0].noted) > 8
    assert rules[0] == rules[1]


def test_the_lowest_weights_are_late() -> None:
    """Experts are late by weight, whatever the order of a router's list; equal weights go by id; rows of
    padding have none.
    """
    ids = torch.tensor([[5, 1, 3], [3, 5, 1], [-1, -1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.0, 0.0, 0.0]])
    assert late_choices(ids, weights, 1).tolist() == [[False, True, False], [False, False, True], [False] * 3]
    assert late_choices(ids, weights, 2).tolist() == [[False, True, True], [True, False, True], [False] * 3]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_moe", {"defer_experts": 3}, "3 is not allowed: .* chooses 3 experts .*; allowed: 0 to 2"),
        ("qwen3_moe", {"defer_experts": 1, "mailbox_slots": 2}, "with mailbox_slots 2: .* mailbox_slots 3"),
        ("longcat_flash", {"defer_experts": 1}, "router does not choose among experts with weights alone"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    """A setting that cannot work is refused in one line that says what is allowed."""
    make_tiny_model(name, tmp_path)
    config = MoebiusConfig(experts=ExpertConfig(**changes))
    with pytest.raises(UserError, match=f"defer_experts: .*{message}"):
        deferral_rule(config, read_model_config(tmp_path))


def test_stages_are_refused(tmp_path: Path) -> None:
    """A late answer would have to reach another process."""
    make_tiny_model("qwen3_moe", tmp_path)
    config = deferring(config_for(tmp_path), 1)
    config = config.model_copy(update={"parallel": ParallelConfig(pipeline_parallel_size=2)})
    with pytest.raises(UserError, match="is not supported with pipeline_parallel_size 2"):
        deferral_rule(config, read_model_config(tmp_path))
