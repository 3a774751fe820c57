"""Guards ranks that are processes of `moebius serve`: they share expert servers, and come back together."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.supervisor.supervisor import Supervisor
from moebius.mailbox import server_health
from tests.helpers.rank_serving import LIMIT_S, TOKENS, back, generate, planned, watch
from tests.helpers.tiny_models import TinyModel, write_tiny_model

MODEL = TinyModel("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2})


def _kill_successor(mailbox: str, former: int) -> None:
    """Once more, when the next process begins to serve: ranks are comparing it with its predecessor."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        (found,) = server_health(mailbox)
        if found.pid not in (0, former) and found.state == "ready":
            os.kill(found.pid, signal.SIGKILL)
            return
        time.sleep(0.001)


def test_ranks_share_experts_and_come_back_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An expert server killed while ranks decode, and again as soon as it is back, delays the tokens; a rank
    that is killed restarts all ranks."""
    write_tiny_model(MODEL, tmp_path / "model", seed=5)
    serve = planned(tmp_path / "model", tmp_path / "s", 2, device="cpu")
    address = serve.config.gpu.gpu_address
    with Supervisor(serve.plan, serve.timing) as supervisor, ThreadPoolExecutor(2) as pool:
        assert supervisor.wait_ready()
        expected = generate(address)
        assert len(expected) == TOKENS
        by_name = {process.spec.name: process for process in supervisor.processes}
        ranks, expert = [by_name["gpu"], by_name["gpu-1"]], by_name["expert-0"]
        begun = threading.Event()
        delayed = pool.submit(generate, address, begun=begun)
        assert begun.wait(LIMIT_S)
        former = expert.pid or 0
        os.kill(former, signal.SIGKILL)
        pool.submit(_kill_successor, serve.config.experts.mailbox, former)
        watch(supervisor, delayed.done)
        assert delayed.result() == expected
        assert [process.restarts for process in (*ranks, expert)] == [0, 0, 2]
        os.kill(by_name["gpu-1"].pid or 0, signal.SIGKILL)
        watch(supervisor, back(ranks))
        assert generate(address) == expected
        assert expert.restarts == 2
    log = capfd.readouterr().err
    assert "expert servers are ready again" in log
    assert "rank 1" in log
    assert "the group of ranks ends" in log


# In parts: tests/equality/test_streamed_experts.py, tests/unit/gpu_service/scheduler/test_shares.py.
@pytest.mark.full
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
