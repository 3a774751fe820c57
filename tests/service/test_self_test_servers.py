"""Guards the self-test against real expert servers, and that an engine whose experts fail it is not built."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_service.assembly import experts as expert_assembly
from gpu_service.assembly.build import build_engine
from gpu_service.core.interface import NullObserver
from gpu_service.device.stream import HostDeviceStream
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.verify.self_test import ExpertsUnderTest, SelfTestFailed, run_self_test
from moebius.config import MoebiusConfig
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.tiny_models import make_tiny_model
from tests.tolerances import EXPERTS_FLOAT32

WRONG = "model.layers.2.mlp.experts.0.down_proj.weight"


def check(cluster: Cluster, transport: str, model: Path) -> dict[int, float]:
    """Returns the self-test of an engine whose checkpoint is `model`, by the cluster's servers."""
    client = cluster.client(transport)
    try:
        stream = HostDeviceStream()
        layers = cluster.geometry.moe_layers
        under_test = ExpertsUnderTest(cluster.geometry, layers, client, None, stream, torch.float32)
        report = run_self_test(_with_model(cluster.config, model, transport), under_test)
    finally:
        client.close()
    assert report is not None
    return report.worst_by_layer


def _with_model(config: MoebiusConfig, model: Path, transport: str) -> MoebiusConfig:
    section = config.model.model_copy(update={"model": str(model)})
    experts = config.experts.model_copy(update={"expert_transport": transport})
    return config.model_copy(update={"model": section, "experts": experts})


def test_servers_by_both_transports(tmp_path: Path) -> None:
    """Two servers that divide every expert pass for what they loaded, and for nothing else."""
    tiny = TinyMoe()
    loaded = tiny.write(tmp_path / "loaded")
    swapped = tiny.tensors()[WRONG].copy()
    # Two servers divide 56 intermediate channels at 32.
    swapped[:, 40:] = swapped[:, 40:][:, ::-1]
    other = tiny.write(tmp_path / "other", {WRONG: swapped})
    random = torch.get_rng_state()
    with running_cluster(loaded, tmp_path / "servers", split_count=2) as cluster:
        for transport in ("mailbox", "grpc"):
            worst = check(cluster, transport, loaded)
            assert 0 < max(worst.values()) < EXPERTS_FLOAT32
            with pytest.raises(
                SelfTestFailed, match=r"layer 2, expert 0 on expert server 1 \(unix:.*e1\), its own"
            ):
                check(cluster, transport, other)
    assert torch.equal(torch.get_rng_state(), random)


class _Closing(LocalExpertClient):
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        """Counts."""
        type(self).closed += 1
        super().close()


def test_an_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the expert, and the client is given up; without the self-test the engine is built."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    make_tiny_model("qwen3_moe", good)
    shutil.copytree(good, bad)
    tensors = load_file(bad / "model.safetensors")
    tensors[WRONG] = tensors[WRONG].roll(1, dims=1)
    save_file(tensors, bad / "model.safetensors", {"format": "pt"})
    geometry = read_geometry(good)
    client = _Closing(str(bad), geometry, torch.float32)
    monkeypatch.setattr(expert_assembly, "make_expert_client", lambda *_: client)
    document: dict[str, Any] = {
        "model": {"model": str(good), "dtype": "float32"},
        "gpu": {"num_pages": 16, "device": "cpu", "gpu_threads": 1},
        "experts": {"expert_transport": "local"},
    }
    with pytest.raises(SelfTestFailed, match=r"layer 2, expert 0 on the engine's own process"):
        build_engine(MoebiusConfig.model_validate(document), NullObserver(), lambda _: None)
    assert _Closing.closed == 1
    document["experts"]["self_test_layers"] = 0
    built = build_engine(MoebiusConfig.model_validate(document), NullObserver(), lambda _: None)
    assert built.self_test is None
    built.close()
