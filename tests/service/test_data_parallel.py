"""Guards engines behind one port that compute requests of their own and share the expert servers."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from app.supervisor.supervisor import Supervisor
from moebius.mailbox import server_health
from moebius.mailbox.plan import mailbox_names
from tests.helpers.rank_serving import LIMIT_S, back, generate, planned, watch
from tests.helpers.tiny_models import TinyModel, write_tiny_model

MODEL = TinyModel("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2})


def test_engines_share_an_expert_server_and_do_not_disturb_one_another(tmp_path: Path) -> None:
    """Each engine's tokens are the same alone, while the other one computes, and while that one is killed in
    the middle of a request; it comes back alone, and neither the server nor the other engine restarts."""
    write_tiny_model(MODEL, tmp_path / "model", seed=5)
    serve = planned(tmp_path / "model", tmp_path / "s", 1, device="cpu", data_parallel_size="2")
    first, second = serve.config.gateway.engines
    with Supervisor(serve.plan, serve.timing) as supervisor, ThreadPoolExecutor(2) as pool:
        assert supervisor.wait_ready()
        by_name = {process.spec.name: process for process in supervisor.processes}
        assert sorted(by_name) == ["expert-0", "gpu", "gpu-1"]
        expected = [generate(first, length) for length in (25, 31)]
        together = [pool.submit(generate, address, 25 + 6 * n) for n, address in enumerate((first, second))]
        assert [answer.result() for answer in together] == expected
        calls = [health.calls for name in mailbox_names(serve.config) for health in server_health(name)]
        assert len(calls) == 2
        assert min(calls) > 0, "each engine has a mailbox of its own at the one server"
        begun = threading.Event()
        lost = pool.submit(generate, second, 31, begun=begun)
        kept = pool.submit(generate, first, 25)
        assert begun.wait(LIMIT_S)
        os.kill(by_name["gpu-1"].pid or 0, signal.SIGKILL)
        watch(supervisor, back([by_name["gpu-1"]]))
        assert kept.result() == expected[0]
        assert lost.exception() is not None
        assert generate(second, 31) == expected[1]
        assert [by_name[name].restarts for name in ("gpu", "expert-0")] == [0, 0]
