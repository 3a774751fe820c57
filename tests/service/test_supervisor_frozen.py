"""Guards a served checkpoint against frozen processes: a stopped expert server delays the tokens, no more."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from structlog.testing import capture_logs

from app.supervisor.supervisor import Supervisor
from tests.helpers.rank_serving import LIMIT_S, TOKENS, back, generate, planned, watch
from tests.helpers.tiny_models import TinyModel, write_tiny_model

MODEL = TinyModel("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2})


def test_frozen_processes_are_replaced_while_serving(tmp_path: Path) -> None:
    """SIGSTOP of the expert server in the middle of a request: same tokens. Of the engine: it comes back."""
    write_tiny_model(MODEL, tmp_path / "model", seed=5)
    serve = planned(tmp_path / "model", tmp_path / "s", 1, device="cpu", hang_timeout_s="3")
    address = serve.config.gpu.gpu_address
    with (
        Supervisor(serve.plan, serve.timing) as supervisor,
        ThreadPoolExecutor(1) as pool,
        capture_logs() as logs,
    ):
        assert supervisor.wait_ready()
        expected = generate(address)
        assert len(expected) == TOKENS
        by_name = {process.spec.name: process for process in supervisor.processes}
        engine, expert = by_name["gpu"], by_name["expert-0"]
        begun = threading.Event()
        delayed = pool.submit(generate, address, begun=begun)
        assert begun.wait(LIMIT_S)
        os.kill(expert.pid or 0, signal.SIGSTOP)
        watch(supervisor, delayed.done)
        assert delayed.result() == expected
        assert (engine.restarts, expert.restarts) == (0, 1)
        os.kill(engine.pid or 0, signal.SIGSTOP)
        watch(supervisor, back([engine]))
        assert generate(address) == expected
        assert expert.restarts == 1
    hung = [line["name"] for line in logs if line["event"] == "process hung; killed it, restarting"]
    assert hung == ["expert-0", "gpu"]
