"""One hand-off as a step captures it, by each signal, with the answer it must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from moebius import _kernels
from moebius.app.bench.mailbox import DEADLINE_MS, HIDDEN_SIZE, TOP_K
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.mailbox import Mailbox

if TYPE_CHECKING:
    from moebius.app.bench.mailbox_device.run import DeviceOptions

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
        launcher = CudaLauncher(
            box, torch.device(DEVICE, 0), DEADLINE_MS, chosen, copy_bytes, options.jit_cache_dir
        )
        slots = range(box.geometry.num_slots)
        watch = Watch(box, slots, watch_deadline_ms(DEADLINE_MS, signal == "memops"), signal == "memops")
        self.client = DoorbellExpertClient(box, MODEL, launcher, slots, DEADLINE_MS, watch)
        self.client.wait_ready(30)
        self._inputs: Inputs | None = None

    def make(self, rows: int) -> Callable[[], None]:
        """The launches of one layer."""
        self._inputs = inputs = Inputs(rows, DEVICE)

        def layer() -> None:
            ticket = self.client.submit(0, inputs.hidden_states, inputs.topk_ids, inputs.topk_weights)
            self.client.collect(ticket, inputs.output)

        return layer

    def begin(self) -> None:
        """Before each replay, as the engine does."""
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
        self._kept: list[tuple[Inputs, Inputs, _kernels.MailboxHostCall]] = []

    def make(self, rows: int) -> Callable[[], None]:
        """The launches of one layer."""
        from gpu_service.experts.doorbell import driver

        there, here = Inputs(rows, DEVICE), Inputs(rows, "cpu", pinned=True)
        answer = torch.zeros_like(there.output)
        call = _kernels.MailboxHostCall(
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
