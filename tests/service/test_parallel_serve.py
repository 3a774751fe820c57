"""Guards that ranks which are processes of `moebius serve` come back together and say the same afterwards."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from moebius.config_loader import load_config
from moebius.supervisor.plan import make_plan
from moebius.supervisor.supervisor import Supervisor
from protos import engine_pb2 as pb
from protos.engine_pb2_grpc import EngineStub
from tests.helpers.tiny_models import TinyModel, write_tiny_model

MODEL = TinyModel("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2})


def generate(address: str) -> list[int]:
    """Twelve greedy tokens."""
    request = pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=range(5, 30)),
        sampling_params=pb.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    )
    with grpc.insecure_channel(address) as channel:
        answers = list(EngineStub(channel).Generate(request, timeout=60))  # type: ignore[no-untyped-call]
    return list(answers[-1].complete.output_ids)


@pytest.mark.parametrize("transport", ["local"])
def test_a_killed_rank_takes_its_group_along_and_back(
    tmp_path: Path, transport: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second of two ranks is killed: both restart, nobody else does, and the tokens are the same."""
    model = tmp_path / "model"
    write_tiny_model(MODEL, model, seed=5)
    flags = {"model": str(model), "port": "0", "state_dir": str(tmp_path / "s"), "dtype": "float32"}
    flags |= {"tensor_parallel_size": "2", "device": "cpu", "expert_transport": transport}
    flags |= {"num_pages": "64", "expert_servers": "1", "restart_backoff_s": "0.05"}
    serve = make_plan(load_config(None, flags))
    processes = tuple(spec for spec in serve.plan.processes if spec.name != "gateway")
    address = serve.config.gpu.gpu_address
    with Supervisor(replace(serve.plan, processes=processes), serve.timing) as supervisor:
        assert supervisor.wait_ready()
        expected = generate(address)
        assert len(expected) == 12
        by_name = {process.spec.name: process for process in supervisor.processes}
        os.kill(by_name["gpu-1"].pid or 0, signal.SIGKILL)
        end = time.monotonic() + 90

        def is_back() -> bool:
            return all(by_name[name].restarts == 1 and by_name[name].ready for name in ("gpu", "gpu-1"))

        supervisor.run(until=lambda: is_back() or time.monotonic() > end)
        assert is_back()
        assert generate(address) == expected
        others = [process for name, process in by_name.items() if not name.startswith("gpu")]
        assert [process.restarts for process in others] == [0] * len(others)
    log = capfd.readouterr().err
    assert "rank 1" in log
    assert "the group of ranks ends" in log
