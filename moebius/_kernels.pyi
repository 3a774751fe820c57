"""Types of the C++ module.

Its faces are `moebius.kernels`, `.weight_formats`, `.topology` and `.mailbox`.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from moebius.kernels.source import Code, ScaleType, SourceMatrix

# A matrix as checkpoints store it, or plain numbers.
_Source = SourceMatrix | NDArray[Any]

# --- experts (kernels/bindings/bind_moe.cc) ---------------------------------------------------------------

class EngineCounters(TypedDict):
    calls: int
    rows: int
    busy_seconds: float
    nonfinite_inputs: int
    nonfinite_outputs: int
    damaged_experts: int
    repaired_experts: int
    verified_bytes: int
    layer_calls: NDArray[np.uint64]
    layer_rows: NDArray[np.uint64]
    layer_experts: NDArray[np.uint64]
    layer_busy_nanoseconds: NDArray[np.uint64]
    expert_rows: NDArray[np.uint64]
    cold_used: int
    cold_missed: int
    cold_read_bytes: int
    cold_waited_seconds: float

def isa_level() -> str: ...
def supported_isas() -> list[str]: ...

class GemmKernel:
    """A kernel that does not belong to the product, for `ExpertEngine`."""

    @property
    def name(self) -> str: ...

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
        kernel: str | GemmKernel,
        segment_path: str = "",
        segment_identity: str = "",
        intermediate_begin: int = 0,
        held: list[list[int]] = ...,
        slot_bytes: int = 0,
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
    def packed_expert(self, layer: int, expert: int) -> NDArray[np.uint8]: ...
    def calibrate(self) -> None: ...
    def plan(self) -> list[tuple[Any, ...]]: ...
    def restore_plan(self, choices: list[tuple[str, float]]) -> bool: ...
    def fill_slots(self) -> None: ...
    def finish_load(self, load_record: bytes) -> None: ...
    def verify_expert(self, layer: int, expert: int) -> bool: ...
    def expect_repairs(self, expected: bool) -> None: ...
    def wait_for_damage(self, seconds: float) -> tuple[int, int] | None: ...
    def interrupt_damage_wait(self) -> None: ...
    def repair_expert(
        self,
        layer: int,
        expert: int,
        gate: NDArray[Any] | SourceMatrix | None,
        up: NDArray[Any] | SourceMatrix,
        down: NDArray[Any] | SourceMatrix,
    ) -> bool: ...
    def give_up_expert(self, layer: int, expert: int, reason: str) -> None: ...
    def segment_error(self, layer: int, expert: int) -> tuple[float, float] | None: ...
    @property
    def segment_found(self) -> tuple[str, str, bool] | None: ...
    @property
    def cold_slots(self) -> tuple[list[int], bool] | None: ...
    @property
    def read_problem(self) -> str: ...
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
    def start_trace(self, most: int) -> None: ...
    def stop_trace(self) -> tuple[NDArray[np.int64], int]: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def weights_digest(self) -> int: ...
    @property
    def numa_bound(self) -> bool: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def spin_microseconds(self) -> int: ...
    @property
    def isa(self) -> str: ...

# --- dense layers (kernels/bindings/bind_dense.cc); numbers of memory are addresses in this process ---------

class RoutingRule:
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        num_groups: int,
        top_groups: int,
        group_by_maximum: bool,
        score: int,
        post: int,
        softcap: float,
        epsilon: float,
        scale: float,
    ) -> None: ...

class DenseThreads:
    def __init__(self, num_threads: int, isa: str = "auto") -> None: ...
    def add_norm(
        self,
        residual: int,
        is_bfloat16: bool,
        update: int,
        update_is_bfloat16: bool,
        weight: int,
        weight_is_bfloat16: bool,
        output: int,
        eps: float,
        size: int,
        num_rows: int,
    ) -> None: ...
    def gate(self, is_bfloat16: bool, gate_up: int, output: int, size: int, num_rows: int) -> None: ...
    def silu(
        self, is_bfloat16: bool, values: int, stride: int, output: int, size: int, num_rows: int
    ) -> None: ...
    def rotate_and_append(
        self,
        is_bfloat16: bool,
        heads: int,
        heads_stride: int,
        num_heads: int,
        num_query_heads: int,
        head_dim: int,
        query_weight: int,
        key_weight: int,
        weights_are_bfloat16: bool,
        eps: float,
        cosine: int,
        sine: int,
        rotary_dim: int,
        interleaved: bool,
        values: int,
        values_stride: int,
        slots: int,
        slot_mapping: int,
        num_rows: int,
        is_float8: bool = False,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None: ...
    def rotate(
        self,
        is_bfloat16: bool,
        heads: int,
        heads_stride: int,
        num_heads: int,
        head_dim: int,
        head_stride: int,
        cosine: int,
        sine: int,
        rotary_dim: int,
        interleaved: bool,
        num_rows: int,
    ) -> None: ...
    def attend(
        self,
        is_bfloat16: bool,
        query: int,
        query_stride: int,
        pages: int,
        page_size: int,
        block_table: int,
        table_stride: int,
        requests: int,
        begins: int,
        ends: int,
        sinks: int,
        output: int,
        scale: float,
        num_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        is_prompt: bool = False,
        is_float8: bool = False,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None: ...
    def multiply_heads(
        self,
        is_bfloat16: bool,
        rows: int,
        row_stride: int,
        head_stride: int,
        matrices: int,
        matrix_stride: int,
        output: int,
        num_rows: int,
        num_heads: int,
        matrix_rows: int,
        latent_dim: int,
        is_transposed: bool,
    ) -> None: ...
    def attend_latents(
        self,
        is_bfloat16: bool,
        query: int,
        query_rope: int,
        rope_row_stride: int,
        rope_head_stride: int,
        pages: int,
        page_size: int,
        block_table: int,
        table_stride: int,
        requests: int,
        ends: int,
        sinks: int,
        output: int,
        scale: float,
        num_rows: int,
        num_heads: int,
        latent_dim: int,
        rope_dim: int,
        is_float8: bool = False,
        page_scale: float = 1.0,
    ) -> None: ...
    def route(
        self,
        logits: int,
        correction: int,
        valid: int,
        weights: int,
        ids: int,
        num_rows: int,
        rule: RoutingRule,
    ) -> None: ...
    def score_experts(
        self,
        hidden_states: int,
        is_bfloat16: bool,
        num_rows: int,
        hidden_size: int,
        weight: int,
        weight_is_bfloat16: bool,
        bias: int,
        logits: int,
        num_experts: int,
    ) -> None: ...
    def convolve(
        self,
        is_bfloat16: bool,
        activates: bool,
        rows: int,
        row_stride: int,
        num_rows: int,
        channels: int,
        width: int,
        states: int,
        reads: int,
        writes: int,
        taps: int,
        bias: int,
        output: int,
    ) -> None: ...
    def update_delta(
        self,
        is_bfloat16: bool,
        qkv: int,
        qkv_stride: int,
        a: int,
        a_stride: int,
        b: int,
        b_stride: int,
        decay: DecayRule,
        states: int,
        reads: int,
        writes: int,
        output: int,
        num_rows: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
    ) -> None: ...
    def update_state_space(
        self,
        is_bfloat16: bool,
        xbc: int,
        xbc_stride: int,
        dt: int,
        dt_stride: int,
        step: StepRule,
        states: int,
        reads: int,
        writes: int,
        output: int,
        num_rows: int,
        num_groups: int,
        num_heads: int,
        state_dim: int,
        head_dim: int,
    ) -> None: ...
    def scan(
        self,
        is_bfloat16: bool,
        values: tuple[int, int],
        steps: tuple[int, int],
        write: tuple[int, int],
        read: tuple[int, int],
        gates: tuple[int, int],
        a_log: int,
        skip: int,
        states: int,
        reads: int,
        writes: int,
        output: int,
        num_rows: int,
        channels: int,
        state_dim: int,
    ) -> None: ...
    def gated_group_norm(
        self,
        is_bfloat16: bool,
        values: int,
        gates: int,
        gates_stride: int,
        weight: int,
        output: int,
        eps: float,
        size: int,
        num_groups: int,
        num_rows: int,
    ) -> None: ...
    def gated_norm(
        self,
        is_bfloat16: bool,
        is_sigmoid: bool,
        values: int,
        gates: int,
        gates_stride: int,
        weight: int,
        output: int,
        eps: float,
        size: int,
        num_heads: int,
        num_rows: int,
    ) -> None: ...
    def apply_gate(
        self,
        is_bfloat16: bool,
        is_softplus: bool,
        values: int,
        gates: int,
        gates_stride: int,
        output: int,
        size: int,
        num_gates: int,
        num_rows: int,
    ) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...

class DenseMatrix:
    def __init__(
        self,
        threads: DenseThreads,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        memory: int,
        memory_bytes: int,
    ) -> None: ...
    def pack(self, part: int, first_row: int, source: SourceMatrix) -> None: ...
    def calibrate(self) -> None: ...
    def multiply(
        self,
        rows: int,
        row_stride: int,
        num_rows: int,
        rows_are_bfloat16: bool,
        output: int,
        output_stride: int,
        output_is_bfloat16: bool,
        bias: int = 0,
    ) -> None: ...
    def take_rows(self, ids: int, count: int, target: int, target_is_bfloat16: bool) -> None: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...

# --- layers of a decoder (kernels/bindings/bind_decoder.cc); see kernels/dense/decoder_layers.h -------------

class NormWeights:
    def __init__(self, weight: int, is_bfloat16: bool, eps: float) -> None: ...

# A matrix, the address of its bias (0: none), and that of the order of its product's columns (0: as stored).
_Projection = tuple[DenseMatrix, int, int]

class AttentionWeights:
    def __init__(
        self,
        *,
        qkv: _Projection,
        output: _Projection,
        gate: _Projection | None,
        gates_are_softplus: bool,
        query_norm: int,
        key_norm: int,
        norms_are_bfloat16: bool,
        norms_are_full_width: bool,
        norm_eps: float,
        sinks: int,
        pages: int,
        page_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        rotation: int | None,
        sight: int,
        storage: tuple[bool, float, float],
    ) -> None: ...

class LatentWeights:
    def __init__(
        self,
        *,
        narrow: _Projection,
        query: _Projection,
        output: _Projection,
        query_norm: NormWeights | None,
        latent_norm: NormWeights,
        heads: int,
        sinks: int,
        pages: int,
        page_size: int,
        num_heads: int,
        latent_dim: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        scale: float,
        rotation: int | None,
        sight: int,
        storage: tuple[bool, float, float],
    ) -> None: ...

class DecayRule:
    def __init__(
        self, a_log: int, dt_bias: int, is_by_element: bool = False, bound: float | None = None
    ) -> None: ...

class DeltaWeights:
    def __init__(
        self,
        *,
        input: _Projection,
        decays: _Projection | None,
        gates: _Projection | None,
        output: _Projection,
        b_column: int,
        a_column: int,
        gate_column: int,
        taps: int,
        bias: int,
        width: int,
        decay: DecayRule,
        norm: int,
        norm_eps: float,
        gates_are_sigmoid: bool,
        recent: int,
        states: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
    ) -> None: ...

class ShortConvWeights:
    def __init__(
        self,
        *,
        input: _Projection,
        output: _Projection,
        taps: int,
        bias: int,
        width: int,
        recent: int,
        channels: int,
    ) -> None: ...

class StepRule:
    def __init__(self, a_log: int, dt_bias: int, skip: int) -> None: ...

class StateSpaceWeights:
    def __init__(
        self,
        *,
        input: _Projection,
        output: _Projection,
        taps: int,
        bias: int,
        width: int,
        step: StepRule,
        norm: int,
        norm_eps: float,
        recent: int,
        states: int,
        num_groups: int,
        num_heads: int,
        state_dim: int,
        head_dim: int,
    ) -> None: ...

class SelectiveScanWeights:
    def __init__(
        self,
        *,
        input: _Projection,
        narrow: _Projection,
        steps: _Projection,
        output: _Projection,
        step_norm: NormWeights,
        write_norm: NormWeights,
        read_norm: NormWeights,
        taps: int,
        bias: int,
        width: int,
        a_log: int,
        skip: int,
        recent: int,
        states: int,
        channels: int,
        state_dim: int,
    ) -> None: ...

class LightningWeights:
    def __init__(
        self,
        *,
        input: _Projection,
        output: _Projection,
        step: StepRule,
        norm: NormWeights,
        states: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
    ) -> None: ...

class MlpWeights:
    def __init__(
        self, gate_up: _Projection, down: _Projection, output_gate: int, is_squared_relu: bool = False
    ) -> None: ...

class RouterWeights:
    def __init__(
        self,
        weight: int,
        is_bfloat16: bool,
        bias: int,
        correction: int,
        rule: RoutingRule,
        inputs: _Projection | None = None,
        outputs: _Projection | None = None,
    ) -> None: ...

class LayerWeights:
    def __init__(
        self,
        input_norm: NormWeights | None,
        mixer: AttentionWeights
        | LatentWeights
        | DeltaWeights
        | ShortConvWeights
        | StateSpaceWeights
        | SelectiveScanWeights
        | LightningWeights
        | None,
        ffn_norm: NormWeights | None,
        mlp: MlpWeights | None,
        router: RouterWeights | None,
        layer: int,
        residual_scale: float = 1.0,
        normed_stream: tuple[float, float, float, float] | None = None,
    ) -> None: ...

class RoutedExperts: ...

class MailboxExperts(RoutedExperts):
    def __init__(self, mailbox: Mailbox) -> None: ...
    def use(self, slot: int, deadline_ms: int) -> None: ...
    def take_times(self) -> tuple[int, int, int, int, list[int]]: ...

class DecoderLayers:
    def __init__(
        self, threads: DenseThreads, is_bfloat16: bool, hidden_size: int, layers: Sequence[LayerWeights]
    ) -> None: ...
    def run(
        self,
        experts: RoutedExperts | None,
        residual: int,
        update: int,
        num_rows: int,
        slot_mapping: int,
        block_table: int,
        table_stride: int,
        requests: int,
        rotations: Sequence[tuple[int, int, int, bool]],
        sights: Sequence[tuple[int, int]],
        state_reads: int,
        state_writes: int,
        noted: Sequence[tuple[int, int]] = (),
    ) -> None: ...

# --- weight formats (kernels/bindings/bind_format.cc) -----------------------------------------------------

PANEL_COLUMNS: int

class FormatFields(TypedDict):
    code: Code
    bits: int
    scale: ScaleType | None
    group_size: int
    panel_scale: bool
    zeros: bool
    mins: bool
    column_scale: bool
    quantised_rows: bool
    ordered: bool

class PanelFields(TypedDict):
    k: int
    has_bias: bool
    k_padded: int
    groups: int
    scales_offset: int
    zeros_offset: int
    mins_offset: int
    column_scale_offset: int
    bias_offset: int
    panel_bytes: int

class ExpertFields(TypedDict):
    gated: bool
    panels_per_column_block: int
    intermediate_blocks: int
    down_panels: int
    mixed: bool
    gate_step: int
    up_offset: int
    up_step: int
    down_offset: int
    order_offset: int
    expert_bytes: int

def weight_formats() -> dict[str, FormatFields]: ...
def grid_rows(code: str) -> NDArray[np.uint8]: ...
def panel_layout(format: str, k: int, has_bias: bool = False) -> PanelFields: ...
def expert_layout(
    gate_up_format: str,
    down_format: str,
    hidden_size: int,
    intermediate_size: int,
    gated: bool,
    has_bias: bool,
) -> ExpertFields: ...
def unsupported_reason(format: str, source: SourceMatrix | NDArray[Any]) -> str: ...
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
    into: NDArray[np.uint8] | None = None,
) -> tuple[NDArray[np.uint8], float, float]: ...
def pack_experts(
    gate_up_format: str,
    down_format: str,
    experts: Sequence[tuple[_Source | None, _Source, _Source]],
    *,
    has_bias: bool = False,
    into: Sequence[NDArray[np.uint8]],
    seeds: Sequence[int],
) -> list[tuple[int, float, float]]: ...
def copy_weights(
    sources: Sequence[NDArray[np.uint8]], targets: Sequence[NDArray[np.uint8]], seeds: Sequence[int]
) -> list[int]: ...
def unpack_matrix(
    format: str, packed: NDArray[np.uint8], rows: int, k: int, has_bias: bool = False
) -> NDArray[np.float32]: ...
def unpack_bias(format: str, packed: NDArray[np.uint8], rows: int, k: int) -> NDArray[np.float32]: ...
def dequantise_matrix(source: SourceMatrix | NDArray[Any]) -> NDArray[np.float32]: ...
def requantise_matrix(
    format: str, source: SourceMatrix | NDArray[Any]
) -> tuple[NDArray[np.uint8], float, float]: ...
def take_gguf_part(type: str, part: str, blocks: NDArray[np.uint8], output: NDArray[Any]) -> None: ...

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

# --- rows of tables in files (kernels/bindings/bind_files.cc) ---------------------------------------------

class ReadError(OSError): ...

class ReadThreads:
    """Threads that read rows of all tables of a process."""

    def __init__(self, num_threads: int) -> None: ...

class RowReader:
    """A table in files: tensors with equally many rows, each by the bytes of a row and its parts, which are
    path, offset of the first row in bytes, and number of rows.
    """

    def __init__(
        self,
        threads: ReadThreads,
        tensors: Sequence[tuple[int, list[tuple[str, int, int]]]],
        kept_bytes: int,
    ) -> None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def is_direct(self) -> bool: ...
    @property
    def counters(self) -> tuple[int, int]:
        """Rows that were read so far, and rows that were still kept."""

class RowFetch:
    """Distinct rows on their way, which threads began to read when this was made."""

    def __init__(self, reader: RowReader, rows: NDArray[np.int64]) -> None: ...
    def wait(self) -> tuple[NDArray[np.int64], list[NDArray[np.uint8]]]:
        """Returns the place of each number among the distinct rows, -1 outside the table, and those rows of
        each tensor as bytes `[distinct, row_bytes]`. Raises ReadError.
        """

# --- segments of packed experts (kernels/bindings/bind_mailbox_layout.cc) -------------------------------

class SegmentError(RuntimeError): ...
class DamagedExpert(RuntimeError): ...

WEIGHT_SEGMENT_MAGIC: int
WEIGHT_SEGMENT_ABI_VERSION: int

def weight_segment_layout() -> dict[str, tuple[int, dict[str, tuple[int, int]]]]: ...
def map_shared(path: str, nbytes: int) -> NDArray[np.uint8]: ...
def weight_digest(data: bytes | NDArray[np.uint8], seed: int) -> int: ...

# --- placement of experts (kernels/bindings/bind_placement.cc) ------------------------------------------

def worthwhile_exchanges(
    expected: NDArray[np.float64], resident: NDArray[np.bool_], copy_price: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]: ...

class RoutingForecast:
    def __init__(self, half_lives: Sequence[float], resident: NDArray[np.bool_], top_k: float) -> None: ...
    def observe(self, decode: NDArray[np.int64], prefill: NDArray[np.int64], copy_price: float) -> None: ...
    def forecast(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]: ...
    @property
    def sums(self) -> NDArray[np.float64]: ...
    @property
    def tokens(self) -> NDArray[np.float64]: ...

# --- mailbox (kernels/bindings/bind_mailbox.cc) ------------------------------------------------------------

MAILBOX_ABI_VERSION: int
MAILBOX_MAGIC: int
MAILBOX_MAX_SERVERS: int

class ClientFailure(IntEnum):
    """Why a client gave up a step; numbers and names of `ClientFailure` in layout.h."""

    NONE = ...
    DEADLINE = ...
    STALE_EPOCH = ...
    COMPUTE = ...
    RESTARTED = ...
    ABANDONED = ...
    PEER = ...
    SHUT_DOWN = ...

class RegionFields(TypedDict):
    flags: int
    requests: int
    responses: int
    total: int
    hidden_states: int
    topk_ids: int
    topk_weights: int
    output: int
    request_stride: int
    response_stride: int

def mailbox_layout() -> dict[str, tuple[int, dict[str, tuple[int, int]]]]: ...
def mailbox_regions(
    *,
    hidden_size: int,
    top_k: int,
    num_slots: int,
    max_rows: int,
    num_servers: int,
    dtype: int,
    num_clients: int,
) -> RegionFields: ...
def mailbox_row_begin(rows: int, client: int, num_clients: int) -> int: ...

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
    damages: int
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
    def damages(self) -> int: ...
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
    def note_damage(self) -> None: ...
    def note_problem(self, reason: str) -> None: ...
    def start(self, weights_digest: int = 0) -> None: ...
    def beat(self) -> None: ...
    def drain(self, timeout_s: float) -> bool: ...
    def stop(self) -> None: ...
    def take_traced_calls(self) -> list[tuple[bytes, bytes, int, int, int, int, int]]: ...

def mailbox_unlink(name: str) -> bool: ...
def mailbox_is_stale(name: str) -> bool: ...
def mailbox_health(name: str) -> list[MailboxServerState]: ...
def mailbox_identity_difference(expected: str, found: str) -> str: ...
