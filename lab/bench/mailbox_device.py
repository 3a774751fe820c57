"""`moebius bench mailbox --device cuda`: the hand-off of a GPU's MoE layers, inside a captured graph."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from app.bench.output import BenchTable, Column, write_json
from lab.bench.mailbox import DEADLINE_MS, ECHO_LINE, HIDDEN_SIZE, TOP_K, echo_mailbox
from moebius import _kernels_testing
from moebius.errors import UserError
from moebius.mailbox import Mailbox
from moebius.models.geometry import MoeGeometry

SIGNALS = ("doorbell", "memops", "host")
MAX_ROWS = 4096


@dataclass(frozen=True)
class DeviceRow:
    """One measurement, microseconds per layer; filled by `run`."""

    signal: str  # doorbell kernels, stream memory operations, or host functions in the stream
    servers: int  # echo processes
    rows: int  # token rows per layer
    hidden_size: int  # elements per row, bfloat16 out and float32 back
    layers: int  # in one graph
    bytes_out: int  # of hidden states, ids and weights, per layer
    bytes_back: int  # of answers, per layer
    median_us: float  # a layer of a replayed graph
    p99_us: float
    server_us: float  # of it: the slowest server's echo
    hand_off_us: float  # median_us - server_us
    limit_us: float  # bare round trip of one word over PCIe, in the same run
    ratio: float  # hand_off_us / limit_us


def parse_signals(text: str) -> tuple[str, ...]:
    """Comma-separated names of `SIGNALS`. Raises UserError naming the one that is none."""
    signals = tuple(text.split(","))
    for signal in signals:
        if signal not in SIGNALS:
            raise UserError(f"--signal: {signal!r} is not allowed; allowed: {', '.join(SIGNALS)}")
    return signals


def make_row(
    signal: str,
    servers: int,
    rows: int,
    hidden_size: int,
    top_k: int,
    layers: int,
    layer_us: Sequence[float],
    server_us: float,
    limit_us: float,
) -> DeviceRow:
    """Makes a row from the microseconds per layer of each replay."""
    ordered = sorted(layer_us)
    median = ordered[len(ordered) // 2]
    return DeviceRow(
        signal=signal,
        servers=servers,
        rows=rows,
        hidden_size=hidden_size,
        layers=layers,
        bytes_out=rows * (2 * hidden_size + 8 * top_k),
        bytes_back=rows * 4 * hidden_size * servers,
        median_us=median,
        p99_us=ordered[int(0.99 * (len(ordered) - 1))],
        server_us=server_us,
        hand_off_us=median - server_us,
        limit_us=limit_us,
        ratio=(median - server_us) / limit_us,
    )


def _kib(nbytes: int) -> str:
    return f"{nbytes / 1024:.0f} KiB"


TABLE = BenchTable[DeviceRow](
    Column("signal", lambda row: row.signal, 9),
    Column("servers", lambda row: f"{row.servers}"),
    Column("rows", lambda row: f"{row.rows}", 5),
    Column("out", lambda row: _kib(row.bytes_out), 8),
    Column("back", lambda row: _kib(row.bytes_back), 8),
    Column("median", lambda row: f"{row.median_us:.1f}", 8),
    Column("p99", lambda row: f"{row.p99_us:.1f}", 8),
    Column("server", lambda row: f"{row.server_us:.1f}", 8),
    Column("hand-off", lambda row: f"{row.hand_off_us:.1f}", 9),
    Column("limit", lambda row: f"{row.limit_us:.2f}", 7),
    Column("ratio", lambda row: f"{row.ratio:.1f}", 6),
)


MODEL = MoeGeometry("echo", HIDDEN_SIZE, 1, (0,), 8, TOP_K, 8, "silu", "bfloat16")
DEVICE = "cuda"


class Inputs:
    """Whole numbers, so that every echo is exact; weights of zero keep the answer simple."""

    def __init__(self, rows: int, device: str, pinned: bool = False) -> None:
        values = torch.arange(rows * HIDDEN_SIZE).reshape(rows, HIDDEN_SIZE) % 64
        self.hidden_states = values.to(device=device, dtype=torch.bfloat16)
        self.topk_ids = torch.zeros((rows, TOP_K), dtype=torch.int32, device=device)
        self.topk_weights = torch.zeros((rows, TOP_K), device=device)
        self.output = torch.zeros((rows, HIDDEN_SIZE), device=device)
        if pinned:
            for name, tensor in list(vars(self).items()):
                setattr(self, name, tensor.pin_memory())


def expect(output: torch.Tensor, inputs: Inputs, servers: int) -> None:
    """Raises RuntimeError when the sum of the echoes is not there."""
    if not torch.equal(output, inputs.hidden_states.float() * servers):
        raise RuntimeError("the servers' echo is not what was sent")


class DoorbellLayers:
    """`signal: doorbell` or `memops`, by the engine's own client."""

    def __init__(self, box: Mailbox, signal: str, options: DeviceOptions) -> None:
        from gpu_service.experts.doorbell.client import DoorbellExpertClient
        from gpu_service.experts.doorbell.cuda_launcher import CudaLauncher
        from gpu_service.experts.doorbell.watch import Watch, watch_deadline_ms

        self._box = box
        chosen = cast(Literal["doorbell", "memops"], signal)
        copy_bytes = None if options.copy_kib is None else options.copy_kib * 1024
        launcher = CudaLauncher(box, torch.device(DEVICE, 0), DEADLINE_MS, chosen, copy_bytes)
        slots = range(box.geometry.num_slots)
        watch = Watch(box, slots, watch_deadline_ms(DEADLINE_MS, signal == "memops"), signal == "memops")
        self.client = DoorbellExpertClient(box, MODEL, launcher, slots, DEADLINE_MS, watch)
        self.client.wait_ready(30)
        self._inputs: Inputs | None = None

    def make(self, rows: int) -> Callable[[], None]:
        """Returns the launches of one layer."""
        self._inputs = inputs = Inputs(rows, DEVICE)

        def layer() -> None:
            ticket = self.client.submit(0, inputs.hidden_states, inputs.topk_ids, inputs.topk_weights)
            self.client.collect(ticket, inputs.output)

        return layer

    def begin(self) -> None:
        """Begins the step before each replay, as the engine does."""
        self.client.begin_step()

    def check(self, rows: int) -> None:
        """One more layer, whose answer is known. Raises the failure of the replays, if there was one."""
        failure = self.client.failure()
        if failure is not None:
            raise failure
        inputs = Inputs(rows, DEVICE)
        ticket = self.client.submit(0, inputs.hidden_states, inputs.topk_ids, inputs.topk_weights)
        expect(self.client.collect(ticket, inputs.output), inputs, self._box.geometry.num_servers)

    def close(self) -> None:
        """Graphs are gone by now."""
        self.client.close()


