"""Guards the trace of a request: one trace id from the HTTP span to the expert servers, in a collector."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.helpers.demo import demo_checkpoint
from tests.helpers.fake_programs import wait_until
from tests.helpers.otlp_collector import Collector, running_collector
from tests.helpers.stack import running_stack

pytestmark = pytest.mark.demo
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SERVICES = {"moebius-gateway", "moebius-gpu", "moebius-expert"}


def names_by_service(collector: Collector) -> dict[str, set[str]]:
    """Names of the spans of our trace that each service sent."""
    found: dict[str, set[str]] = {}
    for service, span in collector.spans_by_service():
        if span.trace_id.hex() == TRACE_ID:
            found.setdefault(service, set()).add(span.name)
    return found


def test_one_trace_crosses_all_processes(tmp_path: Path) -> None:
    """A caller's `traceparent` is followed by the gateway, the engine and both expert servers."""
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    body = {"model": "m", "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    flags = ["--expert-servers", "2", "--served-model-name", "m", "--expert-span-ratio", "1"]
    with running_collector() as collector:
        flags += ["--otlp-endpoint", collector.endpoint]
        with running_stack(demo_checkpoint(), tmp_path, *flags) as stack:
            url = f"{stack.base_url}/v1/completions"
            assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
            wait_until(lambda: names_by_service(collector).keys() >= SERVICES, 20)
        names = names_by_service(collector)
    spans = [span for span in collector.spans if span.trace_id.hex() == TRACE_ID]
    known = {span.span_id for span in spans} | {bytes.fromhex("b7ad6b7169203331")}
    assert [span.name for span in spans if span.parent_span_id not in known] == []
    assert any("prefill" in name for name in names["moebius-gpu"]), names
    assert any("decode" in name for name in names["moebius-gpu"]), names
