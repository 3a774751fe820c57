"""Guards a serving engine while the memory of experts on its device changes: what requests get.

The host is the device here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from gpu_service.experts.resident.experts import LayerSlots
from gpu_service.experts.resident.watch import FILLED_AGAIN, ResidentWatch
from moebius.config import MoebiusConfig, PlacementConfig
from tests.helpers.built_engine import RunningEngine, running_engine
from tests.helpers.damaged_memory import FORGOTTEN
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.waiting import wait_until
from tests.service.test_adaptive_engine import exchanges, requests, restless, settings
from tests.service.test_streaming_engine import wait_until_streaming

__all__ = ["restless"]
FIXED = PlacementConfig(placement_strategy="uniform", gpu_experts=3, drop_resident="drop")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint."""
    found = tmp_path_factory.mktemp("damaged-residents")
    make_tiny_model("qwen3_moe", found)
    return found


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A server without the experts that are on the device."""
    directory = tmp_path_factory.mktemp("servers")
    with running_cluster(model, directory, dtype="float32", placement=FIXED) as found:
        yield found


def watched(config: MoebiusConfig, interval_s: float) -> MoebiusConfig:
    """With its experts compared so often."""
    experts = config.experts.model_copy(update={"verify_interval_s": interval_s})
    return config.model_copy(update={"experts": experts})


def parts(engine: RunningEngine) -> tuple[ResidentWatch, LayerSlots]:
    """Returns the watch, and the slots of the first layer that has some."""
    watch, resident = engine.built.watch, engine.built.resident
    assert watch is not None
    assert resident is not None
    return watch, next(iter(resident.slots.values()))


def events(logs: list[Any], name: str) -> int:
    return sum(line["event"].startswith(name) for line in logs)


def flip_signs(slots: LayerSlots) -> None:
    """Flips the signs of all weights: outputs stay finite."""
    slots.weights[:, 3::4] ^= 0x80


@pytest.mark.parametrize("overlap", [True, False])
def test_what_was_computed_with_flipped_bits_is_forgotten(cluster: Cluster, overlap: bool) -> None:
    """Once they are found: a line, then the tokens of before, also of prompts whose prefix was computed with
    the damaged expert."""
    with running_engine(watched(settings(cluster, 3, overlap_scheduling=overlap), 0)) as engine:
        wanted = engine.run(requests())
        watch, slots = parts(engine)
        with capture_logs() as logs:
            flip_signs(slots)
            assert engine.run(requests()) != wanted
            watch.compare(engine.built.resident.slots)  # type: ignore[union-attr]
            assert engine.run(requests()) == wanted
            assert engine.run(requests()) == wanted
        assert (watch.damages, watch.repairs) == (3, 3)
        assert events(logs, FILLED_AGAIN) == 3
        assert events(logs, FORGOTTEN) >= 1


def test_flipped_bits_are_found_while_requests_run(cluster: Cluster) -> None:
    """Damage is found in the background, within the interval; requests that begin after it have the tokens of
    before.
    """
    with running_engine(watched(settings(cluster, 3), 0.5)) as engine:
        wanted = engine.run(requests())
        watch, slots = parts(engine)
        for count in (1, 2, 3):
            asked = requests()
            for request in asked:
                engine.built.engine.submit([request])
            flip_signs(slots)
            wait_until(lambda count=count: watch.damages == 3 * count)  # type: ignore[misc]
            engine.wait(asked)
            assert engine.run(requests()) == wanted
        assert watch.repairs == 9


@pytest.mark.parametrize("overlap", [True, False])
def test_nan_is_never_answered(cluster: Cluster, overlap: bool) -> None:
    """Without any look in the background: the layer's experts are compared before the step is answered, and
    the requests that met it have their tokens; no request gets NaN from the pages it was written to."""
    with running_engine(watched(settings(cluster, 3, overlap_scheduling=overlap), 0)) as engine:
        wanted = engine.run(requests())
        watch, slots = parts(engine)
        for count in (1, 2):
            slots.weights.view(torch.float32)[:, 16:18] = float("nan")
            assert engine.run(requests()) == wanted
            assert (watch.damages, watch.repairs) == (3 * count, 3 * count)
            watch._quiet_until.clear()


@pytest.mark.covering(1)
@pytest.mark.parametrize("prefill_experts", ["cpu", "stream"])
@pytest.mark.parametrize("split", ["tensor", "expert"])
@pytest.mark.usefixtures("restless")
def test_exchanges_are_no_damage(prefill_experts: str, split: str, model: Path, tmp_path: Path) -> None:
    """Experts from segments, with their server's checksum, and from the checkpoint, compared all the time;
    one that is damaged among them is found by it."""
    memory = tmp_path / "memory"
    memory.mkdir()
    count = 2 if split == "expert" else 1
    experts: dict[str, Any] = {"split_count": count, "expert_split": split, "expert_weights_dir": str(memory)}
    keep = PlacementConfig(drop_resident="keep")
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", placement=keep, **experts)
    with servers as cluster:
        config = watched(settings(cluster, 3, prefill_experts=prefill_experts), 0.05)
        with running_engine(config) as engine:
            if prefill_experts == "stream":
                wait_until_streaming(engine)
            wanted = engine.run(requests())
            watch, slots = parts(engine)
            assert engine.run(requests()) == wanted
            assert exchanges(engine) > 0
            known = [content for content in slots.contents if content is not None]
            assert known
            compared = watch.compared_bytes
            resident = engine.built.resident
            assert resident is not None
            wait_until(lambda: watch.compared_bytes > compared + 4 * resident.nbytes)
            assert watch.damages == 0
            slots.weights[:, 7] ^= 1
            wait_until(lambda: watch.damages >= len(known))
            assert engine.run(requests()) == wanted