class HostLayers:
    """Copies to pinned memory, two host functions in the stream, a copy back and an add."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._kept: list[tuple[Inputs, Inputs, _kernels_testing.MailboxHostCall]] = []

    def make(self, rows: int) -> Callable[[], None]:
        """Returns the launches of one layer."""
        from gpu_service.device import cuda_driver as driver

        there, here = Inputs(rows, DEVICE), Inputs(rows, "cpu", pinned=True)
        answer = torch.zeros_like(there.output)
        call = _kernels_testing.MailboxHostCall(
            self._box.kernel,
            0,
            0,
            here.hidden_states.data_ptr(),
            here.topk_ids.data_ptr(),
            here.topk_weights.data_ptr(),
            rows,
            here.output.data_ptr(),
            DEADLINE_MS,
        )
        self._kept.append((there, here, call))
        # torch leaves streams untyped.
        cuda: Any = torch.cuda

        def layer() -> None:
            for name in ("hidden_states", "topk_ids", "topk_weights"):
                getattr(here, name).copy_(getattr(there, name), non_blocking=True)
            for function in (call.submit_function, call.collect_function):
                driver.call_on_host(function, call.address, cuda.current_stream().cuda_stream)
            answer.copy_(here.output, non_blocking=True)
            there.output.add_(answer)

        return layer

    def begin(self) -> None:
        """The host functions ring the doorbell themselves."""

    def check(self, rows: int) -> None:
        """The last layer's answer lies in the pinned buffer."""
        there, here, call = self._kept[-1]
        if call.failures:
            raise RuntimeError(f"{call.failures} host functions failed")
        expect(here.output.to(DEVICE), there, self._box.geometry.num_servers)

    def close(self) -> None:
        """Another client may follow."""
        self._box.kernel.release()


WARM_UP = 1000
ROUNDS = 5000
# The other side must never sleep: a GPU cannot wake it.
SPIN_NS = 60_000_000_000
DEADLINE_NS = 30_000_000_000


