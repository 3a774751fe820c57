"""Invariant: a GPU stream gets exact answers from expert servers, eagerly and replayed, and never hangs.

Both signals, 1 to 4 servers, zero copy and copy engine; a server killed while graphs run is noticed, named
and forgiven, and an idle server costs nothing and is woken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch

from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable
from gpu_service.experts.doorbell.client import DoorbellExpertClient
from gpu_service.experts.doorbell.watch import Watch, watch_deadline_ms
from moebius._kernels_testing import EchoBackend
from moebius.mailbox import Mailbox, MailboxServer, row_begin
from tests.helpers.doorbell_steps import MODEL, Layer
from tests.helpers.mailbox import geometry, new_mailbox, served_mailbox, spawn_server

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

Signal = Literal["doorbell", "memops"]
SIGNALS: tuple[Signal, ...] = ("doorbell", "memops")
ROWS = (1, 4, 7, 40)


@contextmanager
def gpu_client(
    box: Mailbox, signal: Signal, *, copy_bytes: int | None = 1 << 40, deadline_ms: int = 5000
) -> Iterator[DoorbellExpertClient]:
    """The engine's client; `copy_bytes` as in its settings, by default never."""
    from gpu_service.experts.doorbell.cuda_launcher import CudaLauncher

    slots = range(box.geometry.num_slots)
    launcher = CudaLauncher(box, torch.device("cuda", 0), deadline_ms, signal, copy_bytes)
    watch = Watch(box, slots, watch_deadline_ms(deadline_ms, signal == "memops"), signal == "memops")
    client = DoorbellExpertClient(box, MODEL, launcher, slots, deadline_ms, watch)
    try:
        yield client
    finally:
        client.close()


class Step:
    """Several layers in one graph, as a decode step has them."""

    def __init__(self, client: DoorbellExpertClient, rows: tuple[int, ...] = ROWS) -> None:
        self.client = client
        self.layers = [Layer(n, seed=n, layer=n % 5, device="cuda") for n in rows]
        self.outputs = self._launch()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        client.begin_step()
        with torch.cuda.graph(self.graph):
            self.outputs = self._launch()

    def _launch(self) -> list[torch.Tensor]:
        return [layer.run(self.client) for layer in self.layers]

    def replay(self, seed: int) -> None:
        """New inputs in place, then the graph; ends with the step."""
        for index, layer in enumerate(self.layers):
            layer.redraw(10 * seed + index)
        self.client.begin_step()
        self.graph.replay()
        torch.cuda.synchronize()

    def check(self, servers: int) -> None:
        """Every layer's sum."""
        for layer, output in zip(self.layers, self.outputs, strict=True):
            assert torch.equal(output, layer.expected(servers))


