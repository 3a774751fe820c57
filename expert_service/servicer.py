"""Translates between gRPC messages and the host, and `Compute` records and numpy arrays."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import numpy as np
import numpy.typing as npt
import structlog
from opentelemetry.trace import format_trace_id

from expert_service.errors import AlreadyLoaded, LoadCancelled, NotServing
from expert_service.host import ExpertHost, LoadedSlice
from expert_service.spans import Call, SpanRecorder, sampled_parent
from moebius import __version__, _kernels
from moebius.errors import StartupError
from moebius.experts.slices import ExpertDtype, SliceRequest, parse_expert_dtype
from moebius.kernels import DamagedExpert, FloatArray
from moebius.mailbox import MailboxError
from moebius.mailbox.plan import INSTANCE_METADATA, MOST_GRPC_ROWS
from protos import expert_pb2, expert_pb2_grpc
from protos import expert_pb2 as pb

_log = structlog.get_logger(__name__)
_MAX_PROFILE_S = 60.0
# Spans of each thread: the default, and the limit.
_SPANS, _MAX_SPANS = 20_000, 50_000
_SPANS_PER_MESSAGE = 16_384
HIDDEN_DTYPES: dict[int, type[np.generic]] = {
    expert_pb2.DTYPE_FLOAT32: np.float32,
    expert_pb2.DTYPE_BFLOAT16: np.uint16,
    expert_pb2.DTYPE_FLOAT16: np.float16,
}


def decode_request(
    request: expert_pb2.ComputeRequest, hidden_size: int, top_k: int
) -> tuple[FloatArray, npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Returns hidden_states `[rows, hidden_size]`, topk_ids and topk_weights `[rows, top_k]`, uncopied.

    Raises ValueError naming the field whose length does not fit.
    """
    dtype = HIDDEN_DTYPES.get(request.dtype)
    if dtype is None:
        raise ValueError(f"dtype is {request.dtype}; allowed: DTYPE_FLOAT32, DTYPE_BFLOAT16, DTYPE_FLOAT16")
    if request.rows < 1:
        raise ValueError("rows is 0; at least 1 is allowed")
    rows = request.rows
    if rows > MOST_GRPC_ROWS:
        raise ValueError(f"rows is {rows}; at most {MOST_GRPC_ROWS} are allowed in one record")
    hidden_states: Any = _array("hidden_states", request.hidden_states, dtype, rows, hidden_size)
    topk_ids: Any = _array("topk_ids", request.topk_ids, np.int32, rows, top_k)
    topk_weights: Any = _array("topk_weights", request.topk_weights, np.float32, rows, top_k)
    return hidden_states, topk_ids, topk_weights


def _array(name: str, data: bytes, dtype: type[np.generic], rows: int, width: int) -> npt.NDArray[Any]:
    expected = rows * width * np.dtype(dtype).itemsize
    if len(data) != expected:
        raise ValueError(
            f"{name} has {len(data)} bytes; [{rows}, {width}] {np.dtype(dtype)} needs {expected}"
        )
    return np.frombuffer(data, dtype).reshape(rows, width)


