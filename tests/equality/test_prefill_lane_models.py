"""Guards the prefill lane on real models: layers of two steps launched in turn share nothing that they write.

On the host's null stream every launch has ended when it returns, so the main lane's whole steps run between
two layers of the lane's: whatever a layer leaves for the next one outside of its step would be another's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.attention.registry import make_attention
from gpu_service.core.request import Request, SamplingParams
from gpu_service.device.stream import HostDeviceStream
from gpu_service.engine.prefill_lane import PrefillLane
from gpu_service.models.common import CausalLM
from moebius.models.read import read_geometry
from tests.helpers.device_experts import DenseExperts
from tests.helpers.tiny_engine import Setup, tiny_engine, tiny_model
from tests.helpers.tiny_models import make_tiny_model

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.2},
]


def requests() -> list[Request]:
    """Returns long and short prompts; the last shares the first one's beginning."""
    shared = [3 + (k * k * 7 + k) % 200 for k in range(60)]
    prompts = [[3 + (i * 37 + k * 5) % 200 for k in range(n)] for i, n in enumerate((7, 50, 70, 20, 3))]
    return [
        Request(f"r{i}", prompt, SamplingParams(max_tokens=10, seed=i, ignore_eos=True, **PARAMS[i % 2]))
        for i, prompt in enumerate([shared, *prompts, shared[:40]])
    ]


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "deepseek_v32", "glm_moe_dsa"])
def test_a_lane_does_not_show(
    name: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values, latents with an indexer, states and snapshots of linear attention: the tokens
    are those without a lane, with both lanes' layers interleaved one by one.
    """
    make_tiny_model(name, tmp_path)
    device = torch.device("cpu")
    model, geometry = tiny_model(tmp_path, device), read_geometry(tmp_path)
    interleaved = [0]
    monkeypatch.setattr("gpu_service.engine.prefill_lane._TURN_S", 0.0)
    original = PrefillLane._turn

    def turn(lane: PrefillLane) -> bool:
        did_something = original(lane)
        interleaved[0] += did_something
        return did_something

    monkeypatch.setattr(PrefillLane, "_turn", turn)
    answers = []
    for chunk in (0, 48):
        setup = Setup(overlap=overlap, num_pages=80, budget=16, prefill_chunk_max=chunk)
        experts = DenseExperts(tmp_path, geometry.num_experts)
        with tiny_engine(model, experts, HostDeviceStream(), _attention(model), setup) as engine:
            answers.append(engine.run(requests()))
    assert answers[0] == answers[1]
    assert interleaved[0] > 4, "the scenario must interleave"


def _attention(model: CausalLM) -> Any:
    return lambda config, cache: make_attention(model.rank_layers, cache, cache.device, "torch")
