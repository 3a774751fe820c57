"""Guards who a browser may speak for: pages of other sites and rebound names are refused, all else works."""

from __future__ import annotations

import pytest

from moebius.config.loader import load_config
from moebius.errors import ConfigError
from moebius.network.web_origins import Sender, WebOrigins, is_local_address, is_same_place, split_host

HERE = ("127.0.0.1:8000", "127.1.2.3", "localhost", "LOCALHOST:8000", "localhost.:80", "app.localhost:1",
        "[::1]:8000", "[::ffff:127.0.0.1]", "0.0.0.0:8000", "")  # fmt: skip
ELSEWHERE = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
             "192.168.1.4:8000", "8.8.8.8", "[2001:db8::1]:8000", "evil@localhost", "a:b:c", "::1",
             "localhost:x", "notlocalhost")  # fmt: skip


def host_is_refused(rules: WebOrigins, host: str) -> bool:
    """Whether a request of no browser is refused for the name it has for the server."""
    return bool(rules.refused_host(Sender("POST", host)))


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "localhost", "::1", "127.0.0.5"])
def test_a_server_of_this_machine_answers_to_its_names_only(listens_on: str) -> None:
    """DNS rebinding: a site's own name leads to 127.0.0.1, and only `Host` tells."""
    rules = WebOrigins(listens_on)
    assert [host for host in HERE if host_is_refused(rules, host)] == []
    assert [host for host in ELSEWHERE if not host_is_refused(rules, host)] == []


def test_names_that_a_user_allowed_are_answered() -> None:
    """Exactly, below a domain, or any; loopback names are always this machine's."""
    rules = WebOrigins("127.0.0.1", ("box.lan", "*.models.example", "10.0.0.7"))
    for host in (
        *HERE,
        "box.lan",
        "BOX.lan:8000",
        "a.models.example",
        "a.b.models.example:443",
        "10.0.0.7:80",
    ):
        assert not host_is_refused(rules, host), host
    for host in ("evil.example", "box.lan.evil.example", "models.example", "xmodels.example", "10.0.0.8"):
        assert host_is_refused(rules, host), host
    assert not any(host_is_refused(WebOrigins("127.0.0.1", ("*",)), host) for host in (*HERE, *ELSEWHERE))


@pytest.mark.parametrize("listens_on", ["0.0.0.0", "::", "10.1.2.3"])
def test_open_servers_answer_to_whatever_leads_to_them(listens_on: str) -> None:
    """Probes by a Pod's address, names of Services and proxies; with names allowed still all addresses, as
    no address can be made to mean another machine."""
    rules = WebOrigins(listens_on)
    assert not any(host_is_refused(rules, host) for host in (*HERE, *ELSEWHERE))
    named = WebOrigins(listens_on, ("models.example",))
    for host in (*HERE, "models.example", "10.1.2.3:8000", "[2001:db8::1]:8000"):
        assert not host_is_refused(named, host), host
    assert host_is_refused(named, "evil.example:8000")


def origin_is_refused(rules: WebOrigins, origin: str, host: str = "127.0.0.1:8000", **headers: str) -> bool:
    """Returns whether a page's POST is refused."""
    forwarded = tuple(filter(None, [headers.get("forwarded", "")]))
    site, method = headers.get("site", ""), headers.get("method", "POST")
    return bool(rules.refused_origin(Sender(method, host, origin, site, forwarded)))


def test_pages_of_other_sites_are_refused() -> None:
    """Pages are refused whatever they are called; with our own host but another port, too, and pages without
    a name.
    """
    rules = WebOrigins("127.0.0.1")
    for origin in ("http://evil.example", "https://evil.example:8000", "null", "http://127.0.0.1:3000",
                   "http://localhost:8000", "http://127.0.0.1", "file://", "chrome-extension://abc", "x",
                   "http://127.0.0.1:8000, http://evil.example", "http://127.0.0.1:8000@evil.example",
                   "http://[", "http://127.0.0.1:99999999"):  # fmt: skip
        assert origin_is_refused(rules, origin), origin
        assert origin_is_refused(rules, origin, site="cross-site"), origin
        assert origin_is_refused(rules, origin, method="GET"), origin
    # A form of an older browser, without its origin.
    assert origin_is_refused(rules, "", site="cross-site")
    assert origin_is_refused(rules, "", site="same-site")


def test_the_servers_own_page_and_no_page_at_all_are_served() -> None:
    """The page is served by whatever name it was opened, behind a proxy with TLS, and behind one that
    rewrites `Host`.
    """
    rules = WebOrigins("127.0.0.1", ("models.example",))
    assert not origin_is_refused(rules, "")  # curl and every library
    assert not origin_is_refused(rules, "", site="none")
    assert not origin_is_refused(rules, "", site="cross-site", method="GET")  # a link on another page
    for origin, host in (
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://localhost:8000", "localhost:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://localhost", "localhost"),
        ("https://models.example", "models.example"),
        ("https://models.example", "models.example:443"),
        ("https://MODELS.example.", "models.example"),
    ):
        assert not origin_is_refused(rules, origin, host), (origin, host)
    assert not origin_is_refused(
        rules, "https://models.example", "127.0.0.1:8000", forwarded="models.example"
    )
    assert not origin_is_refused(rules, "https://models.example", "127.0.0.1:8000", site="same-origin")
    assert not origin_is_refused(rules, "null", site="same-origin")


def test_origins_that_a_user_allowed_are_served() -> None:
    """Exactly, with a part left open that never reaches beyond a host, or any."""
    rules = WebOrigins(
        "127.0.0.1", (), ("https://page.example", "http://localhost:*", "chrome-extension://*")
    )
    for origin in ("https://page.example", "http://localhost:3000", "chrome-extension://abcdef"):
        assert not origin_is_refused(rules, origin), origin
    for origin in ("http://page.example", "https://page.example:8443", "https://page.example.evil.example",
                   "http://localhost.evil.example", "null"):  # fmt: skip
        assert origin_is_refused(rules, origin), origin
    assert not origin_is_refused(WebOrigins("127.0.0.1", (), ("null",)), "null")
    assert not origin_is_refused(WebOrigins("127.0.0.1", (), ("*",)), "http://evil.example")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--cors-origins", "https://page.example/"),
        ("--cors-origins", "page.example"),
        ("--allowed-hosts", "http://box.lan"),
        ("--allowed-hosts", "box.lan:8000"),
        ("--allowed-hosts", "b*x.lan"),
    ],
)
def test_what_no_browser_sends_is_no_setting(flag: str, value: str) -> None:
    """It would never match; the error says how such values look."""
    with pytest.raises(ConfigError, match=rf"{flag}.*{value.replace('*', '.')}.* is none") as caught:
        load_config(None, {flag.removeprefix("--").replace("-", "_"): value})
    assert "\n" not in str(caught.value)


def test_parts_of_hosts_and_addresses() -> None:
    """Names are compared without case, root dot and default port; a server's own by what it resolves to."""
    assert split_host("Box.LAN.:80") == ("box.lan", 80)
    assert split_host("[2001:DB8::1]") == ("2001:db8::1", None)
    assert split_host("a b") is None
    assert is_same_place("http://a.example", "a.example:80")
    assert not is_same_place("https://a.example", "a.example:80")
    assert is_local_address("localhost")
    assert not is_local_address("0.0.0.0")
    assert not is_local_address("no-such-host.invalid")