class ExpertServicer(expert_pb2_grpc.ExpertServicer):
    """Translates between messages and the host. `drain(timeout_s)` also drains the mailbox."""

    def __init__(self, host: ExpertHost, spans: SpanRecorder, drain: Callable[[float | None], bool]) -> None:
        self._host = host
        self._spans = spans
        self._drain = drain
        self._instance_id = secrets.randbits(63)

    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadResponse:
        """Loads a slice. INVALID_ARGUMENT names the tensor, key or setting; FAILED_PRECONDITION: something is
        loaded, or packed experts cannot be in the requested place."""
        try:
            loaded = self._host.load(_slice_request(request))
        except (AlreadyLoaded, StartupError) as error:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, error)
        except (ValueError, MailboxError) as error:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        except LoadCancelled:
            _abort(context, grpc.StatusCode.CANCELLED, RuntimeError("the server is stopping"))
        return pb.LoadResponse(packed_bytes=loaded.engine.packed_bytes, seconds=loaded.seconds)

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        """Returns static facts; the slice's fields are zero before a load."""
        placement = self._host.placement
        response = pb.InfoResponse(
            version=__version__,
            abi_version=_kernels.MAILBOX_ABI_VERSION,
            num_threads=placement.num_threads,
            numa_node=placement.numa_node,
            cpus=placement.cpus,
            pid=os.getpid(),
            instance_id=self._instance_id,
        )
        if self._host.loaded is not None:
            _describe(self._host.loaded, response)
            response.problem = self._host.problem
        return response

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsResponse:
        """Returns counters of mailbox and `Compute` together; all zero before a load."""
        loaded = self._host.loaded
        return pb.StatsResponse() if loaded is None else _stats(loaded)

    def GetMetrics(
        self, request: pb.GetMetricsRequest, context: grpc.ServicerContext
    ) -> pb.GetMetricsResponse:
        """Returns the metrics port's text."""
        # Imported here, since it is slow, and the restart of a process has to be fast.
        from expert_service.metrics import make_registry
        from moebius.process.operations import registry_text

        return pb.GetMetricsResponse(text=registry_text(make_registry(self._host)))

    def GetClock(self, request: pb.GetClockRequest, context: grpc.ServicerContext) -> pb.GetClockResponse:
        """Returns this host's clocks."""
        return pb.GetClockResponse(monotonic_nanoseconds=time.monotonic_ns(), boot_id=_boot_id())

    def Profile(
        self, request: pb.ProfileRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ProfileResponse]:
        """Profiles for a time; ends early when the caller disconnects."""
        loaded = self._host.loaded
        if loaded is None:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, NotServing("no experts are loaded"))
        if not 0 < request.seconds <= _MAX_PROFILE_S:
            error = ValueError(
                f"seconds is {request.seconds:g}; allowed: above 0, at most {_MAX_PROFILE_S:g}"
            )
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        gone = threading.Event()
        try:
            loaded.engine.start_trace(min(request.most_spans or _SPANS, _MAX_SPANS))
        except ValueError:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, RuntimeError("another profile is running"))
        try:
            if context.add_callback(gone.set):
                gone.wait(request.seconds)
        finally:
            spans, dropped = loaded.engine.stop_trace()
        threads = loaded.engine.num_threads
        # As many messages as the size requires; one if there are no spans.
        for begin in range(0, max(len(spans), 1), _SPANS_PER_MESSAGE):
            piece = spans[begin : begin + _SPANS_PER_MESSAGE].astype("<i8").tobytes()
            yield pb.ProfileResponse(spans=piece, dropped=dropped, num_threads=threads)

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:
        """Drains both transports; DEADLINE_EXCEEDED if not idle in time."""
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms else None
        if not self._drain(timeout_s):
            message = f"not idle within {request.timeout_ms} ms"
            _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, TimeoutError(message))
        return pb.DrainResponse()

    def Compute(
        self, request_iterator: Iterator[pb.ComputeRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ComputeResponse]:
        """Computes records. UNAVAILABLE before a load, while draining, and if meant for another process;
        INVALID_ARGUMENT names the field of a bad record, INTERNAL an expert that is damaged in memory and
        cannot be packed again."""
        wanted = dict(context.invocation_metadata()).get(INSTANCE_METADATA)
        if wanted is not None and wanted != str(self._instance_id):
            _abort(context, grpc.StatusCode.UNAVAILABLE, NotServing("the server was restarted"))
        last_epoch = 0
        for request in request_iterator:
            try:
                if request.epoch <= last_epoch:
                    raise ValueError(f"epoch is {request.epoch} after {last_epoch}; it must increase")
                last_epoch = request.epoch
                response = self._compute(request)
            except DamagedExpert as error:
                _note_refusal(request, error)
                _abort(context, grpc.StatusCode.INTERNAL, error)
            except NotServing as error:
                _note_refusal(request, error)
                _abort(context, grpc.StatusCode.UNAVAILABLE, error)
            except ValueError as error:
                _note_refusal(request, error)
                _abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)
            yield response

    def _compute(self, request: pb.ComputeRequest) -> pb.ComputeResponse:
        loaded = self._host.loaded
        if loaded is None:
            raise NotServing("no experts are loaded")
        arrays = decode_request(request, loaded.model.hidden_size, loaded.model.top_k)
        start_unix_ns, begin = time.time_ns(), time.perf_counter_ns()
        output = self._host.forward(request.layer, *arrays)
        duration_ns = time.perf_counter_ns() - begin
        parent = sampled_parent(request.traceparent)
        if parent is not None:
            self._spans.add(Call(*parent, request.layer, request.rows, start_unix_ns, duration_ns, "grpc"))
        return pb.ComputeResponse(
            epoch=request.epoch,
            output=output.tobytes(),
            compute_seconds=duration_ns * 1e-9,
            damages=self._host.damages,
        )