@pytest.mark.parametrize("copy_bytes", [1 << 40, 0], ids=["zero copy", "copy engine"])
@pytest.mark.parametrize("carried", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_servers", [1, 2, 4])
@pytest.mark.parametrize("signal", SIGNALS)
def test_eager_answers(signal: Signal, num_servers: int, carried: str, copy_bytes: int) -> None:
    """No row, some, all that a slot holds, and more than all slots hold; both source types."""
    with (
        served_mailbox(geometry(num_servers, dtype=carried)) as box,
        gpu_client(box, signal, copy_bytes=copy_bytes) as client,
    ):
        client.wait_ready(5)
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (0, 1, 3, 7, 8, 40):
                layer = Layer(rows, seed=rows, dtype=dtype, device="cuda")
                client.begin_step()
                assert torch.equal(layer.run(client), layer.expected(num_servers))
        assert client.failure() is None


@pytest.mark.parametrize("copy_bytes", [1 << 40, 0], ids=["zero copy", "copy engine"])
@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("signal", SIGNALS)
def test_graph_replays_with_new_inputs(signal: Signal, num_servers: int, copy_bytes: int) -> None:
    """Two hundred replays of one graph: epochs come from the device, so no answer is taken twice."""
    with (
        served_mailbox(geometry(num_servers)) as box,
        gpu_client(box, signal, copy_bytes=copy_bytes) as client,
    ):
        client.wait_ready(5)
        step = Step(client)
        for seed in range(200):
            step.replay(seed)
            step.check(num_servers)
        assert client.failure() is None
        del step


def test_many_rows_use_many_blocks_and_the_measured_crossover() -> None:
    """Slots of the size of a prefill chunk, whose rows take many blocks; how they travel was measured."""
    wide = geometry(2, max_rows=512)
    with served_mailbox(wide) as box, gpu_client(box, "doorbell", copy_bytes=None) as client:
        client.wait_ready(5)
        step = Step(client, (1, 64, 512, 1500))
        for seed in range(20):
            step.replay(seed)
            step.check(2)


@pytest.mark.parametrize("signal", SIGNALS)
def test_deadline_ends_a_captured_step(signal: Signal) -> None:
    """A server that answers nothing: the step ends by its deadline, later ones at once, until recovery."""
    with new_mailbox(geometry()) as box:
        server = MailboxServer(box.name, 0, EchoBackend(48))
        server.start()
        with gpu_client(box, signal, deadline_ms=300) as client:
            client.wait_ready(5)
            step = Step(client)
            server.stop()
            server = MailboxServer(box.name, 0, EchoBackend(48))  # present, but never started
            step.replay(1)
            failure = client.failure()
            assert isinstance(failure, ExpertUnavailable)
            assert "300 ms" in str(failure)
            start = time.monotonic()
            step.replay(2)
            assert time.monotonic() - start < 5
            server.start()
            client.recover(5)
            step.replay(3)
            assert client.failure() is None
            step.check(1)
            del step
        server.stop()


@pytest.mark.parametrize("signal", SIGNALS)
def test_server_killed_while_graphs_run(signal: Signal) -> None:
    """Steps go on until one fails; after the server's return the same graph gives the right sums again."""
    with new_mailbox(geometry(2)) as box:
        servers = [spawn_server(box, index, scale=1.0 + index) for index in range(2)]
        try:
            with gpu_client(box, signal, deadline_ms=20_000) as client:
                client.wait_ready(30)
                step = Step(client)
                for crash in range(3):
                    for seed in range(5):
                        step.replay(seed)
                        step.check(2)
                    victim = crash % 2
                    servers[victim].kill()
                    servers[victim].wait()
                    start = time.monotonic()
                    step.replay(crash)
                    failure = client.failure()
                    assert isinstance(failure, ExpertUnavailable)
                    # By the watch, which knows of the death; the deadline is much later.
                    assert time.monotonic() - start < 10
                    assert failure.server_index == victim
                    servers[victim] = spawn_server(box, victim, scale=1.0 + victim)
                    client.recover(30)
                    step.replay(100 + crash)
                    assert client.failure() is None
                    step.check(2)
                assert client.stats().recoveries == 3
                del step
        finally:
            for server in servers:
                server.kill()
                server.wait()


@pytest.mark.parametrize("signal", SIGNALS)
def test_compute_failure_in_a_graph(signal: Signal) -> None:
    """The server's own text reaches the engine, and the client is usable afterwards."""
    with served_mailbox(geometry(2), fail_layer=4) as box, gpu_client(box, signal) as client:
        client.wait_ready(5)
        step = Step(client, (1, 2))
        bad = Layer(4, layer=4, device="cuda")
        client.begin_step()
        bad.run(client)
        torch.cuda.synchronize()
        failure = client.failure()
        assert isinstance(failure, ExpertComputeFailed)
        assert "set to fail at layer 4" in str(failure)
        client.recover(5)
        step.replay(5)
        assert client.failure() is None
        step.check(2)
        del step


def test_idle_server_sleeps_and_a_step_wakes_it() -> None:
    """After five seconds without steps a server takes less than 2 % of a core; the next step is answered."""
    with new_mailbox(geometry()) as box:
        server = spawn_server(box, 0)
        try:
            with gpu_client(box, "doorbell") as client:
                client.wait_ready(30)
                step = Step(client)
                step.replay(1)
                time.sleep(5.5)
                process: Any = psutil.Process(server.pid)
                before, start = sum(process.cpu_times()[:2]), time.monotonic()
                time.sleep(3)
                used = sum(process.cpu_times()[:2]) - before
                assert used / (time.monotonic() - start) < 0.02
                step.replay(2)
                assert client.failure() is None
                step.check(1)
                del step
        finally:
            server.kill()
            server.wait()


@pytest.mark.parametrize("signal", SIGNALS)
def test_two_clients_on_one_gpu(signal: Signal) -> None:
    """Ranks as two streams: each adds its own rows, the servers compute all rows once."""
    with served_mailbox(geometry(2, num_clients=2)) as box:
        other = Mailbox.attach(box.name, 1, client=1)
        with gpu_client(box, signal) as first, gpu_client(other, signal) as second:
            clients = (first, second)
            for client in clients:
                client.agree_with_ranks(lambda value: max(value, 0))
                client.wait_ready(5)
            streams = [torch.cuda.Stream() for _ in clients]
            layers = [Layer(7, device="cuda") for _ in clients]
            torch.cuda.synchronize()
            outputs = []
            for client, stream, layer in zip(clients, streams, layers, strict=True):
                with torch.cuda.stream(stream):
                    client.begin_step()
                    outputs.append(layer.run(client))
            torch.cuda.synchronize()
            for rank, (layer, output) in enumerate(zip(layers, outputs, strict=True)):
                assert clients[rank].failure() is None
                own = slice(row_begin(7, rank, 2), row_begin(7, rank + 1, 2))
                wanted = layer.partial.clone()
                wanted[own] = layer.expected(2)[own]
                assert torch.equal(output, wanted)
            assert box.server_state(0).rows == 7


def test_memory_is_given_back() -> None:
    """A closed client's mailbox can be registered again, by this process or another."""
    with served_mailbox(geometry()) as box:
        for _ in range(3):
            with gpu_client(box, "doorbell") as client:
                client.wait_ready(5)
                client.begin_step()
                layer = Layer(3, device="cuda")
                assert torch.equal(layer.run(client), layer.expected(1))
        with suppress(FileNotFoundError):
            assert Path("/dev/shm", box.name).stat().st_size == box.nbytes


def test_bench_measures_every_signal(tmp_path: Path) -> None:
    """A short run of the bench, answers checked, with its limit next to it."""
    from lab.bench.mailbox_device import DeviceOptions, run

    options = DeviceOptions(("doorbell", "memops", "host"), (1,), (1, 8), 4, 10, None, "")
    rows = run(options, tmp_path / "rows.json")
    assert [(row.signal, row.rows) for row in rows] == [
        (signal, n) for signal in options.signals for n in options.rows
    ]
    assert all(row.limit_us > 0 and row.median_us > 0 for row in rows)
