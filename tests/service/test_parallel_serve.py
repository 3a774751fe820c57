"""Guards ranks that are processes of `moebius serve`: they share expert servers, and come back together."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moebius.app.supervisor.supervisor import Supervisor
from tests.helpers.rank_serving import LIMIT_S, TOKENS, back, generate, planned, watch
from tests.helpers.tiny_models import TinyModel, write_tiny_model

MODEL = TinyModel("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2})


def test_ranks_share_experts_and_come_back_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An expert server killed while ranks decode delays the tokens; a killed rank restarts all ranks."""
    write_tiny_model(MODEL, tmp_path / "model", seed=5)
    serve = planned(tmp_path / "model", tmp_path / "s", 2, device="cpu")
    address = serve.config.gpu.gpu_address
    with Supervisor(serve.plan, serve.timing) as supervisor, ThreadPoolExecutor(1) as pool:
        assert supervisor.wait_ready()
        expected = generate(address)
        assert len(expected) == TOKENS
        by_name = {process.spec.name: process for process in supervisor.processes}
        ranks, expert = [by_name["gpu"], by_name["gpu-1"]], by_name["expert-0"]
        begun = threading.Event()
        delayed = pool.submit(generate, address, begun=begun)
        assert begun.wait(LIMIT_S)
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


@pytest.mark.full  # in parts: tests/equality/test_streamed_experts.py, tests/unit/test_scheduler_shares.py
@pytest.mark.parametrize("division", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_stream_long_prompts_while_others_decode(
    division: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each rank copies its part of the experts of a step of prompts alone, which takes turns with those who
    decode: all ranks plan the same steps, and the tokens are those of ranks whose servers compute all.
    """
    write_tiny_model(MODEL, tmp_path / "model", seed=5)
    memory = tmp_path / "memory"
    memory.mkdir()
    common = {"device": "cpu", "tensor_parallel_size": "1", division: "2", "max_num_batched_tokens": "16"}
    common |= {"expert_weights_dir": str(memory), "prefix_caching": "false"}
    found = {}
    for mode, changes in (("cpu", {}), ("stream", {"prefill_chunk_max": "64"})):
        settings = {**common, "prefill_experts": mode, **changes}
        serve = planned(tmp_path / "model", tmp_path / mode, 2, **settings)
        address = serve.config.gpu.gpu_address
        with Supervisor(serve.plan, serve.timing) as supervisor, ThreadPoolExecutor(2) as pool:
            assert supervisor.wait_ready()
            time.sleep(1.0 if mode == "stream" else 0.0)  # segments are opened in the background
            running = pool.submit(generate, address)
            prompts = [pool.submit(generate, address, length, 8).result() for length in (90, 200, 150)]
            found[mode] = [running.result(), *prompts]
            assert all(process.restarts == 0 for process in supervisor.processes)
    assert found["stream"] == found["cpu"]
    log = capfd.readouterr().err
    assert "long prompts stream their experts, in turns with others" in log
