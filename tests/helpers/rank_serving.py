"""Ranks and expert servers under the supervisor, without a gateway."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from app.supervisor.plan import ServePlan, plan_processes
from app.supervisor.process import ManagedProcess
from app.supervisor.supervisor import Supervisor
from moebius.config.loader import load_config
from moebius.network.grpc_channels import open_channel
from protos import engine_pb2 as pb
from protos.engine_pb2_grpc import EngineStub

TOKENS = 150
LIMIT_S = 180.0


def generate(
    address: str, prompt_len: int = 25, tokens: int = TOKENS, begun: threading.Event | None = None
) -> list[int]:
    """Returns greedy tokens; `begun` is set once the first of them is there."""
    return list(complete(address, prompt_len, tokens, begun).output_ids)


def complete(
    address: str, prompt_len: int = 25, tokens: int = TOKENS, begun: threading.Event | None = None
) -> pb.GenerateComplete:
    """Returns how such a request ends."""
    request = pb.GenerateRequest(
        request_id=f"r{prompt_len}",
        tokenized=pb.TokenizedInput(input_ids=[5 + (k * 7 + k // 9) % 90 for k in range(prompt_len)]),
        sampling_params=pb.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        stream=begun is not None,
    )
    with open_channel(address) as channel:
        answers = []
        for answer in EngineStub(channel).Generate(request, timeout=LIMIT_S):  # type: ignore[no-untyped-call]
            answers.append(answer)
            if begun is not None:
                begun.set()
    return answers[-1].complete


def planned(model: Path, state: Path, ranks: int, **changes: str) -> ServePlan:
    """Returns tensor-parallel ranks and one expert server, which they reach through one mailbox."""
    flags = {"model": str(model), "port": "0", "state_dir": str(state), "dtype": "float32"}
    flags |= {"tensor_parallel_size": str(ranks), "num_pages": "64", "expert_servers": "1"}
    flags |= {"restart_backoff_s": "0.05", "mailbox_deadline_ms": "2000", **changes}
    serve = plan_processes(load_config(None, flags))
    processes = tuple(spec for spec in serve.plan.processes if spec.name != "gateway")
    return replace(serve, plan=replace(serve.plan, processes=processes))


def watch(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    """Lets the supervisor do its work until the condition is true."""
    end = time.monotonic() + LIMIT_S
    supervisor.run(until=lambda: condition() or time.monotonic() > end)
    assert condition()


def back(processes: list[ManagedProcess]) -> Callable[[], bool]:
    """Returns whether each of them was restarted once and is ready."""
    return lambda: all(process.restarts == 1 and process.ready for process in processes)
