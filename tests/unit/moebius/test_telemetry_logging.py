"""Guards logs: one JSON object a line with process and trace ids, from structlog and the standard library."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from moebius.config import TelemetryConfig
from moebius.telemetry import configure_logging, configure_tracing


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Puts the test process's own logging set-up back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Returns the JSON objects logged so far."""
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_json_lines_carry_the_span(capsys: pytest.CaptureFixture[str]) -> None:
    """A line inside a span has its ids as hex; a line outside has none."""
    configure_logging(TelemetryConfig(log_format="json"), "expert-1")
    tracer = configure_tracing(TelemetryConfig(), "test").get_tracer("test")
    log = structlog.get_logger("moebius.test")
    with tracer.start_as_current_span("step") as span:
        log.info("inside", layer=3)
        context = span.get_span_context()
    log.info("outside")
    inside, outside = lines(capsys)
    assert inside["event"] == "inside"
    assert inside["layer"] == 3
    assert inside["process"] == "expert-1"
    assert inside["trace_id"] == f"{context.trace_id:032x}"
    assert inside["span_id"] == f"{context.span_id:016x}"
    assert "trace_id" not in outside


def test_standard_library_is_rendered_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of libraries that log with `logging` are JSON, too; chatty ones stay below warning."""
    configure_logging(TelemetryConfig(log_format="json"), "gateway")
    logging.getLogger("some.library").warning("disk %s is full", "sda")
    logging.getLogger("httpx").info("GET ...")
    (line,) = lines(capsys)
    assert line["event"] == "disk sda is full"
    assert line["level"] == "warning"
    assert line["logger"] == "some.library"


def test_level_is_honoured(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing below the configured level is written."""
    configure_logging(TelemetryConfig(log_format="json", log_level="error"), "gpu")
    structlog.get_logger("x").warning("hidden")
    structlog.get_logger("x").error("shown")
    assert [line["event"] for line in lines(capsys)] == ["shown"]


def test_exceptions_stay_on_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback is a field of its line, so that a log shipper keeps it together."""
    configure_logging(TelemetryConfig(log_format="json"), "gpu")
    try:
        raise ValueError("layer 7")
    except ValueError:
        structlog.get_logger("x").exception("step failed")
    (line,) = lines(capsys)
    assert "ValueError: layer 7" in line["exception"]


def test_console_lines_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    """The console format is one line without colour codes when stderr is no terminal."""
    configure_logging(TelemetryConfig(), "gpu")
    structlog.get_logger("x").info("ready", seconds=3)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "ready" in err
    assert "seconds=3" in err
    assert "\x1b" not in err
