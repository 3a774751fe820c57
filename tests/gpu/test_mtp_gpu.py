"""Invariant: on a GPU drafts of multi-token prediction change no token, with captured steps and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_service.attention.base import AttentionBackend
from gpu_service.attention.registry import make_attention
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.request import Request, SamplingParams
from gpu_service.device.graphs import CudaGraphs
from gpu_service.device.stream import CudaDeviceStream
from gpu_service.ops import backends
from gpu_service.speculation.mtp import MtpDrafter
from moebius.errors import UserError
from moebius.models.layers.layer import Layers
from tests.helpers.device_experts import DenseExperts
from tests.helpers.layer_values import router_of
from tests.helpers.mtp_models import make_foreseen, write_mtp_model
from tests.helpers.tiny_engine import Setup, tiny_engine, tiny_model
from tests.helpers.tiny_models import TINY_MODELS

pytestmark = pytest.mark.gpu


def _requests() -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    return [
        Request(f"r{i}", [3 + (i * 37 + k * 5) % 200 for k in range(4 + 9 * i)], params) for i in range(3)
    ]


# The reference attention takes its sizes from the host: it is not captured.
@pytest.mark.parametrize(
    ("attention", "largest_graph"),
    [("flashinfer", 0), ("flashinfer", 16), ("triton", 0), ("triton", 16), ("torch", 0)],
)
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_drafts_change_no_token(name: str, attention: str, largest_graph: int, tmp_path: Path) -> None:
    """Those of a head that knows what follows are accepted: hidden states, KV and rows are the right ones."""
    tiny = TINY_MODELS[name]
    sizes = {"head_dim": 64} if name == "glm4_moe" else {}
    write_mtp_model(replace(tiny, changes=tiny.changes | sizes), tmp_path)
    make_foreseen(tmp_path)
    device = torch.device("cuda", 0)
    stream = CudaDeviceStream(device)
    backends.install(device, attention, torch.float32)

    def make(layers: Layers, cache: KVCache) -> AttentionBackend:
        try:
            return make_attention(layers, cache, device, attention)  # type: ignore[return-value]
        except UserError as error:
            pytest.skip(str(error))

    found = []
    try:
        for heads in (0, 1):
            setup = Setup(
                largest_graph, num_drafts=3 * heads, device_drafter=MtpDrafter if heads else None, budget=16
            )
            with stream.active():
                model = tiny_model(tmp_path, device, mtp_heads=heads)
                experts = DenseExperts(tmp_path, router_of(model.config).num_experts, device)
                with tiny_engine(model, experts, stream, make, setup, CudaGraphs(stream)) as engine:
                    found.append(engine.run(_requests()))
                    accepted = 0 if engine.speculation is None else engine.speculation.num_accepted
    finally:
        backends.uninstall("cuda")
    assert found[0] == found[1]
    assert accepted > 10