def _note_refusal(request: pb.ComputeRequest, error: Exception) -> None:
    parent = sampled_parent(request.traceparent)
    ids = {} if parent is None else {"trace_id": format_trace_id(parent[0])}
    _log.warning("a record is refused", layer=request.layer, rows=request.rows, reason=str(error), **ids)


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, error: Exception) -> NoReturn:
    context.abort(code, str(error))
    raise AssertionError("abort returned") from error


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _expert_dtype(request: pb.LoadRequest) -> ExpertDtype:
    """Returns the newer field's value if set; the older one knows two types."""
    if not request.expert_dtype:
        known: dict[int, ExpertDtype] = {pb.DTYPE_FLOAT32: "float32", pb.DTYPE_BFLOAT16: "bfloat16"}
        return known.get(request.weight_dtype, "keep")
    return parse_expert_dtype(request.expert_dtype)


def _slice_request(request: pb.LoadRequest) -> SliceRequest:
    return SliceRequest(
        model_path=request.model_path,
        expert_checkpoint=request.expert_checkpoint,
        split="expert" if request.split == pb.EXPERT_SPLIT_EXPERT else "tensor",
        split_index=request.split_index,
        split_count=request.split_count or 1,
        split_shares=tuple(request.split_shares),
        weight_dtype=_expert_dtype(request),
        top_k=request.top_k or None,
        mtp_heads=request.mtp_heads,
    )


def _describe(loaded: LoadedSlice, response: pb.InfoResponse) -> None:
    """Fills the slice's fields."""
    request, model, part, engine = loaded.request, loaded.model, loaded.part, loaded.engine
    response.model_path = request.model_path
    response.hidden_size = model.hidden_size
    response.num_layers = model.num_layers
    response.num_experts = model.num_experts
    response.top_k = model.top_k
    response.split = pb.EXPERT_SPLIT_EXPERT if request.split == "expert" else pb.EXPERT_SPLIT_TENSOR
    response.split_index = request.split_index
    response.split_count = request.split_count
    response.intermediate_begin = part.intermediate_begin
    response.intermediate_end = part.intermediate_end
    response.expert_begin = part.expert_begin
    response.expert_end = part.expert_end
    known = {"float32": pb.DTYPE_FLOAT32, "bfloat16": pb.DTYPE_BFLOAT16}
    response.weight_dtype = known.get(loaded.weight_format, pb.DTYPE_UNSPECIFIED)
    response.weight_format = loaded.weight_format
    for layer, error in loaded.relative_errors.items():
        if error:
            response.requantise_errors.append(pb.LayerError(layer=layer, relative_error=error))
    response.packed_bytes = engine.packed_bytes
    response.isa = engine.isa
    response.num_threads = engine.num_threads
    response.identity = loaded.identity
    response.weights_digest = engine.weights_digest
    response.calibrated_bytes_per_second = loaded.calibrated_bytes_per_second


def _stats(loaded: LoadedSlice) -> pb.StatsResponse:
    stats = loaded.engine.stats()
    response = pb.StatsResponse(
        calls=stats.calls,
        rows=stats.rows,
        busy_seconds=stats.busy_seconds,
        nonfinite_outputs=stats.nonfinite_outputs,
        nonfinite_inputs=stats.nonfinite_inputs,
        damaged_experts=stats.damaged_experts,
        repaired_experts=stats.repaired_experts,
        weight_bytes=sum(
            experts * layout.expert_bytes
            for experts, layout in zip(stats.layer_experts.tolist(), loaded.layouts, strict=True)
        ),
    )
    before = [0] * loaded.part.expert_begin
    after = [0] * (loaded.model.num_experts - loaded.part.expert_end)
    for layer in stats.layer_calls.nonzero()[0].tolist():
        response.layers.append(
            pb.LayerStats(
                layer=layer,
                calls=int(stats.layer_calls[layer]),
                rows=int(stats.layer_rows[layer]),
                experts=int(stats.layer_experts[layer]),
                busy_seconds=int(stats.layer_busy_nanoseconds[layer]) * 1e-9,
                expert_rows=[*before, *stats.expert_rows[layer].tolist(), *after],
            )
        )
    return response
