"""Guards `moebius status`: its exit status is the server's readiness, its lines are what the server says."""

from __future__ import annotations

import json

import pytest

from app.cli import main
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.sse_server import scripted_server
from tests.unit.app.top.test_top import answer


def status(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Returns exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["status", *arguments])
    found = capsys.readouterr()
    return ended.value.code, found.out, found.err


def test_a_ready_server_is_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures are those of the server; `--json` has all of them."""
    with scripted_server([]) as server:
        server.documents["/v1/live?layers=false&replica=0"] = answer(10)
        code, out, _ = status(capsys, server.url)
        assert code == 0
        assert out.startswith(f"tiny at {server.url}: ready\n")
        assert len(out.splitlines()) <= 10
        for line in (
            "requests     3 running, 0 waiting, at most 8 at once",
            "KV cache     50% of 1,000 tokens, prefix hits 25%",
            "experts      1 of 1 servers up, int4_g32",
            "first token  p50 100.0 ms, p95 400.0 ms",
        ):
            assert line in out.splitlines()
        code, out, _ = status(capsys, server.url, "--json")
        assert (code, json.loads(out)["live"]["model"]) == (0, "tiny")


def test_a_server_that_is_not_ready_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, for a gateway whose engine is away and for a port where nothing listens."""
    with running_gateway(gateway_config("127.0.0.1:1"), wait=False) as url:
        code, out, _ = status(capsys, url)
        assert code == 1
        assert f"{url}: not ready\nbecause      {url} answered 503: " in out
    code, out, _ = status(capsys, url)
    assert code == 1
    assert "cannot reach" in out


def test_what_is_no_moebius_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Another server, or no URL: that is exit status 2, since it says nothing about readiness."""
    with scripted_server([]) as server:
        server.get_status = 404
        assert status(capsys, server.url)[0] == 2
    assert status(capsys, "localhost")[0] == 2
