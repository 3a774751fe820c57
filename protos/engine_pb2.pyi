from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_NONE: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]

class ImageDetail(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMAGE_DETAIL_HIGH: _ClassVar[ImageDetail]
    IMAGE_DETAIL_LOW: _ClassVar[ImageDetail]
POOLING_NONE: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
IMAGE_DETAIL_HIGH: ImageDetail
IMAGE_DETAIL_LOW: ImageDetail

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "n", "logprobs", "prompt_logprobs", "seed", "logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids", "pooling")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pooling: Pooling
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., pooling: _Optional[_Union[Pooling, str]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenizedInput(_message.Message):
    __slots__ = ("original_text", "input_ids")
    ORIGINAL_TEXT_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    original_text: str
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, original_text: _Optional[str] = ..., input_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ImageInput(_message.Message):
    __slots__ = ("data", "detail")
    DATA_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    detail: ImageDetail
    def __init__(self, data: _Optional[bytes] = ..., detail: _Optional[_Union[ImageDetail, str]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "tokenized", "sampling_params", "stream", "trace_context", "priority", "cache_salt", "images", "constraint", "fairness_id", "model_identity", "keep_prefix_s", "keep_alive_s")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    FAIRNESS_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    KEEP_PREFIX_S_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokenized: TokenizedInput
    sampling_params: SamplingParams
    stream: bool
    trace_context: _containers.ScalarMap[str, str]
    priority: int
    cache_salt: str
    images: _containers.RepeatedCompositeFieldContainer[ImageInput]
    constraint: Constraint
    fairness_id: str
    model_identity: str
    keep_prefix_s: float
    keep_alive_s: float
    def __init__(self, request_id: _Optional[str] = ..., tokenized: _Optional[_Union[TokenizedInput, _Mapping]] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., stream: _Optional[bool] = ..., trace_context: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., images: _Optional[_Iterable[_Union[ImageInput, _Mapping]]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., fairness_id: _Optional[str] = ..., model_identity: _Optional[str] = ..., keep_prefix_s: _Optional[float] = ..., keep_alive_s: _Optional[float] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "lark", "json_object", "choice", "structural_tag", "ebnf", "after_token_ids", "start_token_ids", "max_reasoning_tokens", "forced_token_ids", "no_whitespace")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    AFTER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NO_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    json_object: bool
    choice: Choice
    structural_tag: str
    ebnf: str
    after_token_ids: _containers.RepeatedScalarFieldContainer[int]
    start_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_reasoning_tokens: int
    forced_token_ids: _containers.RepeatedScalarFieldContainer[int]
    no_whitespace: bool
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., json_object: _Optional[bool] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., structural_tag: _Optional[str] = ..., ebnf: _Optional[str] = ..., after_token_ids: _Optional[_Iterable[int]] = ..., start_token_ids: _Optional[_Iterable[int]] = ..., max_reasoning_tokens: _Optional[int] = ..., forced_token_ids: _Optional[_Iterable[int]] = ..., no_whitespace: _Optional[bool] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, options: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("requests", "takes_tokens")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TAKES_TOKENS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[CallRequest]
    takes_tokens: bool
    def __init__(self, requests: _Optional[_Iterable[_Union[CallRequest, _Mapping]]] = ..., takes_tokens: _Optional[bool] = ...) -> None: ...

class GenerateWithImagesRequest(_message.Message):
    __slots__ = ("request", "piece")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    piece: ImagePiece
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., piece: _Optional[_Union[ImagePiece, _Mapping]] = ...) -> None: ...

class ImagePiece(_message.Message):
    __slots__ = ("image", "data")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    image: int
    data: bytes
    def __init__(self, image: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class CallRequest(_message.Message):
    __slots__ = ("call", "start", "cancel")
    CALL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    call: int
    start: GenerateRequest
    cancel: bool
    def __init__(self, call: _Optional[int] = ..., start: _Optional[_Union[GenerateRequest, _Mapping]] = ..., cancel: _Optional[bool] = ...) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("updates",)
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[CallUpdate]
    def __init__(self, updates: _Optional[_Iterable[_Union[CallUpdate, _Mapping]]] = ...) -> None: ...

class CallUpdate(_message.Message):
    __slots__ = ("call", "response", "end", "tokens")
    CALL_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    call: int
    response: GenerateResponse
    end: CallEnd
    tokens: CallTokens
    def __init__(self, call: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., end: _Optional[_Union[CallEnd, _Mapping]] = ..., tokens: _Optional[_Union[CallTokens, _Mapping]] = ...) -> None: ...

class CallTokens(_message.Message):
    __slots__ = ("calls", "token_ids", "completion_tokens")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    completion_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, calls: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., completion_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class CallEnd(_message.Message):
    __slots__ = ("code", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ...) -> None: ...

class OutputLogProbs(_message.Message):
    __slots__ = ("token_logprobs", "token_ids", "top_logprobs")
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogProbs]
    def __init__(self, token_logprobs: _Optional[_Iterable[float]] = ..., token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogProbs, _Mapping]]] = ...) -> None: ...

