from protos import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("hello", "welcome", "refused", "heartbeat", "iteration", "exchange", "fatal", "goodbye", "report")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    welcome: Welcome
    refused: str
    heartbeat: Heartbeat
    iteration: Iteration
    exchange: Exchange
    fatal: str
    goodbye: Goodbye
    report: Report
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[str] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., iteration: _Optional[_Union[Iteration, _Mapping]] = ..., exchange: _Optional[_Union[Exchange, _Mapping]] = ..., fatal: _Optional[str] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "rank", "size", "fingerprint", "identity")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    rank: int
    size: int
    fingerprint: str
    identity: str
    def __init__(self, protocol: _Optional[int] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., fingerprint: _Optional[str] = ..., identity: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("store_port",)
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    store_port: int
    def __init__(self, store_port: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("waited_s",)
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    waited_s: float
    def __init__(self, waited_s: _Optional[float] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Report(_message.Message):
    __slots__ = ("fetch", "blocks")
    FETCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    fetch: int
    blocks: int
    def __init__(self, fetch: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class Exchange(_message.Message):
    __slots__ = ("what", "values")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    what: str
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, what: _Optional[str] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...

class Iteration(_message.Message):
    __slots__ = ("messages", "images", "sight", "goes_on")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SIGHT_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    images: _containers.RepeatedCompositeFieldContainer[Image]
    sight: LaneSight
    goes_on: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., sight: _Optional[_Union[LaneSight, _Mapping]] = ..., goes_on: _Optional[bool] = ...) -> None: ...

class LaneSight(_message.Message):
    __slots__ = ("lane_has_ended", "main_has_ended", "is_ready", "min_tokens", "idle_min_tokens", "step_tokens")
    LANE_HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    MAIN_HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lane_has_ended: bool
    main_has_ended: bool
    is_ready: bool
    min_tokens: int
    idle_min_tokens: int
    step_tokens: int
    def __init__(self, lane_has_ended: _Optional[bool] = ..., main_has_ended: _Optional[bool] = ..., is_ready: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., idle_min_tokens: _Optional[int] = ..., step_tokens: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("add", "abort_request_id", "flush", "call", "stop")
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    add: Add
    abort_request_id: str
    flush: Flush
    call: Call
    stop: Stop
    def __init__(self, add: _Optional[_Union[Add, _Mapping]] = ..., abort_request_id: _Optional[str] = ..., flush: _Optional[_Union[Flush, _Mapping]] = ..., call: _Optional[_Union[Call, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class Add(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("request_id", "index", "priority", "cache_namespace", "prompt_token_ids", "params", "images", "constraint", "sees_ahead", "fairness_id", "keep_prefix_s", "arrived_s", "blocks_on_disk")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    SEES_AHEAD_FIELD_NUMBER: _ClassVar[int]
    FAIRNESS_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_PREFIX_S_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    priority: int
    cache_namespace: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    params: _engine_pb2.SamplingParams
    images: _containers.RepeatedCompositeFieldContainer[ImagePlace]
    constraint: _engine_pb2.Constraint
    sees_ahead: bool
    fairness_id: str
    keep_prefix_s: float
    arrived_s: float
    blocks_on_disk: bytes
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., priority: _Optional[int] = ..., cache_namespace: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[_engine_pb2.SamplingParams, _Mapping]] = ..., images: _Optional[_Iterable[_Union[ImagePlace, _Mapping]]] = ..., constraint: _Optional[_Union[_engine_pb2.Constraint, _Mapping]] = ..., sees_ahead: _Optional[bool] = ..., fairness_id: _Optional[str] = ..., keep_prefix_s: _Optional[float] = ..., arrived_s: _Optional[float] = ..., blocks_on_disk: _Optional[bytes] = ...) -> None: ...

class ImagePlace(_message.Message):
    __slots__ = ("image", "start", "first", "count")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    image: int
    start: int
    first: int
    count: int
    def __init__(self, image: _Optional[int] = ..., start: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("key", "grid", "token_grid", "shape", "pixels")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_GRID_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    key: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    token_grid: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    pixels: bytes
    def __init__(self, key: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ..., token_grid: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ..., pixels: _Optional[bytes] = ...) -> None: ...

class Flush(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Call(_message.Message):
    __slots__ = ("operation", "argument")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    ARGUMENT_FIELD_NUMBER: _ClassVar[int]
    operation: str
    argument: str
    def __init__(self, operation: _Optional[str] = ..., argument: _Optional[str] = ...) -> None: ...
