"""`moebius experts record start|stop|dump`: which experts a running engine's requests choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from moebius.errors import UserError

app = typer.Typer(help="Look at the routed experts of a running engine.", no_args_is_help=True)
record = typer.Typer(help="Record which experts are chosen.", no_args_is_help=True)
app.add_typer(record, name="record")

_TIMEOUT_S = 60.0
EngineAddress = Annotated[
    str,
    typer.Option(help="gRPC address of gpu_service [default: that of the one `moebius serve` running here]"),
]


@record.command()
def start(
    mode: Annotated[str, typer.Option(help="stat, per_pass or per_token")] = "stat",
    engine_address: EngineAddress = "",
) -> None:
    """Forget what was recorded, and record from the next step on."""
    from protos import engine_pb2 as pb

    with _engine(engine_address) as engine:
        engine.StartExpertRecorder(pb.StartExpertRecorderRequest(mode=mode), timeout=_TIMEOUT_S)
    print(f"recording ({mode})")


@record.command()
def stop(engine_address: EngineAddress = "") -> None:
    """End recording; `dump` still gives what was recorded."""
    from protos import engine_pb2 as pb

    with _engine(engine_address) as engine:
        engine.StopExpertRecorder(pb.StopExpertRecorderRequest(), timeout=_TIMEOUT_S)
    print("stopped")


@record.command()
def dump(
    file: Annotated[Path, typer.Option(help="Where to write: *.safetensors or *.json")],
    engine_address: EngineAddress = "",
) -> None:
    """Write what was recorded, for --expert-statistics, and print how many experts a step touches."""
    from protos import engine_pb2 as pb

    file_format = file.suffix.removeprefix(".")
    if file_format not in ("safetensors", "json"):
        raise UserError(f"--file: {str(file)!r} is not allowed; it has to end in .safetensors or .json")
    with _engine(engine_address) as engine:
        request = pb.DumpExpertRecorderRequest(file_format=file_format)
        answer = engine.DumpExpertRecorder(request, timeout=_TIMEOUT_S)
    try:
        file.write_bytes(answer.content)
    except OSError as error:
        raise UserError(f"--file: {file} can not be written: {error.strerror}") from None
    print(f"{file}: {answer.mode}, {answer.steps} steps, {answer.tokens} tokens")
    for found in answer.layers:
        print(f"layer {found.layer}: {found.distinct_per_step:.2f} different experts per step")


@contextmanager
def _engine(address: str) -> Iterator[Any]:
    """A stub of the engine. Raises UserError naming what the engine refused, or that it is not there."""
    import grpc

    from protos import engine_pb2_grpc

    address = address or _running_engine()
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        try:
            yield engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE:
                raise UserError(f"cannot reach an engine at {address}") from None
            raise UserError(f"the engine refused: {error.details()}") from None


def _running_engine() -> str:
    """The engine of the only `moebius serve` with its default state directory."""
    from moebius.app.supervisor.plan import default_state_dir

    sockets = sorted(default_state_dir().glob("*/gpu.sock"))
    if len(sockets) != 1:
        running = ", ".join(f"unix:{path}" for path in sockets) or "none"
        raise UserError(f"--engine-address is needed: engines found here: {running}")
    return f"unix:{sockets[0]}"
