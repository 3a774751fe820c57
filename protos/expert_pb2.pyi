from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]

class ExpertSplit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPERT_SPLIT_UNSPECIFIED: _ClassVar[ExpertSplit]
    EXPERT_SPLIT_TENSOR: _ClassVar[ExpertSplit]
    EXPERT_SPLIT_EXPERT: _ClassVar[ExpertSplit]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT16: DType
EXPERT_SPLIT_UNSPECIFIED: ExpertSplit
EXPERT_SPLIT_TENSOR: ExpertSplit
EXPERT_SPLIT_EXPERT: ExpertSplit

class LoadRequest(_message.Message):
    __slots__ = ("model_path", "split", "split_index", "split_count", "split_shares", "weight_dtype", "top_k", "expert_dtype", "expert_checkpoint", "mtp_heads")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SPLIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_SHARES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    EXPERT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    MTP_HEADS_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    split: ExpertSplit
    split_index: int
    split_count: int
    split_shares: _containers.RepeatedScalarFieldContainer[int]
    weight_dtype: DType
    top_k: int
    expert_dtype: str
    expert_checkpoint: str
    mtp_heads: int
    def __init__(self, model_path: _Optional[str] = ..., split: _Optional[_Union[ExpertSplit, str]] = ..., split_index: _Optional[int] = ..., split_count: _Optional[int] = ..., split_shares: _Optional[_Iterable[int]] = ..., weight_dtype: _Optional[_Union[DType, str]] = ..., top_k: _Optional[int] = ..., expert_dtype: _Optional[str] = ..., expert_checkpoint: _Optional[str] = ..., mtp_heads: _Optional[int] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("packed_bytes", "seconds")
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    packed_bytes: int
    seconds: float
    def __init__(self, packed_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class LayerError(_message.Message):
    __slots__ = ("layer", "relative_error")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    layer: int
    relative_error: float
    def __init__(self, layer: _Optional[int] = ..., relative_error: _Optional[float] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("version", "abi_version", "model_path", "hidden_size", "num_layers", "num_experts", "top_k", "split", "split_index", "split_count", "intermediate_begin", "intermediate_end", "expert_begin", "expert_end", "weight_dtype", "packed_bytes", "isa", "num_threads", "numa_node", "cpus", "pid", "weight_format", "requantise_errors", "identity", "weights_digest", "instance_id", "calibrated_bytes_per_second", "problem")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ABI_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SPLIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_BEGIN_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_END_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    EXPERT_END_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    REQUANTISE_ERRORS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    version: str
    abi_version: int
    model_path: str
    hidden_size: int
    num_layers: int
    num_experts: int
    top_k: int
    split: ExpertSplit
    split_index: int
    split_count: int
    intermediate_begin: int
    intermediate_end: int
    expert_begin: int
    expert_end: int
    weight_dtype: DType
    packed_bytes: int
    isa: str
    num_threads: int
    numa_node: int
    cpus: _containers.RepeatedScalarFieldContainer[int]
    pid: int
    weight_format: str
    requantise_errors: _containers.RepeatedCompositeFieldContainer[LayerError]
    identity: str
    weights_digest: int
    instance_id: int
    calibrated_bytes_per_second: float
    problem: str
    def __init__(self, version: _Optional[str] = ..., abi_version: _Optional[int] = ..., model_path: _Optional[str] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., top_k: _Optional[int] = ..., split: _Optional[_Union[ExpertSplit, str]] = ..., split_index: _Optional[int] = ..., split_count: _Optional[int] = ..., intermediate_begin: _Optional[int] = ..., intermediate_end: _Optional[int] = ..., expert_begin: _Optional[int] = ..., expert_end: _Optional[int] = ..., weight_dtype: _Optional[_Union[DType, str]] = ..., packed_bytes: _Optional[int] = ..., isa: _Optional[str] = ..., num_threads: _Optional[int] = ..., numa_node: _Optional[int] = ..., cpus: _Optional[_Iterable[int]] = ..., pid: _Optional[int] = ..., weight_format: _Optional[str] = ..., requantise_errors: _Optional[_Iterable[_Union[LayerError, _Mapping]]] = ..., identity: _Optional[str] = ..., weights_digest: _Optional[int] = ..., instance_id: _Optional[int] = ..., calibrated_bytes_per_second: _Optional[float] = ..., problem: _Optional[str] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LayerStats(_message.Message):
    __slots__ = ("layer", "calls", "rows", "expert_rows", "experts", "busy_seconds")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ROWS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    calls: int
    rows: int
    expert_rows: _containers.RepeatedScalarFieldContainer[int]
    experts: int
    busy_seconds: float
    def __init__(self, layer: _Optional[int] = ..., calls: _Optional[int] = ..., rows: _Optional[int] = ..., expert_rows: _Optional[_Iterable[int]] = ..., experts: _Optional[int] = ..., busy_seconds: _Optional[float] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("calls", "rows", "busy_seconds", "layers", "nonfinite_outputs", "nonfinite_inputs", "weight_bytes", "damaged_experts", "repaired_experts")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_INPUTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    calls: int
    rows: int
    busy_seconds: float
    layers: _containers.RepeatedCompositeFieldContainer[LayerStats]
    nonfinite_outputs: int
    nonfinite_inputs: int
    weight_bytes: int
    damaged_experts: int
    repaired_experts: int
    def __init__(self, calls: _Optional[int] = ..., rows: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., layers: _Optional[_Iterable[_Union[LayerStats, _Mapping]]] = ..., nonfinite_outputs: _Optional[int] = ..., nonfinite_inputs: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., damaged_experts: _Optional[int] = ..., repaired_experts: _Optional[int] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("seconds", "most_spans")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MOST_SPANS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    most_spans: int
    def __init__(self, seconds: _Optional[float] = ..., most_spans: _Optional[int] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("spans", "dropped", "num_threads")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    spans: bytes
    dropped: int
    num_threads: int
    def __init__(self, spans: _Optional[bytes] = ..., dropped: _Optional[int] = ..., num_threads: _Optional[int] = ...) -> None: ...

class GetClockRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClockResponse(_message.Message):
    __slots__ = ("monotonic_nanoseconds", "boot_id")
    MONOTONIC_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    monotonic_nanoseconds: int
    boot_id: str
    def __init__(self, monotonic_nanoseconds: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ComputeRequest(_message.Message):
    __slots__ = ("epoch", "layer", "rows", "dtype", "hidden_states", "topk_ids", "topk_weights", "traceparent")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    TOPK_IDS_FIELD_NUMBER: _ClassVar[int]
    TOPK_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    layer: int
    rows: int
    dtype: DType
    hidden_states: bytes
    topk_ids: bytes
    topk_weights: bytes
    traceparent: str
    def __init__(self, epoch: _Optional[int] = ..., layer: _Optional[int] = ..., rows: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., hidden_states: _Optional[bytes] = ..., topk_ids: _Optional[bytes] = ..., topk_weights: _Optional[bytes] = ..., traceparent: _Optional[str] = ...) -> None: ...

class ComputeResponse(_message.Message):
    __slots__ = ("epoch", "output", "compute_seconds", "damages")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DAMAGES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    output: bytes
    compute_seconds: float
    damages: int
    def __init__(self, epoch: _Optional[int] = ..., output: _Optional[bytes] = ..., compute_seconds: _Optional[float] = ..., damages: _Optional[int] = ...) -> None: ...