class InputLogProbs(_message.Message):
    __slots__ = ("token_logprobs", "token_ids", "top_logprobs")
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_logprobs: _containers.RepeatedCompositeFieldContainer[InputTokenLogProb]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogProbs]
    def __init__(self, token_logprobs: _Optional[_Iterable[_Union[InputTokenLogProb, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogProbs, _Mapping]]] = ...) -> None: ...

class InputTokenLogProb(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class TopLogProbs(_message.Message):
    __slots__ = ("values", "token_ids")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[float]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("chunk", "complete")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    chunk: GenerateStreamChunk
    complete: GenerateComplete
    def __init__(self, chunk: _Optional[_Union[GenerateStreamChunk, _Mapping]] = ..., complete: _Optional[_Union[GenerateComplete, _Mapping]] = ...) -> None: ...

class GenerateStreamChunk(_message.Message):
    __slots__ = ("token_ids", "prompt_tokens", "completion_tokens", "cached_tokens", "output_logprobs", "input_logprobs", "index", "accepted_draft_tokens", "rejected_draft_tokens", "complete_follows")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_logprobs: OutputLogProbs
    input_logprobs: InputLogProbs
    index: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    complete_follows: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_logprobs: _Optional[_Union[OutputLogProbs, _Mapping]] = ..., input_logprobs: _Optional[_Union[InputLogProbs, _Mapping]] = ..., index: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., rejected_draft_tokens: _Optional[int] = ..., complete_follows: _Optional[bool] = ...) -> None: ...

