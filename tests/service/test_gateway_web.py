"""Guards the page's files and the live view's figures over HTTP: headers, caching, keys, prefixes."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from gateway.web.pages import STATIC
from protos import engine_pb2 as pb
from tests.helpers.fake_engine import FakeEngine, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

KEY = "a-secret"
VENDOR = STATIC / "vendor"
OWN = sorted(path for path in STATIC.iterdir() if path.is_file())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, str]]:
    """A scripted engine and its address."""
    directory = tmp_path_factory.mktemp("engine")
    write_tokenizer(directory, byte_level_tokenizer())
    fake = FakeEngine(directory, Tokenizer.from_file(str(directory / "tokenizer.json")))
    address = f"unix:{directory}/engine.sock"
    with serving(fake, address):
        yield fake, address


@pytest.fixture(scope="module")
def url(engine: tuple[FakeEngine, str]) -> Iterator[str]:
    """A gateway that wants a key."""
    with running_gateway(gateway_config(engine[1], api_key=KEY), wait=False) as found:
        with httpx.Client(base_url=found, headers={"Authorization": f"Bearer {KEY}"}) as client:
            for _ in range(600):
                if client.get("/ready").status_code == 200:
                    break
                time.sleep(0.05)
        yield found


def references(text: str) -> set[str]:
    """Returns the addresses that a file of the page loads or links to."""
    return {one or other for one, other in re.findall(r'(?:src|href)="([^"#]+)"|from "([^"]+)"', text)}


def test_nothing_is_loaded_from_elsewhere_or_from_the_root() -> None:
    """Every address in the files is relative and there: the page works offline, and below any prefix."""
    for path in OWN:
        text = path.read_text()
        for reference in references(text):
            assert not re.match(r"[a-z]+:|/", reference), f"{path.name}: {reference}"
            is_root = path.name in {"index.html", "docs.html"}  # the others are below /web/
            place = STATIC.parent if is_root else STATIC
            name = reference.replace("web/", "static/") if is_root else reference
            if name not in {"docs", "openapi.json"}:
                assert (place / name).exists(), f"{path.name}: {reference}"
        if path.suffix == ".js":
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), (
                path
            )
            assert not re.search(r"""fetch\(["'`]/|request\(["'`]/|get\(["'`]/""", text), path
        assert "@import" not in text
        if path.suffix == ".css":
            assert "url(" not in text, path
        if path.suffix != ".svg":
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)[a-z]", text), path


def test_libraries_are_as_their_authors_published_them() -> None:
    """Each file of vendor/ has the hash that `make vendor` wrote, and each library its licence."""
    sums = dict(line.split("  ")[::-1] for line in (VENDOR / "SHA256SUMS").read_text().splitlines())
    paths = {str(path.relative_to(VENDOR)): path for path in VENDOR.rglob("*") if path.is_file()}
    found = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
    found.pop("SHA256SUMS")
    assert found == sums
    assert all((folder / "LICENSE").exists() for folder in VENDOR.iterdir() if folder.is_dir())


def test_pages_need_no_key_and_say_what_browsers_may_do(url: str) -> None:
    """Files are open, with a policy that allows this origin only; a copy that is right is not sent again."""
    names = [
        "",
        "docs",
        *(f"web/{path.name}" for path in OWN),
        "web/vendor/katex/fonts/KaTeX_Main-Regular.woff2",
    ]
    for name in names:
        answer = httpx.get(f"{url}/{name}")
        assert answer.status_code == 200, name
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        unsafe = ["style-src 'unsafe-inline'"] if name == "web/diagram.html" else []
        assert [rule for rule in policy.split("; ") if "unsafe" in rule] == unsafe, name
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        again = httpx.get(f"{url}/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == policy
    frame = httpx.get(f"{url}/web/diagram.html").headers["content-security-policy"]
    assert "sandbox allow-scripts" in frame  # an origin of its own
    assert "connect-src" not in frame
    assert httpx.get(f"{url}/web/app.js").headers["content-type"].startswith("text/javascript")
    assert httpx.head(f"{url}/").status_code == 200
    for outside in ("web/none.js", "web/../pages.py", "web/%2e%2e/pages.py", "redoc", "web"):
        answer = httpx.get(f"{url}/{outside}", headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status_code == 404, outside
        assert answer.json()["error"]["code"] == "unknown_url"
    assert httpx.post(f"{url}/").status_code == 405


def test_the_page_can_be_switched_off(engine: tuple[FakeEngine, str]) -> None:
    """Without page and live view the API's description stays, and both paths are unknown."""
    with running_gateway(gateway_config(engine[1], web_page=False, live_view=False)) as found:
        codes = {
            path: httpx.get(f"{found}/{path}").status_code for path in ("", "docs", "v1/live", "v1/models")
        }
    assert codes == {"": 404, "docs": 200, "v1/live": 404, "v1/models": 200}


def test_live_figures(engine: tuple[FakeEngine, str], url: str) -> None:
    """The engine's figures under their names, unknown ones null; with a key; asked once for all who look."""
    fake, _ = engine
    fake.live = pb.GetLiveResponse(
        load=pb.GetLoadResponse(
            num_running_reqs=3, num_waiting_reqs=2, max_running_requests=64, gen_throughput=7.5
        ),
        num_experts=4,
        top_k=2,
        layers=[
            pb.LiveLayer(
                layer=1,
                gpu_experts=[2],
                cpu_rows=[5, 0, 0, 1],
                cpu_seconds=0.0,
                cpu_calls=3,
                cpu_bytes=0,
                streamed_experts=6,
                streamed_bytes=600,
                decode_choices=8,
                exchanges=2,
                fetched_experts=4,
                fetched_bytes=400,
                fetch_hits=5,
            ),
            pb.LiveLayer(layer=2),
        ],
        costs=pb.LiveCosts(predicted_seconds=0.4, measured_seconds=0.5, link_bytes_per_second=5e10),
        steps=8,
        step_seconds=0.5,
        servers=[
            pb.LiveExpertServer(
                index=0, is_up=True, instance_id=2**60 + 1, weight_bytes=9, numa_node=-1, isa="avx2"
            ),
            pb.LiveExpertServer(index=1),
        ],
    )
    assert httpx.get(f"{url}/v1/live").status_code == 401
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        before = fake.live_calls
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: client.get(f"{url}/v1/live").json(), range(8)))
        assert fake.live_calls - before < 8
        live = answers[0]
        assert live["tokens_per_second"] == 7.5
        assert live["time_to_first_token"] is None
        assert (live["requests"]["running"], live["requests"]["gateway_in_flight"]) == (3, 0)
        experts = live["experts"]
        assert experts["streamed"] is None
        assert experts["layers"] == [
            {
                "layer": 1,
                "gpu_experts": [2],
                "cpu_rows": [5, 0, 0, 1],
                "cpu_seconds": 0.0,
                "cpu_calls": 3,
                "cpu_bytes": 0,
                "chosen": None,
                "streamed": {"experts": 6, "bytes": 600},
                "decode": {"choices": 8, "hits": 0},
                "exchanges": {"count": 2, "bytes": 0},
                "fetched": {"experts": 4, "bytes": 400, "hits": 5},
            },
            {
                "layer": 2,
                "gpu_experts": [],
                "cpu_rows": None,
                "cpu_seconds": None,
                "cpu_calls": 0,
                **dict.fromkeys(("cpu_bytes", "chosen", "streamed", "decode", "exchanges", "fetched")),
            },
        ]
        assert live["costs"] == {
            "predicted_seconds": 0.4,
            "measured_seconds": 0.5,
            "link_bytes_per_second": 5e10,
            "times_measured_again": 0,
            **dict.fromkeys(
                ("predicted_over_measured", "cpu_expert_seconds", "gpu_expert_seconds", "copy_price")
            ),
        }
        assert live["steps"] == {"count": 8, "seconds": 0.5}
        assert experts["hand_off"] is None
        assert experts["servers"][0]["instance"] == str(2**60 + 1)
        assert experts["servers"][0]["calibrated_bytes_per_second"] is None
        assert experts["servers"][0]["numa_node"] is None
        assert experts["servers"][1] == {"index": 1, "is_up": False}
        assert client.get(f"{url}/v1/live?layers=false").json()["experts"]["layers"] is None
        for wrong in ("layers=perhaps", "replica=1", "replica=-1"):
            assert client.get(f"{url}/v1/live?{wrong}").status_code == 400
        assert (live["replica"], live["replicas"]) == (0, 1)


def test_models_say_whether_images_are_taken(url: str) -> None:
    """What the page offers depends on it."""
    answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.json()["data"][0]["capabilities"] == {"vision": False}


def test_a_gateway_without_an_engine_still_serves_the_page(tmp_path: Path) -> None:
    """The page comes up while the engine loads, and the figures are a 503 until then."""
    with running_gateway(gateway_config(f"unix:{tmp_path}/nobody.sock"), wait=False) as found:
        assert httpx.get(f"{found}/").status_code == 200
        answer = httpx.get(f"{found}/v1/live")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
