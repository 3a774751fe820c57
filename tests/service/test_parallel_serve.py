"""Guards ranks that are processes of `moebius serve`: they share expert servers, and come back together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from moebius.config_loader import load_config
from moebius.supervisor.plan import ServePlan, make_plan
from moebius.supervisor.process import ManagedProcess
from moebius.supervisor.supervisor import Supervisor
from protos import engine_pb2 as pb
from protos.engine_pb2_grpc import EngineStub
from tests.helpers.tiny_models import TinyModel, write_tiny_model

MODEL = TinyModel("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2})
TOKENS = 150
LIMIT_S = 90.0


def generate(address: str) -> list[int]:
    """Greedy tokens."""
    request = pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=range(5, 30)),
        sampling_params=pb.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
    )
    with grpc.insecure_channel(address) as channel:
        answers = list(EngineStub(channel).Generate(request, timeout=LIMIT_S))  # type: ignore[no-untyped-call]
    return list(answers[-1].complete.output_ids)


def planned(directory: Path) -> ServePlan:
    """Two ranks on the CPU and one expert server, which they reach through one mailbox; no gateway."""
    model = directory / "model"
    write_tiny_model(MODEL, model, seed=5)
    flags = {"model": str(model), "port": "0", "state_dir": str(directory / "s"), "dtype": "float32"}
    flags |= {"tensor_parallel_size": "2", "device": "cpu", "num_pages": "64", "expert_servers": "1"}
    flags |= {"restart_backoff_s": "0.05", "mailbox_deadline_ms": "2000"}
    serve = make_plan(load_config(None, flags))
    processes = tuple(spec for spec in serve.plan.processes if spec.name != "gateway")
    return replace(serve, plan=replace(serve.plan, processes=processes))


def watch(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    """Lets the supervisor do its work until the condition is true."""
    end = time.monotonic() + LIMIT_S
    supervisor.run(until=lambda: condition() or time.monotonic() > end)
    assert condition()


def back(processes: list[ManagedProcess]) -> Callable[[], bool]:
    """Whether each of them was restarted once and is ready."""
    return lambda: all(process.restarts == 1 and process.ready for process in processes)


def test_ranks_share_experts_and_come_back_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An expert server killed while ranks decode delays the tokens; a killed rank restarts all ranks."""
    serve = planned(tmp_path)
    address = serve.config.gpu.gpu_address
    with Supervisor(serve.plan, serve.timing) as supervisor, ThreadPoolExecutor(1) as pool:
        assert supervisor.wait_ready()
        expected = generate(address)
        assert len(expected) == TOKENS
        by_name = {process.spec.name: process for process in supervisor.processes}
        ranks, expert = [by_name["gpu"], by_name["gpu-1"]], by_name["expert-0"]
        delayed = pool.submit(generate, address)
        time.sleep(0.1)
        os.kill(expert.pid or 0, signal.SIGKILL)
        watch(supervisor, delayed.done)
        assert delayed.result() == expected
        assert [process.restarts for process in (*ranks, expert)] == [0, 0, 1]
        os.kill(by_name["gpu-1"].pid or 0, signal.SIGKILL)
        watch(supervisor, back(ranks))
        assert generate(address) == expected
        assert expert.restarts == 1
    log = capfd.readouterr().err
    assert "the step is run again" in log
    assert "rank 1" in log
    assert "the group of ranks ends" in log
