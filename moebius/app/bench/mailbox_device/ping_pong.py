"""The limit: one word to another process and back, over PCIe, nothing copied, computed or launched."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import tempfile

import torch

from moebius.app.bench.mailbox import ECHO_LINE
from moebius.errors import UserError

WARM_UP = 1000
ROUNDS = 5000
# The other side must never sleep: a GPU can not wake it.
SPIN_NS = 60_000_000_000
DEADLINE_NS = 30_000_000_000


def pci_round_trip_us(jit_cache_dir: str) -> float:
    """Mean of some thousand rounds. Raises UserError when the other process keeps silent."""
    from gpu_service.experts.doorbell import driver
    from gpu_service.experts.doorbell.program import compiled

    nanoseconds = torch.zeros(1, dtype=torch.int64, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    kernel = driver.Module(compiled(f"sm_{major}{minor}", jit_cache_dir)).kernel(
        "ping_pong", ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64
    )
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="moebius-bench-") as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        command = [sys.executable, "-c", ECHO_LINE, file.name, str(WARM_UP + ROUNDS), str(SPIN_NS)]
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
