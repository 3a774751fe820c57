"""Guards that the experts of multi-token prediction are one more layer of expert servers where it is served,
and no server's where it is not.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from app.planning.memory import segment_bytes
from expert_service.host import ExpertHost, LoadSettings
from expert_service.placement import ThreadPlacement
from gpu_service.experts.local_client import LocalExpertClient
from moebius.config.loader import load_config
from moebius.experts.slices import SliceRequest
from moebius.kernels.weight_segment import WeightSegment, segment_path
from moebius.mailbox.plan import mailbox_geometry
from moebius.models.read import read_geometry
from moebius.models.served import read_served_geometry, read_served_model
from tests.helpers.mtp_models import write_mtp_model
from tests.tolerances import EXPERTS_FLOAT32

# The model's layers; the next one is the head's.
LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("glm")
    write_mtp_model("glm4_moe", directory)
    return directory


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def host_of(request: SliceRequest, memory: Path | None = None) -> ExpertHost:
    """Returns a server in this process that has loaded its share."""
    settings = LoadSettings(calibrate_kernels=False, expert_weights_dir="" if memory is None else str(memory))
    host = ExpertHost(ThreadPlacement(-1, 2, ()), lambda *_: None, lambda: None, settings)
    host.load(request)
    return host


def test_servers_compute_the_heads_experts(model: Path) -> None:
    """Two servers divide the heads' experts like any layer's."""
    geometry = read_geometry(model, mtp_heads=1)
    rng = np.random.default_rng(3)
    hidden = rng.standard_normal((5, geometry.hidden_size), np.float32)
    ids = rng.integers(-1, geometry.num_experts, (5, geometry.top_k)).astype(np.int32)
    weights = rng.random(ids.shape, np.float32)
    requests = [SliceRequest(str(model), split_index=i, split_count=2, mtp_heads=1) for i in range(2)]
    found = sum(host_of(request).forward(LAYERS, hidden, ids, weights) for request in requests)
    client = LocalExpertClient(str(model), geometry, torch.float32)
    ticket = client.submit(LAYERS, *map(torch.from_numpy, (hidden, ids, weights)))
    wanted = client.collect(ticket).numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=EXPERTS_FLOAT32 * np.abs(wanted).max())


def test_without_it_no_server_holds_them(model: Path) -> None:
    plain, served = (host_of(SliceRequest(str(model), mtp_heads=heads)).loaded for heads in (0, 1))
    assert plain is not None
    assert served is not None
    # Two layers of experts, and a third one.
    assert 2 * served.engine.packed_bytes == 3 * plain.engine.packed_bytes
    assert plain.model.num_layers == LAYERS


def test_servers_of_other_settings_are_repacked_and_named(model: Path, memory: Path) -> None:
    """A server that was without the heads can not serve an engine that wants them."""
    host_of(SliceRequest(str(model)), memory).drain(1)
    gc.collect()
    with capture_logs() as logs:
        host_of(SliceRequest(str(model), mtp_heads=1), memory)
    reasons = [line["reason"] for line in logs if line["event"] == "experts are packed again"]
    assert reasons == ["it holds other weights: mtp_heads=0, expected mtp_heads=1"]


def test_all_processes_read_the_same_of_the_settings(model: Path, memory: Path) -> None:
    """Engine, mailbox, expert servers and the plan of their memory; more drafts need no second head."""
    off = load_config(None, {"model": str(model)})
    on = load_config(None, {"model": str(model), "speculative_method": "mtp", "num_draft_tokens": "4"})
    assert (off.gpu.mtp_heads, on.gpu.mtp_heads) == (0, 4)
    assert (read_served_model(off).num_layers, read_served_model(on).num_layers) == (LAYERS, LAYERS + 1)
    assert mailbox_geometry(on, read_served_geometry(on)).num_layers == LAYERS + 1
    request = replace(SliceRequest.from_config(on), split_count=1)
    host_of(request, memory)
    planned = segment_bytes(on, read_served_geometry(on), 1)
    assert planned == [WeightSegment.open(segment_path(str(memory), 0)).data.nbytes]
