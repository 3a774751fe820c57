"""Guards what the supervisor passes on: JSON stays JSON, everything else becomes it, repetition is cut."""

from __future__ import annotations

import json

from app.supervisor.lines import ForwardedLines

NATIVE = (
    "E1122 18:04:40.480890   27652 ssl_transport_security.cc:2563] Handshake failed with error "
    "SSL_ERROR_SSL: PEER_DID_NOT_RETURN_A_CERTIFICATE"
)


def test_every_line_is_json_where_logs_are() -> None:
    """Lines of loggers pass as they are; prints, broken JSON and lines of C++ libraries become objects."""
    lines = ForwardedLines("expert-0", json_logs=True)
    logged = json.dumps({"event": "ready", "process": "expert-0"})
    assert lines.forwarded(logged) == logged
    for text in ("Segmentation fault", "{not json", "", '"text"', NATIVE):
        found = json.loads(lines.forwarded(text) or "")
        assert found["process"] == "expert-0"
        assert found["event"] == (text if text != NATIVE else NATIVE.partition("] ")[2])
        assert found["level"] == ("error" if text == NATIVE else "info")
        assert found["timestamp"].endswith("+00:00")


def test_people_get_a_prefix() -> None:
    """Console lines are what they were, after the name of their process."""
    assert ForwardedLines("gpu", json_logs=False).forwarded("loading") == "gpu      | loading"


def test_failed_handshakes_are_passed_on_once_a_minute() -> None:
    """gRPC's own line for each failed handshake comes once a minute and reason; other lines always."""
    clock = [0.0]
    lines = ForwardedLines("gpu", json_logs=False, clock=lambda: clock[0])
    other = NATIVE.replace("PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED")
    assert [lines.forwarded(text) is None for text in (NATIVE, NATIVE, other, "x", "x")] == [
        False,
        True,
        False,
        False,
        False,
    ]
    clock[0] = 61.0
    assert lines.forwarded(NATIVE) is not None