class GenerateComplete(_message.Message):
    __slots__ = ("output_ids", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "output_logprobs", "input_logprobs", "index", "matched_token_id", "error_message", "first_token_seconds", "pooled_hidden_states", "accepted_draft_tokens", "rejected_draft_tokens", "constraint_failed")
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOLED_HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FAILED_FIELD_NUMBER: _ClassVar[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_logprobs: OutputLogProbs
    input_logprobs: InputLogProbs
    index: int
    matched_token_id: int
    error_message: str
    first_token_seconds: float
    pooled_hidden_states: _containers.RepeatedScalarFieldContainer[float]
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    constraint_failed: bool
    def __init__(self, output_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_logprobs: _Optional[_Union[OutputLogProbs, _Mapping]] = ..., input_logprobs: _Optional[_Union[InputLogProbs, _Mapping]] = ..., index: _Optional[int] = ..., matched_token_id: _Optional[int] = ..., error_message: _Optional[str] = ..., first_token_seconds: _Optional[float] = ..., pooled_hidden_states: _Optional[_Iterable[float]] = ..., accepted_draft_tokens: _Optional[int] = ..., rejected_draft_tokens: _Optional[int] = ..., constraint_failed: _Optional[bool] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids", "reason")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model_path", "is_generation", "max_context_length", "vocab_size", "supports_vision", "served_model_name", "tokenizer_path", "model_type", "architectures", "eos_token_ids", "pad_token_id", "bos_token_id", "max_req_input_len", "default_sampling_params_json", "image_token_id", "max_waiting_requests", "hidden_size", "identity")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    IS_GENERATION_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_VISION_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURES_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAD_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_REQ_INPUT_LEN_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_JSON_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    is_generation: bool
    max_context_length: int
    vocab_size: int
    supports_vision: bool
    served_model_name: str
    tokenizer_path: str
    model_type: str
    architectures: _containers.RepeatedScalarFieldContainer[str]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pad_token_id: int
    bos_token_id: int
    max_req_input_len: int
    default_sampling_params_json: str
    image_token_id: int
    max_waiting_requests: int
    hidden_size: int
    identity: str
    def __init__(self, model_path: _Optional[str] = ..., is_generation: _Optional[bool] = ..., max_context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., supports_vision: _Optional[bool] = ..., served_model_name: _Optional[str] = ..., tokenizer_path: _Optional[str] = ..., model_type: _Optional[str] = ..., architectures: _Optional[_Iterable[str]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., pad_token_id: _Optional[int] = ..., bos_token_id: _Optional[int] = ..., max_req_input_len: _Optional[int] = ..., default_sampling_params_json: _Optional[str] = ..., image_token_id: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., hidden_size: _Optional[int] = ..., identity: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("timestamp", "version", "num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage", "gen_throughput", "cache_hit_rate", "max_running_requests", "num_preemptions", "num_cached_tokens", "draft_tokens", "accepted_tokens", "is_sleeping")
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_USAGE_FIELD_NUMBER: _ClassVar[int]
    GEN_THROUGHPUT_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_SLEEPING_FIELD_NUMBER: _ClassVar[int]
    timestamp: str
    version: str
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    max_running_requests: int
    num_preemptions: int
    num_cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    is_sleeping: bool
    def __init__(self, timestamp: _Optional[str] = ..., version: _Optional[str] = ..., num_running_reqs: _Optional[int] = ..., num_waiting_reqs: _Optional[int] = ..., num_total_reqs: _Optional[int] = ..., num_used_tokens: _Optional[int] = ..., max_total_num_tokens: _Optional[int] = ..., token_usage: _Optional[float] = ..., gen_throughput: _Optional[float] = ..., cache_hit_rate: _Optional[float] = ..., max_running_requests: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., is_sleeping: _Optional[bool] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("force",)
    FORCE_FIELD_NUMBER: _ClassVar[int]
    force: bool
    def __init__(self, force: _Optional[bool] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeUpRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeUpResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text", "servers")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    servers: _containers.RepeatedCompositeFieldContainer[ServerMetrics]
    def __init__(self, text: _Optional[bytes] = ..., servers: _Optional[_Iterable[_Union[ServerMetrics, _Mapping]]] = ...) -> None: ...

class ServerMetrics(_message.Message):
    __slots__ = ("index", "text")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: bytes
    def __init__(self, index: _Optional[int] = ..., text: _Optional[bytes] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("torch_trace", "unix_offset_ns", "servers", "calls", "notes", "engine_end_ns")
    TORCH_TRACE_FIELD_NUMBER: _ClassVar[int]
    UNIX_OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_END_NS_FIELD_NUMBER: _ClassVar[int]
    torch_trace: bytes
    unix_offset_ns: int
    servers: _containers.RepeatedCompositeFieldContainer[ExpertSpans]
    calls: bytes
    notes: _containers.RepeatedScalarFieldContainer[str]
    engine_end_ns: int
    def __init__(self, torch_trace: _Optional[bytes] = ..., unix_offset_ns: _Optional[int] = ..., servers: _Optional[_Iterable[_Union[ExpertSpans, _Mapping]]] = ..., calls: _Optional[bytes] = ..., notes: _Optional[_Iterable[str]] = ..., engine_end_ns: _Optional[int] = ...) -> None: ...

class ExpertSpans(_message.Message):
    __slots__ = ("index", "spans", "dropped", "num_threads", "clock_offset_ns")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    index: int
    spans: bytes
    dropped: int
    num_threads: int
    clock_offset_ns: int
    def __init__(self, index: _Optional[int] = ..., spans: _Optional[bytes] = ..., dropped: _Optional[int] = ..., num_threads: _Optional[int] = ..., clock_offset_ns: _Optional[int] = ...) -> None: ...

class GetLiveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLiveResponse(_message.Message):
    __slots__ = ("load", "prompt_throughput", "first_token", "num_experts", "top_k", "layers", "servers", "streamed_steps", "streamed_bytes", "recorder_is_on", "steps", "step_seconds", "hand_off", "costs", "memory", "tiers")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_THROUGHPUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    STREAMED_STEPS_FIELD_NUMBER: _ClassVar[int]
    STREAMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDER_IS_ON_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    load: GetLoadResponse
    prompt_throughput: float
    first_token: LiveTimes
    num_experts: int
    top_k: int
    layers: _containers.RepeatedCompositeFieldContainer[LiveLayer]
    servers: _containers.RepeatedCompositeFieldContainer[LiveExpertServer]
    streamed_steps: int
    streamed_bytes: int
    recorder_is_on: bool
    steps: int
    step_seconds: float
    hand_off: LiveHandOff
    costs: LiveCosts
    memory: LiveMemory
    tiers: _containers.RepeatedCompositeFieldContainer[CacheTier]
    def __init__(self, load: _Optional[_Union[GetLoadResponse, _Mapping]] = ..., prompt_throughput: _Optional[float] = ..., first_token: _Optional[_Union[LiveTimes, _Mapping]] = ..., num_experts: _Optional[int] = ..., top_k: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LiveLayer, _Mapping]]] = ..., servers: _Optional[_Iterable[_Union[LiveExpertServer, _Mapping]]] = ..., streamed_steps: _Optional[int] = ..., streamed_bytes: _Optional[int] = ..., recorder_is_on: _Optional[bool] = ..., steps: _Optional[int] = ..., step_seconds: _Optional[float] = ..., hand_off: _Optional[_Union[LiveHandOff, _Mapping]] = ..., costs: _Optional[_Union[LiveCosts, _Mapping]] = ..., memory: _Optional[_Union[LiveMemory, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[CacheTier, _Mapping]]] = ...) -> None: ...

class CacheTier(_message.Message):
    __slots__ = ("name", "tokens", "bytes", "total_bytes", "hit_tokens", "kept_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens: int
    bytes: int
    total_bytes: int
    hit_tokens: int
    kept_tokens: int
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., kept_tokens: _Optional[int] = ...) -> None: ...

class LiveMemory(_message.Message):
    __slots__ = ("kv_bytes", "expert_bytes", "stream_bytes", "fetch_bytes", "free_bytes", "is_shared")
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_SHARED_FIELD_NUMBER: _ClassVar[int]
    kv_bytes: int
    expert_bytes: int
    stream_bytes: int
    fetch_bytes: int
    free_bytes: int
    is_shared: bool
    def __init__(self, kv_bytes: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., stream_bytes: _Optional[int] = ..., fetch_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., is_shared: _Optional[bool] = ...) -> None: ...

class LiveCosts(_message.Message):
    __slots__ = ("predicted_seconds", "measured_seconds", "predicted_over_measured", "link_bytes_per_second", "cpu_expert_seconds", "gpu_expert_seconds", "copy_price", "times_measured_again")
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_OVER_MEASURED_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CPU_EXPERT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GPU_EXPERT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COPY_PRICE_FIELD_NUMBER: _ClassVar[int]
    TIMES_MEASURED_AGAIN_FIELD_NUMBER: _ClassVar[int]
    predicted_seconds: float
    measured_seconds: float
    predicted_over_measured: float
    link_bytes_per_second: float
    cpu_expert_seconds: float
    gpu_expert_seconds: float
    copy_price: float
    times_measured_again: int
    def __init__(self, predicted_seconds: _Optional[float] = ..., measured_seconds: _Optional[float] = ..., predicted_over_measured: _Optional[float] = ..., link_bytes_per_second: _Optional[float] = ..., cpu_expert_seconds: _Optional[float] = ..., gpu_expert_seconds: _Optional[float] = ..., copy_price: _Optional[float] = ..., times_measured_again: _Optional[int] = ...) -> None: ...

class LiveHandOff(_message.Message):
    __slots__ = ("calls", "wait_seconds", "seconds")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    calls: int
    wait_seconds: float
    seconds: float
    def __init__(self, calls: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class LiveTimes(_message.Message):
    __slots__ = ("count", "p50", "p95")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P95_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50: float
    p95: float
    def __init__(self, count: _Optional[int] = ..., p50: _Optional[float] = ..., p95: _Optional[float] = ...) -> None: ...

class LiveLayer(_message.Message):
    __slots__ = ("layer", "gpu_experts", "cpu_rows", "cpu_seconds", "cpu_calls", "chosen", "cpu_bytes", "streamed_experts", "streamed_bytes", "decode_choices", "decode_hits", "exchanges", "exchange_bytes", "fetched_experts", "fetched_bytes", "fetch_hits")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    GPU_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    CPU_ROWS_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CPU_CALLS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    CPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAMED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    STREAMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODE_CHOICES_FIELD_NUMBER: _ClassVar[int]
    DECODE_HITS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_HITS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    gpu_experts: _containers.RepeatedScalarFieldContainer[int]
    cpu_rows: _containers.RepeatedScalarFieldContainer[int]
    cpu_seconds: float
    cpu_calls: int
    chosen: _containers.RepeatedScalarFieldContainer[int]
    cpu_bytes: int
    streamed_experts: int
    streamed_bytes: int
    decode_choices: int
    decode_hits: int
    exchanges: int
    exchange_bytes: int
    fetched_experts: int
    fetched_bytes: int
    fetch_hits: int
    def __init__(self, layer: _Optional[int] = ..., gpu_experts: _Optional[_Iterable[int]] = ..., cpu_rows: _Optional[_Iterable[int]] = ..., cpu_seconds: _Optional[float] = ..., cpu_calls: _Optional[int] = ..., chosen: _Optional[_Iterable[int]] = ..., cpu_bytes: _Optional[int] = ..., streamed_experts: _Optional[int] = ..., streamed_bytes: _Optional[int] = ..., decode_choices: _Optional[int] = ..., decode_hits: _Optional[int] = ..., exchanges: _Optional[int] = ..., exchange_bytes: _Optional[int] = ..., fetched_experts: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_hits: _Optional[int] = ...) -> None: ...

class LiveExpertServer(_message.Message):
    __slots__ = ("index", "is_up", "instance_id", "busy_seconds", "weight_bytes", "calibrated_bytes_per_second", "packed_bytes", "weight_format", "isa", "num_threads", "numa_node")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    IS_UP_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    index: int
    is_up: bool
    instance_id: int
    busy_seconds: float
    weight_bytes: int
    calibrated_bytes_per_second: float
    packed_bytes: int
    weight_format: str
    isa: str
    num_threads: int
    numa_node: int
    def __init__(self, index: _Optional[int] = ..., is_up: _Optional[bool] = ..., instance_id: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., weight_bytes: _Optional[int] = ..., calibrated_bytes_per_second: _Optional[float] = ..., packed_bytes: _Optional[int] = ..., weight_format: _Optional[str] = ..., isa: _Optional[str] = ..., num_threads: _Optional[int] = ..., numa_node: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("success", "freed_tokens")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    FREED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    freed_tokens: int
    def __init__(self, success: _Optional[bool] = ..., freed_tokens: _Optional[int] = ...) -> None: ...

class StartExpertRecorderRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: str
    def __init__(self, mode: _Optional[str] = ...) -> None: ...

class StartExpertRecorderResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopExpertRecorderRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopExpertRecorderResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DumpExpertRecorderRequest(_message.Message):
    __slots__ = ("file_format",)
    FILE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    file_format: str
    def __init__(self, file_format: _Optional[str] = ...) -> None: ...

class DumpExpertRecorderResponse(_message.Message):
    __slots__ = ("content", "mode", "steps", "tokens", "layers")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    mode: str
    steps: int
    tokens: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    def __init__(self, content: _Optional[bytes] = ..., mode: _Optional[str] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ...) -> None: ...

class LayerExperts(_message.Message):
    __slots__ = ("layer", "distinct_per_step")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    layer: int
    distinct_per_step: float
    def __init__(self, layer: _Optional[int] = ..., distinct_per_step: _Optional[float] = ...) -> None: ...
