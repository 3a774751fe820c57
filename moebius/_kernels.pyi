"""Types of the C++ module; its faces are `moebius.kernels`, `moebius.topology` and `moebius.mailbox`."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from moebius.kernels_source import SourceMatrix

# --- experts (kernels/bindings/bind_moe.cc) ---------------------------------------------------------------

class EngineCounters(TypedDict):
    calls: int
    rows: int
    busy_seconds: float
    nonfinite_inputs: int
    nonfinite_outputs: int
    layer_calls: NDArray[np.uint64]
    layer_rows: NDArray[np.uint64]
    layer_experts: NDArray[np.uint64]
    expert_rows: NDArray[np.uint64]

def isa_level() -> str: ...
def supported_isas() -> list[str]: ...

class ExpertBackend:
    @property
    def hidden_size(self) -> int: ...

class ExpertEngine(ExpertBackend):
    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_layers: int,
        expert_begin: int,
        weight_format: list[str],
        down_format: list[str],
        activation: str,
        alpha: float,
        limit: list[float],
        has_bias: bool,
        num_threads: int,
        cpus: list[int],
        numa_node: int,
        isa: str,
        kernel: str,
    ) -> None: ...
    def reserve(self, layer: int, count: int) -> None: ...
    def load_expert(
        self,
        layer: int,
        expert: int,
        gate: NDArray[Any] | SourceMatrix | None,
        up: NDArray[Any] | SourceMatrix,
        down: NDArray[Any] | SourceMatrix,
    ) -> tuple[float, float]: ...
    def fill_random(self, layer: int, seed: int) -> None: ...
    def packed_expert(self, layer: int, expert: int) -> NDArray[np.uint8]: ...
    def calibrate(self) -> None: ...
    def plan(self) -> list[tuple[Any, ...]]: ...
    def huge_page_bytes(self) -> int: ...
    def forward(
        self,
        layer: int,
        hidden_states: NDArray[Any],
        topk_ids: NDArray[np.int32],
        topk_weights: NDArray[np.float32],
        output: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]: ...
    def stats(self) -> EngineCounters: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def numa_bound(self) -> bool: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def spin_microseconds(self) -> int: ...
    @property
    def isa(self) -> str: ...

# --- weight formats (kernels/bindings/bind_format.cc) -----------------------------------------------------

class PanelOffsets(TypedDict):
    k_padded: int
    groups: int
    scales_offset: int
    zeros_offset: int
    column_scale_offset: int
    bias_offset: int
    panel_bytes: int

def weight_format_names() -> list[str]: ...
def panel_layout(format: str, k: int, has_bias: bool = False) -> PanelOffsets: ...
def packing_obstacle(format: str, source: SourceMatrix | NDArray[Any]) -> str: ...
def pack_matrix(
    format: str, source: SourceMatrix | NDArray[Any], *, has_bias: bool = False, reference: bool = False
) -> NDArray[np.uint8]: ...
def pack_expert(
    gate_up_format: str,
    down_format: str,
    gate: SourceMatrix | NDArray[Any] | None,
    up: SourceMatrix | NDArray[Any],
    down: SourceMatrix | NDArray[Any],
    *,
    has_bias: bool = False,
    parts: int = 1,
) -> tuple[NDArray[np.uint8], float, float]: ...
def unpack_matrix(
    format: str, packed: NDArray[np.uint8], rows: int, k: int, has_bias: bool = False
) -> NDArray[np.float32]: ...
def unpack_bias(format: str, packed: NDArray[np.uint8], rows: int, k: int) -> NDArray[np.float32]: ...
def dequantise_matrix(source: SourceMatrix | NDArray[Any]) -> NDArray[np.float32]: ...

# --- requantising (kernels/bindings/bind_requantise.cc) ---------------------------------------------------

def requantise_matrix(
    format: str, source: SourceMatrix | NDArray[Any]
) -> tuple[NDArray[np.uint8], float, float]: ...

# --- products and vector kernels (kernels/bindings/bind_product.cc) ----------------------------------------

def product_names() -> list[str]: ...
def products_for(format_name: str, row_type: str) -> list[str]: ...
def product(
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

# --- topology (kernels/bindings/bind_topology.cc) ----------------------------------------------------------

class NumaNode:
    id: int
    cpus: list[int]
    memory_total_bytes: int
    memory_free_bytes: int
    memory_allowed: bool

class Topology:
    nodes: list[NumaNode]
    allowed_cpus: list[int]
    cpu_quota: float | None
    core_leaders: list[int]
    @staticmethod
    def detect(sysfs_root: str, proc_root: str, cgroup_root: str) -> Topology: ...
    def usable_cpus(self, node: int) -> list[int]: ...
    def recommended_threads(self, node: int) -> int: ...
    def server_nodes(self) -> list[int]: ...

class BindResult:
    applied: bool
    message: str

def parse_cpu_list(text: str, source: str) -> list[int]: ...
def pin_thread(cpus: list[int]) -> BindResult: ...
def bind_memory(node: int) -> BindResult: ...
def bind_range(address: int, nbytes: int, node: int) -> BindResult: ...
def page_nodes(address: int, nbytes: int) -> list[int]: ...

# --- mailbox (kernels/bindings/bind_mailbox.cc) ------------------------------------------------------------

MAILBOX_ABI_VERSION: int

class MailboxGeometry:
    num_layers: int
    hidden_size: int
    top_k: int
    num_slots: int
    max_rows: int
    num_servers: int
    dtype: int
    num_clients: int
    def __init__(
        self,
        *,
        num_layers: int,
        hidden_size: int,
        top_k: int,
        num_slots: int,
        max_rows: int,
        num_servers: int,
        dtype: int,
        num_clients: int = 1,
    ) -> None: ...

class MailboxServerState:
    pid: int
    state: str
    generation: int
    heartbeat_age_s: float
    calls: int
    rows: int
    busy_s: float
    progress: int
    request_s: float
    refusal: str

class Mailbox:
    @staticmethod
    def create(
        name: str,
        geometry: MailboxGeometry,
        spin_ns: int,
        interleave: Callable[[str], None] | None = None,
    ) -> Mailbox: ...
    @staticmethod
    def attach(
        name: str,
        timeout_s: float,
        expected: MailboxGeometry | None,
        spin_ns: int,
        client: int = 0,
        group: int = 0,
    ) -> Mailbox: ...
    @property
    def geometry(self) -> MailboxGeometry: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_shut_down(self) -> bool: ...
    def submit(
        self, slot: int, layer: int, hidden_states: int, topk_ids: int, topk_weights: int, rows: int
    ) -> int: ...
    def collect(self, slot: int, epoch: int, output: int, deadline_ms: int) -> list[int]: ...
    def set_trace(self, slot: int, trace_id: bytes, span_id: bytes, flags: int) -> None: ...
    def server_state(self, server_index: int) -> MailboxServerState: ...
    def wait_servers_ready(self, timeout_s: float) -> list[int]: ...
    def accept_generations(self, generations: Sequence[int]) -> None: ...
    def reject(self, server_index: int, generation: int, reason: str) -> None: ...
    @property
    def identity(self) -> str: ...
    def shut_down(self) -> None: ...
    @property
    def address(self) -> int: ...
    def claim(self, device: bool) -> None: ...
    def release(self) -> None: ...
    def highest_epoch(self) -> int: ...
    def set_epoch(self, last: int) -> None: ...
    def abandon_requests(self, first_slot: int, num_slots: int) -> None: ...
    def wake_servers(self) -> None: ...
    def report_failure(self, failure: int, server: int, layer: int, slot: int, epoch: int) -> None: ...
    def clear_failure(self) -> None: ...
    def client_report(self, client: int) -> tuple[int, int, int, int, int]: ...
    def set_abandon(self, server_plus_one: int) -> None: ...
    def release_waits(self, first_slot: int, num_slots: int) -> None: ...
    def error_text(self, slot: int, server: int, epoch: int) -> str: ...
    def open_epoch(self, slot: int) -> int: ...
    def overdue(self, slot: int, since_ns: int, deadline_ns: int) -> tuple[int, str] | None: ...

class EchoBackend(ExpertBackend):
    def __init__(
        self, hidden_size: int, *, scale: float = 1.0, delay_us: int = 0, fail_layer: int = -1
    ) -> None: ...

class MailboxServer:
    def __init__(
        self,
        mailbox_name: str,
        server_index: int,
        backend: ExpertBackend,
        *,
        attach_timeout_s: float,
        heartbeat_s: float,
        spin_ns: int,
        num_threads: int,
        identity: str = "",
    ) -> None: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def generation(self) -> int: ...
    @property
    def rejection(self) -> str: ...
    def start(self, weights_digest: int = 0) -> None: ...
    def beat(self) -> None: ...
    def drain(self, timeout_s: float) -> bool: ...
    def stop(self) -> None: ...
    def take_traced_calls(self) -> list[tuple[bytes, bytes, int, int, int, int, int]]: ...

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

def mailbox_unlink(name: str) -> bool: ...
def mailbox_is_stale(name: str) -> bool: ...
def mailbox_health(name: str) -> list[MailboxServerState]: ...
def mailbox_identity_difference(expected: str, found: str) -> str: ...
def mailbox_offsets() -> dict[str, int]: ...
def mailbox_spin_ns(participants: int, cores: int = 0) -> tuple[int, int]: ...
def mailbox_stress(
    mailbox: Mailbox, *, rounds: int, seed: int, scale_sum: float, deadline_ms: int, recovery_s: float
) -> dict[str, int]: ...
def mailbox_round_trips(
    mailbox: Mailbox, *, rows: int, rounds: int, warmup: int, deadline_ms: int
) -> list[float]: ...
def ping_pong(address: int, *, asks: bool, rounds: int, spin_ns: int) -> list[float]: ...

# --- what the machine can do (kernels/bindings/bind_probe.cc) ---------------------------------------------

class BandwidthProbe:
    def __init__(self, *, isa: str, cpus: list[int], nbytes: int, huge_pages: bool) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def measure(self, *, block_bytes: int, prefetch_bytes: int, hint: str, passes: int) -> float: ...

def peak_units(isa: str) -> list[tuple[str, str]]: ...
def measure_peak(unit: str, *, cpus: list[int], seconds: float) -> float: ...
def pool_stress(
    *, threads: int, runs: int, spin_microseconds: int, throw_every: int, pause_every: int
) -> tuple[int, int, float]: ...
def pool_default_threads(cpus: list[int]) -> int: ...
def pool_default_spin_microseconds(threads: int) -> int: ...
