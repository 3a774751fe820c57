"""Guards recording through gRPC and the command line: what the files hold is what requests have chosen."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from app import cli
from gpu_service.assembly.build import build_engine
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.main import make_server
from gpu_service.server.responses import OutputRouter
from gpu_service.server.servicer import EngineServicer, Service
from gpu_service.server.validation import Bounds
from gpu_service.telemetry.metrics import EngineMetrics, EngineTelemetry
from moebius.experts.placement import ExpertStatistics
from moebius.network.grpc_channels import open_aio_channel
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc
from tests.equality.test_engine_real_model import config_for
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.waiting import until


@dataclass
class Served:
    """A running engine of a tiny model, and what its requests chose; filled by `served`."""

    stub: engine_pb2_grpc.EngineStub
    address: str
    servicer: EngineServicer
    # (layer, expert) -> rows, and (layer) -> different experts over all steps, counted at the client.
    chosen: Counter[tuple[int, int]] = field(default_factory=Counter)
    distinct: Counter[int] = field(default_factory=Counter)

    async def generate(self, request_id: str) -> None:
        """One greedy request of six tokens."""
        request = pb.GenerateRequest(
            request_id=request_id,
            tokenized=pb.TokenizedInput(input_ids=[5, 9, 12, 31, 70]),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
        )
        assert [answer async for answer in self.stub.Generate(request)]
        service = self.servicer.service
        assert service is not None
        await until(lambda: service.engine.load.num_running == 0)
        # A step may be in flight that was launched before the end was known: the first of these calls is run
        # before its commit, the second after it.
        for _ in range(2):
            await asyncio.wrap_future(service.engine.call("paused requests", "[]"))


@asynccontextmanager
async def served(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """The engine on a free port; all experts are on their servers, where their ids are counted."""
    submit, lock = LocalExpertClient.submit, threading.Lock()
    chosen: Counter[tuple[int, int]] = Counter()
    distinct: Counter[int] = Counter()

    def counting(self: Any, layer: int, hidden: Any, ids: Any, weights: Any) -> Any:
        with lock:
            flat = ids.flatten().tolist()
            chosen.update((layer, expert) for expert in flat)
            distinct[layer] += len(set(flat))
        return submit(self, layer, hidden, ids, weights)

    monkeypatch.setattr(LocalExpertClient, "submit", counting)
    config = config_for(directory)
    router = OutputRouter(asyncio.get_running_loop())
    telemetry = EngineTelemetry(EngineMetrics("tiny", CollectorRegistry()))
    built = build_engine(config, telemetry, router.on_output)
    built.engine.start()
    servicer = EngineServicer()
    server, _, port = make_server(servicer, "127.0.0.1:0")
    await server.start()
    info = pb.GetModelInfoResponse(vocab_size=211)
    bounds = Bounds(211, built.context_limit)
    servicer.service = Service(built.engine, router, telemetry, bounds, info, 4, built.recorder)
    address = f"127.0.0.1:{port}"
    try:
        async with open_aio_channel(address) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
            yield Served(stub, address, servicer, chosen, distinct)
    finally:
        await server.stop(0)
        await asyncio.to_thread(built.close)


async def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `moebius experts record ...`."""

    def run() -> int:
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["experts", "record", *arguments])
        return int(exit_info.value.code or 0)

    capsys.readouterr()
    status = await asyncio.to_thread(run)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


async def test_recorded_files_are_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """start, requests, stop, requests, dump: counts equal those of the experts' client in between."""
    make_tiny_model("qwen3_moe", tmp_path)
    async with served(tmp_path, monkeypatch) as service:
        address = ("--engine-address", service.address)
        await service.generate("before")
        status, out, _ = await command(capsys, "start", "--mode", "per_token", *address)
        assert (status, out) == (0, "recording (per_token)\n")
        service.chosen.clear()
        service.distinct.clear()
        await service.generate("one")
        await service.generate("two")
        chosen, distinct = dict(service.chosen), dict(service.distinct)
        assert (await command(capsys, "stop", *address))[:2] == (0, "stopped\n")
        await service.generate("after")
        files = [tmp_path / "found.safetensors", tmp_path / "found.json"]
        for file in files:
            status, out, _ = await command(capsys, "dump", "--file", str(file), *address)
            assert status == 0
            assert f"{file}: per_token, " in out
            assert "different experts per step" in out
    for file in files:
        found = ExpertStatistics.read(str(file))
        counts = {
            (layer, expert): int(count)
            for layer, row in found.counts_by_layer().items()
            for expert, count in enumerate(row)
            if count
        }
        assert counts == chosen
        assert dict(zip(found.layers, found.distinct.tolist(), strict=True)) == distinct
        assert found.token_ids is not None
        assert found.token_ids.shape == (found.tokens, 3, 3)
        for row, layer in enumerate(found.layers):
            by_token = np.bincount(found.token_ids[:, row].reshape(-1), minlength=found.num_experts)
            np.testing.assert_array_equal(by_token, found.counts_by_layer()[layer])


async def test_wrong_calls_are_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr for each; gRPC's status says whose mistake it was."""
    make_tiny_model("qwen3_moe", tmp_path)
    async with served(tmp_path, monkeypatch) as service:
        address = ("--engine-address", service.address)
        file = str(tmp_path / "x.json")
        cases = [
            (("dump", "--file", file, *address), "start the expert recorder first"),
            (("start", "--mode", "all", *address), "mode 'all' is not allowed; allowed: stat, per_pass"),
            (("dump", "--file", "x.pt", *address), "it has to end in .safetensors or .json"),
            (("stop", "--engine-address", "127.0.0.1:9"), "cannot reach an engine at 127.0.0.1:9"),
        ]
        for arguments, message in cases:
            status, _, err = await command(capsys, *arguments)
            assert status == 2
            assert message in err
            assert err.count("\n") == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.DumpExpertRecorder(pb.DumpExpertRecorderRequest())
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        await service.stub.StartExpertRecorder(pb.StartExpertRecorderRequest())
        await service.generate("one")
        answer = await service.stub.DumpExpertRecorder(pb.DumpExpertRecorderRequest())
        assert (answer.mode, answer.tokens > 0) == ("stat", True)
        assert service.servicer.service is not None
        object.__setattr__(service.servicer.service, "recorder", None)
        with pytest.raises(grpc.aio.AioRpcError, match="no experts to record"):
            await service.stub.StopExpertRecorder(pb.StopExpertRecorderRequest())
