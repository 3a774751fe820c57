"""`moebius experts show`, `record start|stop|dump|import`: who computes experts, which are chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.access_options import Access, with_access
from app.cli_options import LiveServer, LookInterval, ReplicaIndex, SecurityFile
from moebius.errors import UserError

if TYPE_CHECKING:
    from moebius.experts.placement import FileFormat

app = typer.Typer(help="Look at the routed experts of a running engine.", no_args_is_help=True)
record = typer.Typer(help="Record which experts are chosen.", no_args_is_help=True)
app.add_typer(record, name="record")

_TIMEOUT_S = 60.0


@app.command()
@with_access
def show(
    server: LiveServer = "",
    interval: LookInterval = 2.0,
    json: Annotated[bool, typer.Option("--json", help="As JSON")] = False,
    replica: ReplicaIndex = 0,
    *,
    access: Access,
    config: SecurityFile = None,
) -> None:
    """Print by layer who computes its experts, and what limits a step.

    What is on the GPU and copied there, hits, exchanges, bandwidth; and what experts cost now.
    """
    from app.commands.watch import live_source
    from app.top.run import print_layers

    with live_source(server, config, replica, access) as source:
        print_layers(source, interval, json)


EngineAddress = Annotated[
    str,
    typer.Option(help="gRPC address of gpu_service [default: that of the one `moebius serve` running here]"),
]


@record.callback()
def connect(
    config: SecurityFile = None,
) -> None:
    """Record which experts are chosen."""
    from moebius.config.loader import load_config
    from moebius.network.tls import configure_tls

    configure_tls(load_config(config).security)


@record.command()
def start(
    mode: Annotated[str, typer.Option(help="stat, per_pass or per_token")] = "stat",
    engine_address: EngineAddress = "",
) -> None:
    """Forget what was recorded, and record from the next step on."""
    from protos import engine_pb2 as pb

    with engine_stub(engine_address) as engine:
        engine.StartExpertRecorder(pb.StartExpertRecorderRequest(mode=mode), timeout=_TIMEOUT_S)
    print(f"recording ({mode})")


@record.command()
def stop(engine_address: EngineAddress = "") -> None:
    """End recording; `dump` still gives what was recorded."""
    from protos import engine_pb2 as pb

    with engine_stub(engine_address) as engine:
        engine.StopExpertRecorder(pb.StopExpertRecorderRequest(), timeout=_TIMEOUT_S)
    print("stopped")


@record.command()
def dump(
    file: Annotated[Path, typer.Option(help="Where to write: *.safetensors or *.json")],
    engine_address: EngineAddress = "",
) -> None:
    """Write what was recorded, for --expert-statistics. Prints how many experts a step touches."""
    from protos import engine_pb2 as pb

    file_format = _format_of(file)
    with engine_stub(engine_address) as engine:
        request = pb.DumpExpertRecorderRequest(file_format=file_format)
        answer = engine.DumpExpertRecorder(request, timeout=_TIMEOUT_S)
    _write(file, answer.content)
    print(f"{file}: {answer.mode}, {answer.steps} steps, {answer.tokens} tokens")
    for found in answer.layers:
        print(f"layer {found.layer}: {found.distinct_per_step:.2f} different experts per step")


@record.command(name="import")
def import_counts(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint whose experts were counted")],
    statistics: Annotated[
        Path,
        typer.Argument(metavar="FILE.pt", help="Counts that SGLang or KTransformers recorded"),
    ],
    file: Annotated[Path, typer.Option(help="Where to write: *.safetensors or *.json")],
) -> None:
    """Convert expert counts of SGLang or KTransformers."""
    from app.other_statistics import read_other_statistics
    from moebius.models.read import read_geometry

    file_format = _format_of(file)
    found = read_other_statistics(statistics, read_geometry(Path(model)))
    _write(file, found.encode(file_format))
    print(f"{file}: {len(found.layers)} layers, {found.counts.sum()} choices of {found.num_experts} experts")


def _format_of(file: Path) -> FileFormat:
    if file.suffix == ".safetensors":
        return "safetensors"
    if file.suffix == ".json":
        return "json"
    raise UserError(f"--file: {str(file)!r} is not allowed; it has to end in .safetensors or .json")


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise UserError(f"--file: {file} cannot be written: {error.strerror}") from None


@contextmanager
def distinct_experts(engine_address: str) -> Iterator[dict[int, float]]:
    """Records while the context is open; then the dictionary has different experts per step, by layer.

    Raises UserError as the commands do.
    """
    from protos import engine_pb2 as pb

    found: dict[int, float] = {}
    with engine_stub(engine_address) as engine:
        engine.StartExpertRecorder(pb.StartExpertRecorderRequest(mode="stat"), timeout=_TIMEOUT_S)
        yield found
        engine.StopExpertRecorder(pb.StopExpertRecorderRequest(), timeout=_TIMEOUT_S)
        answer = engine.DumpExpertRecorder(
            pb.DumpExpertRecorderRequest(file_format="json"), timeout=_TIMEOUT_S
        )
        found.update({one.layer: one.distinct_per_step for one in answer.layers})


@contextmanager
def engine_stub(address: str) -> Iterator[Any]:
    """Yields a stub of the engine.

    Raises UserError naming what the engine refused, or that it is not there.
    """
    import grpc

    from moebius.network.grpc_channels import open_channel, tls_problem
    from moebius.network.tls import active_tls
    from protos import engine_pb2_grpc

    address = address or _running_engine()
    with open_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        try:
            yield engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
        except grpc.RpcError as error:
            code = error.code()
            if "http1.x" in (error.details() or ""):
                raise UserError(
                    f"{address} is an HTTP server, not an engine: give the gRPC address of gpu_service "
                    "(--gpu-address), or none on the host of `moebius serve`"
                ) from None
            if code is grpc.StatusCode.UNAVAILABLE:
                problem = tls_problem(address)
                reason = f": {problem}" if problem else ""
                if problem and active_tls() is None:
                    reason += "; --config FILE names a file whose section `security` says how it is reached"
                reason = reason or "; is `moebius serve` or `moebius gpu` running there?"
                raise UserError(f"cannot reach an engine at {address}{reason}") from None
            raise UserError(f"the engine refused: {error.details()}") from None


def _running_engine() -> str:
    """Returns the engine of the only `moebius serve` with its default state directory."""
    from app.supervisor.plan import default_state_dir
    from moebius.config.loader import load_config
    from moebius.network.tls import active_tls, configure_tls

    sockets = sorted(default_state_dir().glob("*/gpu.sock"))
    if len(sockets) != 1:
        running = ", ".join(f"unix:{path}" for path in sockets)
        found = (
            f"several engines run here, name one of {running}" if sockets else "no `moebius serve` runs here"
        )
        raise UserError(f"the engine's address is needed (unix:PATH or HOST:PORT): {found}")
    if active_tls() is None:
        configure_tls(load_config(sockets[0].with_name("gateway.yaml")).security)
    return f"unix:{sockets[0]}"


TIMEOUT_S = 5.0
SETTLE_S = 0.1


@dataclass(frozen=True)
class ExpertStats:
    """Sums over all layers since the server started; filled by `read_expert_stats`."""

    calls: int  # MoE forwards: one per layer and step.
    rows: int  # Token rows in them.
    busy_seconds: float  # Wall time spent computing, seconds.


def read_expert_stats(address: str) -> ExpertStats:
    """Asks `Expert.Stats` at a gRPC address (host:port or unix:path). Raises UserError."""
    import grpc

    from moebius.network.grpc_channels import open_channel
    from protos import expert_pb2, expert_pb2_grpc

    make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
    with open_channel(address) as channel:
        try:
            answer = make_stub(channel).Stats(expert_pb2.StatsRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise UserError(f"expert server at {address} does not answer: {error.details()}") from None
    return ExpertStats(int(answer.calls), int(answer.rows), float(answer.busy_seconds))


def read_settled_stats(addresses: Sequence[str], timeout_s: float = 2.0) -> list[ExpertStats]:
    """The counters of all servers once two reads agree, or after `timeout_s` seconds.

    An engine that schedules ahead still computes one step when the last token has reached the client;
    read meanwhile, the servers would seem to have been called unequally often.
    """
    end = time.monotonic() + timeout_s
    before = [read_expert_stats(address) for address in addresses]
    while time.monotonic() < end:
        time.sleep(SETTLE_S)
        now = [read_expert_stats(address) for address in addresses]
        if now == before:
            break
        before = now
    return before