def pci_round_trip_us() -> float:
    """Mean of some thousand rounds. Raises UserError when the other process keeps silent."""
    from gpu_service.device import cuda_driver as driver
    from gpu_service.device.cuda_program import compiled
    from gpu_service.experts.doorbell.program import program

    nanoseconds = torch.zeros(1, dtype=torch.int64, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    kernel = driver.Module(compiled(program(), "doorbell", f"sm_{major}{minor}")).kernel(
        "ping_pong", ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64
    )
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="moebius-bench-") as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        command = [sys.executable, "-P", "-c", ECHO_LINE, file.name, str(WARM_UP + ROUNDS), str(SPIN_NS)]
        other = subprocess.Popen(command)
        try:
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as page:
                word = ctypes.c_char.from_buffer(page)
                memory = driver.RegisteredMemory(ctypes.addressof(word), mmap.PAGESIZE, "one page")
                values = (memory.device_address, WARM_UP, ROUNDS, DEADLINE_NS, nanoseconds.data_ptr())
                kernel.launch(torch.cuda.current_stream().cuda_stream, 1, 1, *values)
                torch.cuda.synchronize()
                memory.close()
                del word
        finally:
            other.kill()
            other.wait()
    if int(nanoseconds) == 0:
        raise UserError("the ping-pong's other process did not answer")
    return int(nanoseconds) / ROUNDS / 1000


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Filled by the command line."""

    signals: tuple[str, ...]
    servers: Sequence[int]
    rows: Sequence[int]
    layers: int
    replays: int
    copy_kib: int | None  # from how many KiB the copy engine moves rows; None: measured
    jit_cache_dir: str


def run(options: DeviceOptions, json_file: Path | None = None) -> list[DeviceRow]:
    """Prints each row as it is measured; also writes JSON rows to `json_file` when given.

    Raises:
        UserError: there is no CUDA device, or a part of the gpu extra is missing.
        MailboxError: an echo process did not start or died.
    """
    import torch

    from gpu_service.device.cuda_program import keep_compiled_in

    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device; allowed here: cpu")
    keep_compiled_in(options.jit_cache_dir)
    limit_us = pci_round_trip_us()
    name = torch.cuda.get_device_name()
    print(f"hand-off of a layer of {HIDDEN_SIZE}, {options.layers} in a graph, {name} (microseconds)")
    TABLE.print_header()
    results = []
    for servers in options.servers:
        for signal in options.signals:
            with echo_mailbox(servers, options.rows) as box:
                for row in measure(box, signal, options, limit_us):
                    TABLE.print_row(row)
                    results.append(row)
    print("limit: one word over PCIe to a spinning process and back; server: its echo, which is not hand-off")
    write_json(results, json_file)
    return results


def measure(box: Mailbox, signal: str, options: DeviceOptions, limit_us: float) -> list[DeviceRow]:
    """All row counts with one signal on one mailbox."""
    layers = HostLayers(box) if signal == "host" else DoorbellLayers(box, signal, options)
    results = []
    try:
        for rows in options.rows:
            before = _busy(box)
            times = replay_times(layers.make(rows), layers.begin, options)
            layers.check(rows)
            calls, seconds = (after - start for after, start in zip(_busy(box), before, strict=True))
            results.append(
                make_row(
                    signal,
                    box.geometry.num_servers,
                    rows,
                    HIDDEN_SIZE,
                    TOP_K,
                    options.layers,
                    times,
                    seconds * 1e6 / max(calls, 1),
                    limit_us,
                )
            )
    finally:
        layers.close()
    return results


def replay_times(layer: Callable[[], None], begin: Callable[[], None], options: DeviceOptions) -> list[float]:
    """Returns the microseconds per layer of each replay of a graph of layers, after some unmeasured ones."""
    import torch

    # torch leaves these untyped.
    cuda: Any = torch.cuda
    begin()
    layer()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for _ in range(options.layers):
            layer()
    times = []
    for replay in range(options.replays + options.replays // 10 + 1):
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay > options.replays // 10:
            times.append(start.elapsed_time(end) * 1000 / options.layers)
    del graph
    return times


def _busy(box: Mailbox) -> tuple[int, float]:
    """Calls and seconds of the server that computed longest."""
    states = [box.server_state(index) for index in range(box.geometry.num_servers)]
    slowest = max(states, key=lambda state: state.busy_s)
    return slowest.calls, slowest.busy_s
