"""Types of the C++ module that tests and `moebius bench` use; the product does without it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius._kernels import ExpertBackend, ExpertEngine, GemmKernel, Mailbox

# --- GEMMs and vector kernels (kernels/testing/bind_gemm.cc) -----------------------------------------------

def gemm_names() -> list[str]: ...
def gemm_kernel(name: str) -> GemmKernel: ...
def gemms_for(format_name: str, row_type: str) -> list[str]: ...
def gemm(
    kernel_name: str,
    format_name: str,
    packed: NDArray[np.uint8],
    k: int,
    num_panels: int,
    has_bias: bool,
    rows: NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int8],
    row_scales: NDArray[np.float32] | None = None,
    equally_spaced: bool = True,
) -> NDArray[np.float32]: ...
def activate(
    isa: str, activation: str, alpha: float, limit: float, result: NDArray[np.float32], to_bfloat16: bool
) -> NDArray[Any]: ...
def scatter(
    isa: str,
    result: NDArray[np.float32],
    row_ids: NDArray[np.uint32],
    weights: NDArray[np.float32],
    output: NDArray[np.float32],
) -> None: ...
def bfloat16_to_float32(isa: str, source: NDArray[np.uint16]) -> NDArray[np.float32]: ...
def float16_to_float32(isa: str, source: NDArray[np.uint16]) -> NDArray[np.float32]: ...
def float32_to_bfloat16(isa: str, source: NDArray[np.float32]) -> NDArray[np.uint16]: ...
def quantise_row(isa: str, source: NDArray[np.float32]) -> tuple[NDArray[np.int8], float]: ...
def count_nonfinite(isa: str, source: NDArray[np.float32]) -> int: ...

# --- engines and their threads (kernels/testing/bind_engine.cc) ---------------------------------------------

def fill_random(engine: ExpertEngine, layer: int, seed: int) -> None:
    """Fill every expert of a layer with valid random weights, on all threads of the engine.

    Rows of variance 1 give results of order 1.

    Raises:
        ValueError: unknown layer, or an expert of it was loaded before.
    """

def pool_stress(
    *, threads: int, runs: int, spin_microseconds: int, throw_every: int, pause_every: int
) -> tuple[int, int, float]: ...
def pool_default_threads(cpus: list[int]) -> int: ...
def pool_default_spin_microseconds(threads: int) -> int: ...

# --- mailboxes (kernels/testing/bind_mailbox.cc) ------------------------------------------------------------

class EchoBackend(ExpertBackend):
    def __init__(
        self, hidden_size: int, *, scale: float = 1.0, delay_us: int = 0, fail_layer: int = -1
    ) -> None: ...

class MailboxHostCall:
    def __init__(
        self,
        mailbox: Mailbox,
        slot: int,
        layer: int,
        hidden_states: int,
        topk_ids: int,
        topk_weights: int,
        rows: int,
        output: int,
        deadline_ms: int,
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def failures(self) -> int: ...
    submit_function: int
    collect_function: int

def mailbox_spin_ns(participants: int, cores: int = 0) -> tuple[int, int]: ...
def mailbox_stress(
    mailbox: Mailbox, *, rounds: int, seed: int, scale_sum: float, deadline_ms: int, recovery_s: float
) -> dict[str, int]: ...
def mailbox_round_trips(
    mailbox: Mailbox, *, rows: int, rounds: int, warmup: int, deadline_ms: int
) -> list[float]: ...
def ping_pong(address: int, *, asks: bool, rounds: int, spin_ns: int) -> list[float]: ...

# --- what the machine can do (kernels/testing/bind_probe.cc) ---------------------------------------------

class BandwidthProbe:
    def __init__(self, *, isa: str, cpus: list[int], nbytes: int, huge_pages: bool) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def measure(self, *, block_bytes: int, prefetch_bytes: int, hint: str, passes: int) -> float: ...

def peak_units(isa: str) -> list[tuple[str, str]]: ...
def measure_peak(unit: str, *, cpus: list[int], seconds: float) -> float: ...
