"""Invariant: `expert_checkpoint` gives routed experts, MODEL all else, in whatever formats both are stored.

As KTransformers' users keep them: dense layers of the published fp8 checkpoint, experts of GGUF files or of
another quantisation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.commands.models import check_files
from app.planning.memory import packed_expert, stored_experts
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.experts.resident.make import make_resident_experts
from gpu_service.experts.streaming.make import read_parts
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import is_routed_expert
from moebius.config import ModelConfigSection, MoebiusConfig, PlacementConfig
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.expert_cluster import compute, random_routing, running_cluster
from tests.helpers.gguf_models import GgufFile, cached_gguf_files
from tests.helpers.gguf_models import reference_logits as gguf_logits
from tests.helpers.model_formats import MODEL_FORMATS
from tests.helpers.paged_runner import load_runner
from tests.helpers.quantised_checkpoints import QuantisedMoe
from tests.helpers.quantised_models import PROMPT, quantise, reference_logits, write_plain, write_quantised
from tests.tolerances import EXPERTS_FLOAT32, EXPERTS_SUMMED_APART, LOGITS_FLOAT32_VS_TRANSFORMERS


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufFile]:
    return cached_gguf_files(tmp_path_factory.mktemp("gguf"))


def logits_of(model: Path, experts: Path, prompt: list[int]) -> torch.Tensor:
    client = LocalExpertClient(
        str(model), read_geometry(model), torch.float32, expert_checkpoint=str(experts)
    )
    _, logits = load_runner(model, experts=client).prefill(prompt)
    return logits


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_fp8_linears_and_int4_experts_of_another_directory(name: str, tmp_path: Path) -> None:
    """MODEL's own experts, which mean something else, are left aside."""
    plain = write_plain(name, tmp_path / "plain")
    dense, experts = MODEL_FORMATS["fp8_block"], MODEL_FORMATS["compressed_int4_g32"]
    quantise(plain, lambda _: dense, dense.config).write(tmp_path / "model")
    quantise(plain, lambda _: experts, experts.config).write(tmp_path / "experts")
    reference = write_quantised(
        plain,
        tmp_path / "mixed",
        lambda matrix: experts if ".experts." in matrix else dense,
        experts.config,
    )
    found = logits_of(tmp_path / "model", tmp_path / "experts", PROMPT)
    torch.testing.assert_close(
        found, reference_logits(reference), rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"])
def test_experts_of_a_gguf_model(name: str, gguf: Callable[[str], GgufFile], tmp_path: Path) -> None:
    """A directory of which only what is no routed expert was kept, next to the GGUF file's experts."""
    file = gguf(name)
    file.reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not is_routed_expert(key)}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors")
    found = logits_of(tmp_path, file.path, PROMPT)
    expected = gguf_logits(file.reference, PROMPT)
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Returns a model of fp8 experts, and other ones of int4."""
    model = QuantisedMoe("fp8_channel").write(tmp_path / "model")
    return model, QuantisedMoe("compressed_int4_g32").write(tmp_path / "experts")


def configuration(model: Path, experts: Path, **placement: Any) -> MoebiusConfig:
    section = ModelConfigSection(model=str(model), expert_checkpoint=str(experts))
    return MoebiusConfig(model=section, placement=PlacementConfig(**placement))


def test_expert_servers_residents_and_planner_read_the_same(tmp_path: Path) -> None:
    """Processes with a mailbox whose fingerprints have to fit, experts on the device, what is streamed."""
    model, experts = pair(tmp_path)
    geometry = read_geometry(model)
    wanted_of = LocalExpertClient(str(experts), geometry, torch.float32)
    routing = random_routing(geometry, 5)
    wanted = compute(wanted_of, 0, routing)
    with running_cluster(
        model, tmp_path / "run", dtype="float32", expert_checkpoint=experts, split_count=2
    ) as cluster:
        found = compute(cluster.client("mailbox"), 0, routing)
    assert (found - wanted).abs().max() / wanted.abs().max() < EXPERTS_FLOAT32
    config = configuration(model, experts, gpu_experts_ratio=1.0)
    resident = make_resident_experts(config, geometry, torch.device("cpu"), torch.float32)
    assert resident is not None
    on_device = resident.forward(0, *routing, torch.zeros_like(wanted))
    assert (on_device - wanted).abs().max() / wanted.abs().max() < EXPERTS_SUMMED_APART
    planned = stored_experts(model, geometry, str(experts))
    assert {layer.gate_up for layer in planned.values()} == {"int4_g32"}
    (part,) = read_parts(configuration(model, experts), geometry, [0])[0]
    assert part.kind.layout == packed_expert(planned[0], geometry.hidden_size, 160, "keep")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_intermediate_size": 64}, "moe_intermediate_size is 64; allowed: 160, as the model has it"),
        ({"num_experts": 8}, "num_experts is 8; allowed: 3"),
        ({"mlp_only_layers": [1]}, r"no experts in layers \[1\] of the model"),
    ],
)
def test_experts_of_another_model_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, experts = pair(tmp_path)
    settings = json.loads((experts / "config.json").read_text())
    (experts / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(CheckpointError, match=f"expert_checkpoint .*experts: {message}"):
        # What `moebius serve` does before it starts a process.
        check_files(configuration(model, experts))


def test_converted_experts_are_refused_by_name(tmp_path: Path) -> None:
    """What KTransformers' converters write is made for one processor and number of sockets."""
    model, experts = pair(tmp_path)
    name = "blk.0.ffn_up_exps.0.numa.0.weight"
    write_safetensors(experts / "model.safetensors", {name: np.zeros(4, np.uint8)})
    with pytest.raises(CheckpointError, match=f"{name}.*KTransformers.*allowed: the published checkpoint"):
        stored_experts(model, read_geometry(model), str(experts))
