"""Invariant: a request whose hidden states exceed what float16 holds ends by an error that names the layer.

The others of its batch get the tokens that they get without it, and so does the next owner of its pages.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from gpu_service.core.images import PreparedImage
from gpu_service.core.results import FLOAT16_OVERFLOW
from gpu_service.device.stream import HostDeviceStream
from gpu_service.engine.decode_graphs import DecodeGraphs
from gpu_service.engine.sampler import TOWER, Sampler, overflow_error
from gpu_service.layers.context import ForwardContext
from gpu_service.ops.overflow import EMBEDDING, FINAL_NORM, NO_OVERFLOW
from gpu_service.parallel.steps import RankModelRunner
from gpu_service.vision.features import ImageEncoder
from moebius.config import GpuConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.capturable_mla import make_capturable_attention
from tests.helpers.device_experts import DenseExperts
from tests.helpers.family_answers import family_config
from tests.helpers.host_graphs import RecordedOperations
from tests.helpers.overflowing import LAYER, NUM_EXPERTS, check_overflows, make_overflowing
from tests.helpers.tiny_engine import Setup, tiny_engine, tiny_model
from tests.helpers.tiny_vision_models import IMAGE_TOKEN, noise, write_vision_model
from tests.helpers.vision_engine import Prompt, vision_engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the checkpoint of a model in which it happens."""
    directory: Path = tmp_path_factory.mktemp("overflowing")
    make_overflowing(directory)
    return directory


def test_it_ends_alone_on_a_cpu(checkpoint: Path) -> None:
    """The request ends alone in an engine that is assembled as by the process."""
    with running_engine(family_config(checkpoint, "cpu", "float16", {"expert_transport": "local"})) as engine:
        check_overflows(engine)


@pytest.mark.parametrize("largest_graph", [0, 8])
def test_it_ends_alone_in_steps_of_a_device(
    largest_graph: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps eager and replayed: what is noted is in the graph's own memory."""
    replayed: list[DecodeGraphs] = []
    original = DecodeGraphs.replay

    def replay(self: DecodeGraphs, *args: object) -> object:
        replayed.append(self)
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeGraphs, "replay", replay)
    host = torch.device("cpu")
    model, experts = tiny_model(checkpoint, host, "float16"), DenseExperts(checkpoint, NUM_EXPERTS)
    setup, stream = Setup(largest_graph, (20, 32) if largest_graph else ()), HostDeviceStream()
    with tiny_engine(
        model, experts, stream, make_capturable_attention, setup, RecordedOperations()
    ) as engine:
        check_overflows(engine)
    assert bool(replayed) == bool(largest_graph)


def test_all_ranks_hear_of_the_first_layer_of_any_stage() -> None:
    """Each stage knows of its own layers only, and all ranks must end the same requests."""
    none = NO_OVERFLOW
    stages = [torch.tensor(rows, dtype=torch.int32) for rows in ([none, 1, none], [none, 7, 6])]
    group = SimpleNamespace(all_gather=lambda own: torch.cat(stages))
    for own in stages:
        runner = object.__new__(RankModelRunner)
        runner.sampler = cast(Sampler, SimpleNamespace(parallel=SimpleNamespace(world_group=group)))
        found = runner.first_overflow(cast(ForwardContext, SimpleNamespace(first_overflow=own)))
        assert found is not None
        assert found.tolist() == [none, 1, 6]
        assert runner.first_overflow(cast(ForwardContext, SimpleNamespace(first_overflow=None))) is None


def test_an_image_whose_features_overflow_ends_its_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end within images here. That its tower made them is said of images, not that tokens did; others
    get the tokens that they get without it.
    """
    write_vision_model("qwen3_vl_moe", tmp_path)
    prompt = [11, 48, 190, 3, IMAGE_TOKEN, 66, 71, 28]
    text: Prompt = ([10, 110, 4], [])
    wide, tall = (prompt, [noise(1, 40, 16)]), (prompt, [noise(2, 16, 32)])
    small = GpuConfig(page_size=4, num_pages=64, max_num_batched_tokens=16, gpu_threads=1)
    with vision_engine(tmp_path, small, dtype="float16") as engine:
        expected = [request.output_token_ids for request in engine.run([wide, text])]
        original = ImageEncoder.encode

        def encode(self: ImageEncoder, image: PreparedImage) -> torch.Tensor:
            features = original(self, image)
            _, height, width = image.grid
            if height > width:
                features[0, -1, 5] = torch.inf  # of its last token, which is beyond the first chunk
            return features

        monkeypatch.setattr(ImageEncoder, "encode", encode)
        for _ in range(2):
            found = engine.run([wide, tall, text], may_fail=True)
            assert [request.error_message for request in found] == ["", overflow_error(TOWER), ""]
            assert [found[0].output_token_ids, found[2].output_token_ids] == expected
    assert "in the vision tower;" in overflow_error(TOWER)


def test_what_clients_read() -> None:
    """Places before and after all layers are no layers of the checkpoint."""
    assert overflow_error(LAYER) == (
        f"{FLOAT16_OVERFLOW} hidden states exceeded 65504 in layer {LAYER}; --dtype bfloat16 has room "
        "for what this model computes"
    )
    assert "in the embedding;" in overflow_error(EMBEDDING)
    assert "in the norm after the last layer;" in overflow_error(FINAL_NORM)
