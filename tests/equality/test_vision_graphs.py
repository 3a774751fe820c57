"""Guards image prompts on the device's runner: a replayed decode step gives the tokens of the eager one.

After an image positions are not indices: graphs read them from the step's inputs. A step with image tokens
is never replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.core.images import place_images
from gpu_service.core.request import Request, SamplingParams
from gpu_service.core.step import StepPlan
from gpu_service.device.stream import HostDeviceStream
from gpu_service.engine.decode_graphs import DecodeGraph, DecodeGraphs
from gpu_service.loader.load import load_tower
from gpu_service.models.common import CausalLM
from gpu_service.models.vision.registry import build_tower
from gpu_service.vision.features import ImageEncoder
from gpu_service.vision.processor import ImagePreparer
from tests.helpers.capturable_attention import CapturableAttention
from tests.helpers.device_experts import DenseExperts
from tests.helpers.host_graphs import RecordedOperations
from tests.helpers.tiny_engine import Setup, tiny_engine, tiny_model
from tests.helpers.tiny_vision_models import IMAGE_TOKEN, noise, write_vision_model

HOST = torch.device("cpu")
# Of 10 and 16 tokens.
FILES = [noise(1, 40, 16), noise(2, 32, 32)]
PROMPTS: list[tuple[list[int], list[bytes]]] = [
    ([5, IMAGE_TOKEN, 17, 8], FILES[:1]),
    # The last token of the prompt is an image's.
    ([3, 99, IMAGE_TOKEN, 8, IMAGE_TOKEN], FILES),
    ([11, 12, 13], []),
]


@dataclass
class Tiny:
    """A model with vision, and its experts."""

    directory: Path
    model: CausalLM
    experts: DenseExperts

    def requests(self) -> list[Request]:
        """Greedy, of different lengths."""
        preparer = ImagePreparer(self.model.config, self.directory, 1.0)
        made = []
        for index, (prompt, files) in enumerate(PROMPTS):
            params = SamplingParams(temperature=0.0, max_tokens=8 + 4 * index, ignore_eos=True)
            images = [preparer.prepare(file) for file in files]
            tokens, vision = place_images(prompt, images, preparer.layout) if images else (prompt, None)
            made.append(Request(f"r{index}", tokens, params, vision=vision))
        return made

    def run(self, setup: Setup) -> list[list[int]]:
        """Returns all at once in an engine on the host's twins of stream and graphs."""
        tower = build_tower(self.model.config, self.directory, HOST)
        load_tower(tower, self.directory, self.model.config.model_type)
        with tiny_engine(
            self.model,
            self.experts,
            HostDeviceStream(),
            CapturableAttention,
            setup,
            RecordedOperations(),
            encoder=ImageEncoder(tower, HOST, 1 << 20),
        ) as engine:
            return engine.run(self.requests())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    directory = tmp_path_factory.mktemp("graphs")
    write_vision_model("glm4v_moe", directory)
    return Tiny(directory, tiny_model(directory, HOST), DenseExperts(directory, 10))


@pytest.mark.parametrize("budget", [32, 16])
def test_replayed_equals_eager(tiny: Tiny, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = tiny.run(Setup(budget=budget))
    replayed: list[StepPlan] = []
    original = DecodeGraphs.replay

    def replay(graphs: DecodeGraphs, graph: DecodeGraph, plan: StepPlan) -> Any:
        replayed.append(plan)
        return original(graphs, graph, plan)

    monkeypatch.setattr(DecodeGraphs, "replay", replay)
    assert tiny.run(Setup(largest_graph=4, prompt_graphs=(9, budget), budget=budget)) == eager
    assert all(plan.images is None for plan in replayed)
    shifted = [plan for plan in replayed if (plan.mrope_positions != plan.positions).any()]
    assert len(shifted) > 4, "positions after images are not indices"
