"""Guards the gateway against web pages of other sites, on every path and in the shape of every API."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moebius.process.operations import Answers, ProcessState, start_operations
from tests.helpers.fake_engine import MODEL, FakeEngine, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.ports import free_port
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

pytestmark = pytest.mark.plain_http
EVIL = {"Origin": "http://evil.example"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
POSTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "The", "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 16},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": MODEL, "messages": CHAT["messages"]},
    "/api/chat": {"model": MODEL, "messages": CHAT["messages"], "options": {"num_predict": 2}},
    "/api/generate": {"model": MODEL, "prompt": "The", "options": {"num_predict": 2}},
    "/invocations": CHAT,
    "/tokenize": {"prompt": "The"},
}
GETS = (
    "/", "/docs", "/web/app.js", "/openapi.json", "/v1/models", "/v1/live", "/v1/load", "/load", "/metrics",
    "/health", "/ready", "/version", "/api/tags", "/api/version", "/tokenizer_info", "/none/such",
)  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a scripted engine."""
    directory = tmp_path_factory.mktemp("origins")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    with serving(FakeEngine(directory, tokenizer), f"unix:{directory}/engine.sock"):
        yield f"unix:{directory}/engine.sock"


@pytest.fixture(scope="module")
def url(address: str) -> Iterator[str]:
    """A gateway with the default settings: on 127.0.0.1, without keys."""
    with running_gateway(gateway_config(address)) as running:
        yield running


def simple(url: str, path: str, headers: dict[str, str]) -> httpx.Response:
    """Sends a POST that a page may send without a preflight."""
    headers = {"Content-Type": "text/plain;charset=UTF-8", **headers}
    return httpx.post(f"{url}{path}", content=json.dumps(POSTS[path]), headers=headers, timeout=60)


def message_in(path: str, answer: httpx.Response) -> str:
    """Returns the error's message, from the shape of the path's API."""
    body = answer.json()
    if path.startswith("/api/"):
        assert set(body) == {"error"}
        return str(body["error"])
    if path.startswith("/v1/messages"):
        assert (body["type"], body["error"]["type"]) == ("error", "permission_error")
        return str(body["error"]["message"])
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "permission_error"
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", POSTS)
def test_no_foreign_page_has_an_answer(url: str, path: str) -> None:
    """A simple request of another site's page, of one without a name, or of a name that was rebound to this
    address: 403 that says what to set, and nothing is computed. Without them the same request is answered, be
    its content type what it may."""
    port = url.rpartition(":")[2]
    for origin in ("http://evil.example", "null", f"http://evil.example:{port}"):
        refused = simple(url, path, {"Origin": origin})
        assert refused.status_code == 403
        assert "--cors-origins" in message_in(path, refused)
        assert "access-control-allow-origin" not in refused.headers
        assert refused.headers["x-request-id"]
    rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
    for headers in (rebound, {**rebound, "Sec-Fetch-Site": "same-origin"}):
        refused = simple(url, path, headers)
        assert refused.status_code == 403
        assert "--allowed-hosts" in message_in(path, refused)
    assert simple(url, path, {}).status_code == 200
    untyped = httpx.Request("POST", f"{url}{path}", content=json.dumps(POSTS[path]))
    assert "content-type" not in untyped.headers
    with httpx.Client(timeout=60) as client:
        assert client.send(untyped).status_code == 200
        untyped.headers["Content-Type"] = "application/x-www-form-urlencoded"  # curl -d
        assert client.send(untyped).status_code == 200


