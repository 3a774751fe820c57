"""Guards what clients may read of a failure: never where things are inside."""

from __future__ import annotations

import pytest

from gateway.errors import ApiError

LEAKS = {
    "connect to unix:/run/user/0/moebius/gpu.sock failed": "connect to (internal) failed",
    "last error: ipv4:10.0.0.3:50051: refused": "last error: (internal) refused",
    "mailbox /dev/shm/moebius-8000-ab is gone": "mailbox (internal) is gone",
    "server at gpu-0.svc.local:50051 is gone": "server at (internal) is gone",
    "server at 10.1.2.3 is gone": "server at (internal) is gone",
    "server at [fe80::1]:80 is gone": "server at (internal) is gone",
    "file '/models/a/config.json': broken": "file '(internal)': broken",
}


@pytest.mark.parametrize("message", LEAKS)
def test_failures_name_no_place_inside(message: str) -> None:
    """Sockets, files and hosts are left out of every answer of the 5xx kind, in SSE events too."""
    assert ApiError(500, message).body()["error"]["message"] == LEAKS[message]


@pytest.mark.parametrize(
    "message", ["layer 3 of 48: NaN in 2/16 rows", "internal error: KeyError", "n/a: and/or 50% at 1.5e-3"]
)
def test_other_words_stay(message: str) -> None:
    """Numbers, fractions and names are no addresses."""
    assert ApiError(500, message).body()["error"]["message"] == message


def test_what_the_client_sent_is_repeated() -> None:
    """A 4xx speaks of the request: its paths and numbers stay."""
    assert ApiError(404, "unknown path: GET /v1/foo/bar").body()["error"]["message"].endswith("/v1/foo/bar")