@pytest.mark.parametrize("path", GETS)
def test_nothing_is_read_by_a_foreign_page(url: str, path: str) -> None:
    """A foreign page reads nothing, neither with its own origin nor after its name was rebound: also no
    figures, metrics and page.
    """
    port = url.rpartition(":")[2]
    assert httpx.get(f"{url}{path}", headers=EVIL).status_code == 403
    rebound = httpx.get(f"{url}{path}", headers={"Host": f"evil.example:{port}"})
    assert rebound.status_code == 403
    assert "--allowed-hosts" in message_in(path, rebound)
    assert httpx.get(f"{url}{path}").status_code in (200, 404)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_our_own_page_is_served(url: str, name: str) -> None:
    """The page is served by each name of this machine, as a browser sends it; so is a link from another page
    to it.
    """
    port = url.rpartition(":")[2]
    own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}", "Sec-Fetch-Site": "same-origin"}
    assert simple(url, "/v1/chat/completions", own).status_code == 200
    del own["Sec-Fetch-Site"]  # an older browser
    assert simple(url, "/v1/chat/completions", own).status_code == 200
    assert httpx.get(f"{url}/v1/live", headers=own).status_code == 200
    link = {"Host": f"{name}:{port}", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert httpx.get(f"{url}/", headers=link).status_code == 200


def test_a_foreign_pages_question_is_refused(url: str) -> None:
    """A preflight, as before a request with a JSON content type or a key, on all paths."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for path in (*POSTS, "/metrics"):
        answer = httpx.options(f"{url}{path}", headers={**EVIL, **asked})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_allowed_pages_and_names(address: str) -> None:
    """What the settings name is served, with the headers that browsers want; everything else is not."""
    settings: dict[str, Any] = {
        "cors_origins": ["https://page.example", "chrome-extension://*"],
        "allowed_hosts": ["models.example"],
    }
    with running_gateway(gateway_config(address, **settings)) as url:
        for origin in ("https://page.example", "chrome-extension://abc"):
            answer = simple(url, "/v1/completions", {"Origin": origin})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            assert httpx.options(f"{url}/v1/completions", headers=asked).status_code == 200
        assert simple(url, "/v1/completions", EVIL).status_code == 403
        # Behind a proxy with TLS that keeps the name, and behind one that does not.
        page = {"Origin": "https://models.example"}
        assert simple(url, "/v1/completions", {**page, "Host": "models.example"}).status_code == 200
        forwarded = {**page, "X-Forwarded-Host": "models.example"}
        assert simple(url, "/v1/completions", forwarded).status_code == 200
        assert simple(url, "/v1/completions", page).status_code == 403
        assert httpx.get(f"{url}/v1/models", headers={"Host": "other.example"}).status_code == 403


def test_an_open_server_is_reached_by_any_name(address: str) -> None:
    """Probes by a Pod's address, Services and proxies; pages of other sites are refused there as well."""
    with running_gateway(gateway_config(address, host="0.0.0.0")) as url:
        for host in (
            "10.42.0.7:8000",
            "moebius.default.svc.cluster.local",
            "models.example",
            "[fd00::7]:8000",
        ):
            assert httpx.get(f"{url}/ready", headers={"Host": host}).status_code == 200
            own = {"Host": host, "Origin": f"https://{host}"}
            assert simple(url, "/v1/completions", own).status_code == 200
            assert simple(url, "/v1/completions", {**EVIL, "Host": host}).status_code == 403


def test_where_keys_are_needed_the_key_decides(address: str) -> None:
    """A page that has a key was given it (an extension, an application); one without gets 401. What is open
    without a key is not open to foreign pages, and a rebound name is refused with a key, too."""
    with running_gateway(gateway_config(address, api_key="secret")) as url:
        key = {"Authorization": "Bearer secret"}
        assert simple(url, "/v1/completions", EVIL).status_code == 401
        assert simple(url, "/v1/completions", {**EVIL, **key}).status_code == 200
        assert httpx.get(f"{url}/metrics", headers=EVIL).status_code == 403
        assert httpx.get(f"{url}/metrics").status_code == 200
        rebound = {"Host": "evil.example", **key}
        assert simple(url, "/v1/completions", rebound).status_code == 403


def test_two_names_are_none(url: str) -> None:
    """Each `Host` of a request has to be allowed; a request of HTTP/1.0 needs none."""
    port = int(url.rpartition(":")[2])

    def status(head: str) -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(head.encode())
            return int(connection.recv(65536).split()[1])

    two = "Host: localhost\r\nHost: evil.example\r\n"
    assert status(f"GET /v1/models HTTP/1.1\r\n{two}Connection: close\r\n\r\n") in (400, 403)
    assert status("GET /v1/models HTTP/1.0\r\n\r\n") == 200


def test_metrics_on_a_port_of_their_own_are_for_no_page() -> None:
    """Every process has such a port, on this machine alone by default."""
    server = start_operations(
        free_port(), "127.0.0.1", Answers(lambda: b"x 1\n", lambda: ProcessState("")), ("box.lan",)
    )
    assert server is not None
    with contextlib.closing(server):
        page = f"http://127.0.0.1:{server.port}/metrics"
        assert httpx.get(page).status_code == 200
        assert httpx.get(page, headers={"Host": "box.lan"}).status_code == 200
        assert httpx.get(page, headers=EVIL).status_code == 403
        rebound = httpx.get(page, headers={"Host": "evil.example"})
        assert (rebound.status_code, "--allowed-hosts" in rebound.text) == (403, True)
